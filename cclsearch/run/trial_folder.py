"""A trial's folder: its files before it runs, the files of earlier attempts, and the masking of secrets in its logs."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO, cast

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.job_file import has_job_file
from cclsearch.core.redact import redact
from cclsearch.launch.base import Job
from cclsearch.launch.collect import FAILURES_FOLDER
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE, STDERR_FILE, STDOUT_FILE, TRACE_FOLDER

SCRIPT_FILE = "job.sh"
METRICS_FILE = "metrics.json"
ADMISSION_FILE = "admission.json"
JUDGING_ERROR_FILE = "judging_error.txt"
"""Traceback of an error of ccl-search while it judged the trial; secrets are masked."""
ATTEMPTS_FOLDER = "attempts"
MAX_LINE_CHARS = 1 << 20
"""Characters of a log that are in memory at once."""

_FILES_OF_AN_ATTEMPT = (
    *(RESULT_FILE, STDOUT_FILE, STDERR_FILE, FAILURES_FOLDER, TRACE_FOLDER, METRICS_FILE, ADMISSION_FILE),
    JUDGING_ERROR_FILE,
)


def prepare_folder(job: Job, script: str) -> None:
    """Prepare the trial's folder for this attempt; files of earlier attempts move to `attempts/`."""
    folder = job.trial_dir
    folder.mkdir(parents=True, exist_ok=True)
    _move_earlier_attempt(folder, job.attempt)
    write_atomically(folder / CONFIG_FILE, job.payload.model_dump_json(indent=1) + "\n")
    write_atomically(folder / SCRIPT_FILE, script)


def replace_file(path: Path, text: str) -> None:
    """Write a file of ours into a trial's folder; a folder that the job left at its path is moved aside."""
    if path.is_dir() and not path.is_symlink():
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(aside)
    write_atomically(path, text)


def scrub_logs(folder: Path) -> None:
    """Mask secrets, known by value or by shape, in a finished trial's logs, line by line to bound memory."""
    for name in (STDOUT_FILE, STDERR_FILE):
        path = folder / name
        if path.is_file() and not path.is_symlink():
            _scrub(path)


def _scrub(path: Path) -> None:
    clean = path.with_name(f".{path.name}.clean")
    changed = False
    with _open_text(path, "r") as source, _open_text(clean, "w") as target:
        while line := source.readline(MAX_LINE_CHARS):
            masked = redact(line)
            changed |= masked != line
            target.write(masked)
    if changed:
        clean.replace(path)
    else:
        clean.unlink()


def _open_text(path: Path, mode: str) -> TextIO:
    return cast(TextIO, path.open(mode, encoding="utf-8", errors="surrogateescape", newline=""))


def _move_earlier_attempt(folder: Path, attempt: int) -> None:
    left = [name for name in _FILES_OF_AN_ATTEMPT if has_job_file(folder / name)]
    # A job may have left a folder of that name, which a file cannot replace.
    left += [name for name in (CONFIG_FILE, SCRIPT_FILE) if (folder / name).is_dir()]
    if not left:
        return
    number = max(attempt - 1, 1)
    while (aside := folder / ATTEMPTS_FOLDER / str(number)).exists():
        number += 1
    aside.mkdir(parents=True)
    for name in left:
        (folder / name).rename(aside / name)
