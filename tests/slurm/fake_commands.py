"""Slurm's commands as shell scripts on the PATH: a test sets what they list and sees what they got."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cclsearch.launch.slurm.job_files import RunScript
from cclsearch.launch.slurm.launcher import SlurmLauncher
from cclsearch.launch.slurm.settings import SlurmSettings

SEPARATOR = "\x1f"
SUBMITTED = "2026-01-02T03:04:05"
PROGRAM = RunScript(Path(__file__), "process", {})


class FakeSlurm:
    """A folder of scripts, first on the PATH: jobs get the number 77, and the queue and accounting list what is set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        self.write("sbatch", "echo Submitted batch job 77")
        self.write("squeue", f"cat {folder}/queue 2>/dev/null; true")
        self.write("sacct", f"cat {folder}/accounts 2>/dev/null; true")
        self.write("scancel", f'echo "$*" >>{folder}/cancelled; : >{folder}/queue')
        self.write("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
        self.write("sinfo", "true")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.folder / name).chmod(0o755)

    def list_jobs(self, *rows: str) -> None:
        (self.folder / "queue").write_text("".join(f"{row}\n" for row in rows))

    def account(self, *rows: str) -> None:
        (self.folder / "accounts").write_text("".join(f"{row}\n" for row in rows))

    @property
    def cancelled(self) -> list[str]:
        path = self.folder / "cancelled"
        return path.read_text().splitlines() if path.exists() else []


def row(job_id: str, state: str, folder: Path | str, name: str, submitted: str = SUBMITTED) -> str:
    """Return a line of squeue as the launcher asks for it."""
    return SEPARATOR.join([job_id, state, "None", "9:00", "n", submitted, str(folder), "", name])


def open_launcher(
    run_dir: Path | None = None, kind: type[SlurmLauncher] = SlurmLauncher, **fields: object
) -> SlurmLauncher:
    """Return a launcher as a resumed search opens it: it knows nothing but the files."""
    settings = SlurmSettings.model_validate({"cpu_only": True, "poll_s": 0.0001, **fields})
    return kind(settings, PROGRAM, run_dir=run_dir)
