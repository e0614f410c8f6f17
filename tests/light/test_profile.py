"""Profiles: reading, errors that name file and field, and the launchers made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclsearch.core.content import list_profiles
from cclsearch.core.errors import UserError
from cclsearch.launch.profile import load_profile, make_launcher
from cclsearch.launch.slurm.settings import SlurmSettings


def write(project: Path, text: str, name: str = "site") -> None:
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / f"{name}.yaml").write_text(text)


def test_a_profile_overrides_hardware_environment_and_framework(project):
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


def test_framework_files_are_not_profiles(project):
    assert not [name for name in list_profiles() if "framework" in name]
    with pytest.raises(UserError, match=r"is a framework file, not a launcher profile"):
        load_profile("cpu.framework")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "must be a mapping"),
        ("launcher: [\n", r"line \d"),
        ("launcher: slurm\ntime_limit: 2001-13-45\n", "cannot be read"),
        (f"launcher: slurm\noptions: {'[' * 3000}{']' * 3000}\n", "levels deep"),
        ("launcher: slurm\npartition: a\npartition: b\n", "the key 'partition' is given twice"),
        ("description: x\n", "launcher: is missing"),
        ("launcher: cloud-nine\n", "launcher must be one of .*local.*, not 'cloud-nine'"),
        (
            "launcher: local\nhardware: {num_accelerators: 0}\n",
            r"hardware.num_accelerators: .*greater than or equal to 1",
        ),
        ("launcher: local\nhardware: {gpus: 4}\n", "hardware.gpus: is not a known field"),
        ("launcher: local\nknobs: [{name: Bad Name, choices: [1]}]\n", "knobs.0.name"),
    ],
)
def test_a_malformed_profile_is_one_clear_line(project, text, words):
    write(project, text)
    with pytest.raises(UserError, match=words) as error:
        load_profile("site")
    assert "\n" not in str(error.value)
    assert "site" in str(error.value)


def test_an_invalid_profile_is_listed_with_the_reason_and_hides_no_other(project, cli):
    write(project, "launcher: slurm\ntime_limit: 2001-13-45\n", "dates")
    write(project, f"launcher: slurm\noptions: {'[' * 3000}{']' * 3000}\n", "deep")
    out = cli.out(["launcher", "list"]).splitlines()
    lines = {line.split()[0]: line for line in out if line[:1].strip()}
    assert lines["dates"].endswith(f"[{project / 'launchers' / 'dates.yaml'}]")
    assert "cannot be read" in lines["dates"]
    assert "levels deep" in lines["deep"]
    assert "this machine" in lines["local"]


def test_unquoted_times_and_leading_zeros_are_read_as_written(project):
    write(
        project,
        "launcher: slurm\ntime_limit: 12:00:00\nqueue_limit: 1:30:00\naccount: 0123\nmem: 0\nmax_jobs: 12\n"
        "poll_s: 2.5\noptions: {deadline: 08:30, nice: 100}\nenvironment: {OFFSET: 010, AT: -1:30}\n",
    )
    profile = load_profile("site")
    settings = profile.read_settings(SlurmSettings)
    assert (settings.time_limit, settings.queue_limit, settings.account, settings.mem) == (720, 90, "0123", "0")
    assert (settings.max_jobs, settings.poll_s) == (12, 2.5)
    assert settings.options == {"deadline": "08:30", "nice": 100}
    assert profile.environment == {"OFFSET": "010", "AT": "-1:30"}


def test_an_unknown_field_is_named(project):
    write(project, "launcher: local\npartition: gpu\n")
    with pytest.raises(UserError, match=r"site\.yaml: partition: is not a known field"):
        make_launcher(load_profile("site"), framework="cpu")
