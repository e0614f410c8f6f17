"""Launchers, waiting and words that the parts of `slurm.py` share."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cclsearch.launch.base import Handle, JobState, JobStatus
from cclsearch.launch.slurm.job_files import RunScript, classify_trial
from cclsearch.launch.slurm.launcher import SlurmLauncher
from cclsearch.launch.slurm.settings import SlurmSettings

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "slurm" / "trial_script.py"


def make_launcher(run_dir: Path, **settings: Any) -> SlurmLauncher:
    fields = {"poll_s": 1.0, "grace_s": 5, "cpu_only": True, "python": sys.executable, **settings}
    script = RunScript(SCRIPT, "process", {})
    return SlurmLauncher(SlurmSettings.model_validate(fields), script, classify=classify_trial, run_dir=run_dir)


def follow(
    launcher: SlurmLauncher, handles: Sequence[Handle], limit_s: float = 240
) -> dict[str, tuple[float, JobStatus]]:
    """Poll until all jobs are done; return job name -> (Unix time of that poll, status)."""
    ends: dict[str, tuple[float, JobStatus]] = {}
    deadline = time.monotonic() + limit_s
    while len(ends) < len(handles) and time.monotonic() < deadline:
        for handle, status in zip(handles, launcher.poll(handles), strict=True):
            if status.state is JobState.DONE and handle.job_name not in ends:
                ends[handle.job_name] = (time.time(), status)
        time.sleep(0.1)
    return ends


def wait_for(path: Path, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def name_end(status: JobStatus | None) -> str:
    if status is None:
        return "no end in time"
    return f"`{status.failure.kind.value}`: {status.failure.message}" if status.failure else "valid result"
