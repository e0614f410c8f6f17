"""A local job inherits the variables that trials need, those that its profile names, and no secret."""

from __future__ import annotations

import pytest

from cclsearch.core.errors import UserError
from cclsearch.launch.environment import inherited_environment
from cclsearch.launch.local_settings import LocalSettings
from cclsearch.launch.profile import load_profile, profile_from_mapping


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_SITE_FLAG", "BILLING_ACCOUNT", "HF_TOKEN", "MY_DB_PASSWORD", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("CCL_TRIAL_DIR", "/somewhere")
    monkeypatch.setenv("RANK", "3")


def test_only_known_variables_are_inherited() -> None:
    inherited = inherited_environment()
    assert {"PATH", "HOME", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"} <= set(inherited)
    unwanted = {"MY_SITE_FLAG", "BILLING_ACCOUNT", "HF_TOKEN", "MY_DB_PASSWORD", "CCL_TRIAL_DIR", "RANK"}
    assert not unwanted & set(inherited)


def test_a_profile_passes_more_and_a_secret_only_by_its_exact_name() -> None:
    assert inherited_environment(["MY_*"])["MY_SITE_FLAG"] == "value of MY_SITE_FLAG"
    assert "MY_DB_PASSWORD" not in inherited_environment(["MY_*"])
    assert inherited_environment(["HF_TOKEN"])["HF_TOKEN"] == "value of HF_TOKEN"


@pytest.mark.parametrize("wrong", ["A B", "", "*", "A;rm", "CCL_TRIAL_DIR", "CCL_*", "A*B"])
def test_what_is_not_a_name_or_prefix_is_refused(wrong: str) -> None:
    profile = profile_from_mapping({"launcher": "local", "pass_environment": [wrong]}, name="mine")
    with pytest.raises(UserError, match="pass_environment"):
        profile.read_settings(LocalSettings)


@pytest.mark.parametrize("launcher", ["local", "slurm", "tpu-vm"])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HF_TOKEN", "hf_abc", "looks like a secret"),
        ("A-B", "1", "not the name of a variable"),
        ("A", "1\n2", "line break"),
    ],
)
def test_no_launcher_takes_a_secret_or_malformed_variable_of_a_profile(
    launcher: str, name: str, value: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        profile_from_mapping({"launcher": launcher, "environment": {name: value}}, name="mine")


def test_shipped_profiles_are_valid() -> None:
    assert load_profile("local").environment.get("HF_TOKEN") is None
