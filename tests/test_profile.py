"""Profiles: read, checked with file and field, and made into launchers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclsearch.errors import UserError
from cclsearch.launch.local import LocalLauncher
from cclsearch.launch.profile import list_profiles, load_profile, make_launcher


def write(project: Path, text: str, name: str = "site") -> None:
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / f"{name}.yaml").write_text(text)


def test_the_shipped_local_profile_makes_a_launcher(project: Path) -> None:
    launcher = make_launcher(load_profile("local"), framework="cpu")
    assert isinstance(launcher, LocalLauncher)
    assert launcher.framework.name == "cpu"
    assert launcher.max_parallel == 1


def test_a_profile_overrides_hardware_environment_and_framework(project: Path) -> None:
    write(
        project,
        "launcher: local\nframework: cpu\nhardware: {num_accelerators: 2, memory_gib: 1.5}\n"
        "environment: {OMP_NUM_THREADS: 2, SWITCH: true}\n"
        "knobs:\n- {name: kernels, choices: [a, b]}\nmax_parallel: 3\n",
    )
    profile = load_profile("site")
    assert profile.hardware.overrides() == {"num_accelerators": 2, "memory_gib": 1.5}
    assert profile.environment == {"OMP_NUM_THREADS": "2", "SWITCH": "1"}
    assert profile.knobs[0].choices == ("a", "b")
    assert make_launcher(profile, framework="other").max_parallel == 3
    assert "site" in list_profiles()


def test_framework_files_are_no_profiles(project: Path) -> None:
    assert not [name for name in list_profiles() if "framework" in name]
    with pytest.raises(UserError, match=r"describes a framework, not a place to run"):
        load_profile("cpu.framework")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "must be a mapping"),
        ("launcher: [\n", "cannot be read as YAML"),
        ("description: x\n", "launcher: Field required"),
        ("launcher: cloud-nine\n", "launcher must be one of .*local.*, not 'cloud-nine'"),
        (
            "launcher: local\nhardware: {num_accelerators: 0}\n",
            r"hardware.num_accelerators: .*greater than or equal to 1",
        ),
        ("launcher: local\nhardware: {gpus: 4}\n", "no field 'hardware.gpus'"),
        ("launcher: local\nknobs: [{name: Bad Name, choices: [1]}]\n", "knobs.0.name"),
    ],
)
def test_a_malformed_profile_is_one_clear_line(project: Path, text: str, words: str) -> None:
    write(project, text)
    with pytest.raises(UserError, match=words) as error:
        load_profile("site")
    assert "\n" not in str(error.value)
    assert "site" in str(error.value)


def test_a_field_that_the_launcher_does_not_know_is_named(project: Path) -> None:
    write(project, "launcher: local\npartition: gpu\n")
    with pytest.raises(UserError, match=r"site\.yaml: there is no field 'partition'"):
        make_launcher(load_profile("site"), framework="cpu")


def test_an_unknown_profile_lists_those_there_are(project: Path) -> None:
    with pytest.raises(UserError, match=r"no launcher profile 'nowhere'; there are: .*local"):
        load_profile("nowhere")
