"""`doctor`: finds what is installed, says what to do about what is missing, and shows no key."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclsearch.checks.doctor import check_gpus, examine_machine
from cclsearch.cli import main


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


def test_a_bare_machine_can_run_and_every_missing_thing_has_a_remedy(project: Path, commands: Path) -> None:
    findings = examine_machine()
    assert all(finding.check.ok for finding in findings if finding.is_required)
    assert all(finding.check.remedy for finding in findings if not finding.check.ok)
    lacking = {finding.check.name for finding in findings if not finding.check.ok}
    assert {"gpus", "slurm", "gcloud", "ssh", "chromium", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"} <= lacking


def test_installed_things_are_found(project: Path, commands: Path) -> None:
    put_command(
        commands, "nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 81559 MiB'; echo 'NVIDIA H100 80GB HBM3, 81559 MiB'"
    )
    for name in ("sbatch", "squeue", "scancel", "sacct", "ssh", "gcloud", "chromium"):
        put_command(commands, name, "exit 0")
    found = details()
    assert found["gpus"][:2] == (True, "2 x NVIDIA H100 80GB HBM3, 81559 MiB")
    assert all(found[name][0] for name in ("slurm", "ssh", "gcloud", "chromium"))
    assert "nothing is submitted" in found["slurm"][1]


def test_a_failing_driver_and_an_incomplete_slurm_are_reported(project: Path, commands: Path) -> None:
    put_command(commands, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    put_command(commands, "sbatch", "exit 0")
    found = details()
    assert not found["gpus"][0]
    assert "version mismatch" in found["gpus"][1]
    assert (found["slurm"][0], "squeue" in found["slurm"][1]) == (False, True)


def test_there_are_no_gpus_without_nvidia_smi(commands: Path) -> None:
    assert check_gpus().detail == "no command nvidia-smi"


def test_keys_are_named_and_never_shown(project: Path, monkeypatch: pytest.MonkeyPatch, cli) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret-value")
    assert main(["doctor"]) == 0
    shown = cli.out(["doctor", "--json"])
    assert "secret-value" not in shown
    assert "set (not shown)" in shown


def test_wrong_settings_make_doctor_fail(project: Path, cli) -> None:
    (project / "ccl-search.yaml").write_text("launchr: x\n")
    answer = cli.json(["doctor", "--json"], 1)
    wrong = [check for check in answer["checks"] if check["required"] and not check["ok"]]
    assert {check["name"] for check in wrong} == {"runs folder", "project"}
    assert all("launchr" in check["detail"] for check in wrong)


def test_a_runs_folder_that_cannot_exist_is_reported(project: Path) -> None:
    (project / "runs").write_text("a file in its place")
    found = details()
    assert not found["runs folder"][0]
    assert "--runs" in found["runs folder"][2]
