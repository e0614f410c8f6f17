"""Checks of this machine, its devices and environment, and of the target of a search."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cclsearch.card.hardware import find_accelerator
from cclsearch.card.load import load_card
from cclsearch.checks.doctor import check_gpus, examine_machine
from cclsearch.checks.probe import probe_device
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.values import Provenance
from cclsearch.launch.environment import inherited_environment
from cclsearch.launch.local_setup import LocalSettings
from cclsearch.launch.profile import load_profile, profile_from_mapping
from cclsearch.plan.target import choose_target
from cclsearch.run.folder import load_run


def put_command(folder: Path, name: str, script: str) -> None:
    """Put an executable of that name on the PATH of the examined machine."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def details() -> dict[str, tuple[bool, str, str]]:
    return {f.check.name: (f.check.ok, f.check.detail, f.check.remedy) for f in examine_machine()}


def test_a_bare_machine_can_run_and_every_missing_thing_has_a_remedy(project, commands):
    findings = examine_machine()
    assert all(finding.check.ok for finding in findings if finding.is_required)
    assert all(finding.check.remedy for finding in findings if not finding.check.ok)
    lacking = {finding.check.name for finding in findings if not finding.check.ok}
    assert {"gpus", "slurm", "gcloud", "ssh", "chromium", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"} <= lacking


def test_installed_things_are_found(project, commands):
    put_command(
        commands, "nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 81559 MiB'; echo 'NVIDIA H100 80GB HBM3, 81559 MiB'"
    )
    for name in ("sbatch", "squeue", "scancel", "sacct", "ssh", "gcloud", "chromium"):
        put_command(commands, name, "exit 0")
    found = details()
    assert found["gpus"][:2] == (True, "2 x NVIDIA H100 80GB HBM3, 81559 MiB")
    assert all(found[name][0] for name in ("slurm", "ssh", "gcloud", "chromium"))
    assert "nothing is submitted" in found["slurm"][1]


def test_a_failing_driver_and_an_incomplete_slurm_are_reported(project, commands):
    put_command(commands, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    put_command(commands, "sbatch", "exit 0")
    found = details()
    assert not found["gpus"][0]
    assert "version mismatch" in found["gpus"][1]
    assert (found["slurm"][0], "squeue" in found["slurm"][1]) == (False, True)


def test_there_are_no_gpus_without_nvidia_smi(commands):
    assert check_gpus().detail == "no command nvidia-smi"


def test_keys_are_named_and_never_shown(project, monkeypatch, cli):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret-value")
    assert main(["doctor"]) == 0
    shown = cli.out(["doctor", "--json"])
    assert "secret-value" not in shown
    assert "set (not shown)" in shown


def test_wrong_settings_make_doctor_fail(project, cli):
    (project / "ccl-search.yaml").write_text("launchr: x\n")
    answer = cli.json(["doctor", "--json"], 1)
    wrong = [check for check in answer["checks"] if check["required"] and not check["ok"]]
    assert {check["name"] for check in wrong} == {"runs folder", "project"}
    assert all("launchr" in check["detail"] for check in wrong)


def test_a_runs_folder_that_cannot_exist_is_reported(project):
    (project / "runs").write_text("a file in its place")
    found = details()
    assert not found["runs folder"][0]
    assert "--runs" in found["runs folder"][2]


def test_a_probed_device_is_an_accelerator_of_the_project(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    found = probe_device(with_collectives=False, budget_s=0.003)
    assert found.best_rate("fp32") > 1e8
    assert found.copy_bytes_per_s > 1e7
    assert found.launch_us > 0
    assert found.all_reduce_gbps is None
    (tmp_path / "hardware.yaml").write_text(yaml.safe_dump(found.as_entry("my-card")))
    (tmp_path / "launchers").mkdir()
    monkeypatch.chdir(tmp_path)
    chip = find_accelerator("my-card")
    assert chip.nominal
    assert chip.peak_flops["fp32"] == pytest.approx(found.best_rate("fp32"), rel=1e-3)


def test_a_name_that_hardware_yaml_cannot_have_is_refused(cli):
    assert "--name must be" in cli.err(["device", "probe", "--name", "My Card: 1"])


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_SITE_FLAG", "BILLING_ACCOUNT", "HF_TOKEN", "MY_DB_PASSWORD", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("CCL_TRIAL_DIR", "/somewhere")
    monkeypatch.setenv("RANK", "3")


def test_only_known_variables_are_inherited():
    inherited = inherited_environment()
    assert {"PATH", "HOME", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"} <= set(inherited)
    unwanted = {"MY_SITE_FLAG", "BILLING_ACCOUNT", "HF_TOKEN", "MY_DB_PASSWORD", "CCL_TRIAL_DIR", "RANK"}
    assert not unwanted & set(inherited)


def test_a_profile_passes_more_and_a_secret_only_by_its_exact_name():
    assert inherited_environment(["MY_*"])["MY_SITE_FLAG"] == "value of MY_SITE_FLAG"
    assert "MY_DB_PASSWORD" not in inherited_environment(["MY_*"])
    assert inherited_environment(["HF_TOKEN"])["HF_TOKEN"] == "value of HF_TOKEN"


@pytest.mark.parametrize("wrong", ["A B", "", "*", "A;rm", "CCL_TRIAL_DIR", "CCL_*", "A*B"])
def test_what_is_not_a_name_or_prefix_is_refused(wrong):
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
def test_no_launcher_takes_a_secret_or_malformed_variable_of_a_profile(launcher, name, value, said):
    with pytest.raises(UserError, match=said):
        profile_from_mapping({"launcher": launcher, "environment": {name: value}}, name="mine")


def test_shipped_profiles_are_valid():
    assert load_profile("local").environment.get("HF_TOKEN") is None


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set PATH to one empty folder and return it; a test adds the commands that its machine has."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_slurm_is_used_only_if_a_profile_is_named(project, tools, cli):
    add_tool(tools, "sbatch", f"echo called > {project}/submitted")
    shown = cli.out(["run", "--workload", "wl2", "--budget", "2", "--name", "r"])
    assert "to run on Slurm, add `--launcher slurm-generic`; without it nothing is submitted" in shown
    assert not (project / "submitted").exists()
    assert load_run(project / "runs" / "r").spec.provenance is Provenance.RECORDED


def test_a_machine_with_enough_accelerators_runs_trials_locally(project, tools):
    card = load_card("wl2")
    assert choose_target(card, launcher=None).recording is not None
    add_tool(tools, "nvidia-smi", "for n in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do echo GPU $n: A100; done")
    target = choose_target(card, launcher=None)
    assert target.recording is None
    assert target.profile.launcher == "local"


def test_without_hardware_or_recording_trials_are_simulated_and_the_user_is_told(project, tools):
    target = choose_target(load_card("wl3"), launcher=None)
    assert target.profile.launcher == "simulate"
    [note] = target.notes
    for words in ("16 x a100-40", "this machine has none", "trials are simulated", "--launcher NAME"):
        assert words in note


def test_nothing_is_simulated_unasked_if_nobody_watches(project, tools):
    with pytest.raises(UserError, match="`launcher: simulate`, which computes figures"):
        choose_target(load_card("wl3"), launcher=None, may_simulate=False)
    assert choose_target(load_card("wl3"), launcher="simulate", may_simulate=False).profile.launcher == "simulate"
    assert choose_target(load_card("wl2"), launcher=None, may_simulate=False).recording is not None


def test_too_few_local_accelerators_give_a_warning(project, tools):
    [warning] = choose_target(load_card("wl2"), launcher="local").notes
    assert "needs 16 x a100-40, but this machine has none" in warning
    assert choose_target(load_card("tiny"), launcher="local").notes == ()


def test_in_allocation_needs_a_slurm_allocation(project, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match="SLURM_JOB_ID is not set"):
        choose_target(load_card("wl2"), launcher=None, in_allocation=True)


def test_an_unknown_profile_lists_only_profiles(project, cli):
    error = cli.err(["run", "--workload", "wl2", "--launcher", "nope"])
    assert "slurm-generic" in error
    assert "framework" not in error
