"""A trial's folder: its files before and after it runs, and the files of earlier attempts."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from cclsearch.core.atomic_file import sync_folder, write_atomically
from cclsearch.core.job_file import JobFileError, open_job_file
from cclsearch.launch.base import Job, JobStatus
from cclsearch.launch.collect import EXIT_FILE, FAILURES_FOLDER
from cclsearch.launch.contract import CONFIG_FILE, EVIDENCE_FILE, RESULT_FILE, STDERR_FILE, STDOUT_FILE, TRACE_FOLDER
from cclsearch.run.log_masking import moving
from cclsearch.scoring.outcome import Outcome

SCRIPT_FILE = "job.sh"
METRICS_FILE = "metrics.json"
ADMISSION_FILE = "admission.json"
JUDGING_ERROR_FILE = "judging_error.txt"
"""Traceback of an error of ccl-search while it judged the trial; secrets are masked."""
ATTEMPTS_FOLDER = "attempts"

ENDED_FILE = "ended.json"
"""File in an attempt's folder with its status, once its files were moved to the trial's folder."""

_MOVED_FIRST = (STDOUT_FILE, STDERR_FILE, EXIT_FILE, FAILURES_FOLDER, TRACE_FOLDER, EVIDENCE_FILE)
_FILES_OF_AN_ATTEMPT = (RESULT_FILE, *_MOVED_FIRST, METRICS_FILE, ADMISSION_FILE, JUDGING_ERROR_FILE, ENDED_FILE)


def attempt_folder(trial_folder: Path, attempt: int) -> Path:
    """Return the folder that an attempt's job writes to: a job that Slurm starts again changes nothing that is read."""
    return trial_folder / ATTEMPTS_FOLDER / str(attempt)


def prepare_folder(job: Job, script: str) -> None:
    """Prepare the attempt's folder; an earlier attempt's files at the trial's own paths move back to it."""
    # Some launchers run nothing, and write to the trial's folder.
    folder, is_own = job.trial_dir, job.trial_dir.parent.name == ATTEMPTS_FOLDER
    trial_folder = folder.parent.parent if is_own else folder
    for place in (trial_folder, *((folder.parent, folder) if is_own else ())):
        _make_folder(place)
    _move_evidence(trial_folder, trial_folder / ATTEMPTS_FOLDER, max(job.attempt - 1, 1))
    if is_own:
        _move_evidence(folder, folder.parent, job.attempt)  # of an attempt that the ledger does not know
    for place in dict.fromkeys((trial_folder, folder)):
        replace_file(place / CONFIG_FILE, job.payload.model_dump_json(indent=1) + "\n")
        replace_file(place / SCRIPT_FILE, script)


def publish_attempt(trial_folder: Path, folder: Path, status: JobStatus) -> None:
    """Move an ended attempt's files to the trial's folder, where they are read; `result.json` last.

    The status is written first: if a kill interrupts this, `read_published` has it, and a second call moves the rest.
    A file of the same name stays: a job that is started again may write another one.
    """
    if folder == trial_folder or not folder.is_dir():
        return
    if read_published(folder) is None:
        replace_file(folder / ENDED_FILE, status.model_dump_json(indent=1))
    with moving:
        for name in (*_MOVED_FIRST, RESULT_FILE):
            if os.path.lexists(folder / name) and not os.path.lexists(trial_folder / name):
                os.rename(folder / name, trial_folder / name)
    sync_folder(trial_folder)


def hash_evidence(folder: Path) -> str:
    """Return the SHA-256 of names and contents of the trial's request log and traces; empty if it has none."""
    found = []
    for path in (folder / EVIDENCE_FILE, *sorted((folder / TRACE_FOLDER).rglob("[!.]*"))):  # hidden: our own indexes
        with contextlib.suppress(FileNotFoundError, PermissionError, JobFileError), open_job_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            found.append(f"{path.relative_to(folder)} {digest}\n")
    return hashlib.sha256("".join(found).encode()).hexdigest() if found else ""


def seal_files(folder: Path) -> None:
    """Take the permission to write from every file of a judged trial; its folders can still be removed."""
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # such as a file of another user, from a container
            if path.is_file() and not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)


def read_published(folder: Path) -> JobStatus | None:
    """Return the status of an attempt whose files were moved to the trial's folder; None if they were not."""
    return JobStatus.read(folder / ENDED_FILE)


def replace_file(path: Path, text: str) -> None:
    """Write a file of ours into a trial's folder; a folder that a job left at its path is moved aside."""
    if path.is_dir() and not path.is_symlink():
        _move_aside(path)
    write_atomically(path, text)


def _make_folder(path: Path) -> None:
    """Make a folder of ours; a file, or a link to elsewhere, that a job left at its path is moved aside."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
        _move_aside(path)
    path.mkdir(parents=True, exist_ok=True)


def _move_aside(path: Path) -> None:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    path.rename(aside)


def write_outcome_files(folder: Path, outcome: Outcome, traceback: str = "") -> None:
    """Write `metrics.json` and `admission.json` into the trial's folder, for readers; the ledger has the same facts.

    `traceback` is of an error in judging; `judging_error.txt` has it until the trial is judged.
    """
    _make_folder(folder)
    replace_file(folder / METRICS_FILE, outcome.model_dump_json(indent=1, exclude={"admission"}) + "\n")
    if outcome.admission:
        replace_file(folder / ADMISSION_FILE, outcome.admission.model_dump_json(indent=1) + "\n")
    if traceback:
        replace_file(folder / JUDGING_ERROR_FILE, traceback)


def _move_evidence(folder: Path, attempts: Path, number: int) -> None:
    """Move an earlier attempt's files to the folder of that number, or to a new one if it has such files itself."""
    left = [name for name in _FILES_OF_AN_ATTEMPT if os.path.lexists(folder / name)]
    if not left:
        return
    aside, copies = attempts / str(number), 0
    while any(os.path.lexists(aside / name) for name in left):
        copies += 1
        aside = attempts / f"{number}.{copies}"
    aside.mkdir(parents=True, exist_ok=True)
    with moving:
        for name in left:
            (folder / name).rename(aside / name)
