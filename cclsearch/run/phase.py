"""The phase of a running trial, as its run script or its folder shows it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cclsearch.core.content import trial_folder
from cclsearch.core.job_file import JobFileError, has_job_file, read_job_text
from cclsearch.launch.contract import PHASE_FILE, STDERR_FILE, STDOUT_FILE, TRACE_FOLDER, TrialPhase
from cclsearch.record.trial import Trial
from cclsearch.run.trial_folder import ENDED_FILE, attempt_folder

_MAX_BYTES = 64


def find_log_folder(run_folder: Path, trial: Trial) -> Path:
    """The folder with the logs of a trial's last attempt: its own while it runs, the trial's once it has ended."""
    folder = trial_folder(run_folder, trial.number)
    own = attempt_folder(folder, max(trial.attempt, 1))
    names = (STDOUT_FILE, STDERR_FILE)
    return own if any(has_job_file(own / name) for name in names) or not folder.is_dir() else folder


def read_phase(run_folder: Path, trial: Trial) -> str:
    """Return the phase of an unfinished trial: as its script says, else as its folder shows; neither is trusted."""
    if trial.handle is None:
        return "waiting"
    folder = attempt_folder(trial_folder(run_folder, trial.number), max(trial.attempt, 1))
    if has_job_file(folder / ENDED_FILE):
        return "evaluating"
    with contextlib.suppress(OSError, JobFileError, ValueError):
        return TrialPhase(read_job_text(folder / PHASE_FILE, _MAX_BYTES).strip()).value
    if _has_entries(folder / TRACE_FOLDER):
        return TrialPhase.PROFILING.value
    has_log = any(has_job_file(folder / name) for name in (STDOUT_FILE, STDERR_FILE))
    return "running" if has_log else "submitted"


def _has_entries(folder: Path) -> bool:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return next(entries, None) is not None
    return False
