"""The files of a trial that pages show as text: only the run's own files, without secrets."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import JobFileError, open_job_file
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import plain
from cclsearch.record.trial import Trial
from cclsearch.run.folder import Run

MAX_FILES = 200
MAX_DEPTH = 3
# The end of a log shows what happened.
SHOWN_BYTES = 2**20
"""Number of last bytes shown of a longer file."""
TEXT_SUFFIXES = (".json", ".jsonl", ".log", ".sh", ".txt", ".yaml", ".yml", ".csv", ".out", ".err")


@dataclass(frozen=True)
class EvidenceFile:
    """One file of a trial."""

    path: str
    """Relative to the run folder."""
    num_bytes: int
    is_text: bool

    @property
    def size(self) -> str:
        """`812 B`, `14.2 kB`, `3.1 MB`."""
        for unit, size in (("MB", 1e6), ("kB", 1e3)):
            if self.num_bytes >= size:
                return f"{self.num_bytes / size:.1f} {unit}"
        return f"{self.num_bytes} B"


def list_files(run: Run, trial: Trial) -> list[EvidenceFile]:
    """The regular files in the trial's folder, and the LLM's turn that proposed it; links are left out."""
    root = run.trial_folder(trial.number)
    turns = [] if trial.turn is None else [run.folder / "turns" / f"{trial.turn:04d}.json"]
    found = []
    for path in itertools.chain(_walk(root), turns):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                name = path.relative_to(run.folder).as_posix()
                found.append(EvidenceFile(name, status.st_size, path.name.endswith(TEXT_SUFFIXES)))
        if len(found) == MAX_FILES:
            break
    return found


def _walk(root: Path) -> Iterator[Path]:
    """The files under a folder, not deeper than `MAX_DEPTH` folders; no link to a folder is followed."""
    for base, folders, names in os.walk(root):
        folders[:] = sorted(folders) if len(Path(base).relative_to(root).parts) < MAX_DEPTH else []
        yield from (Path(base, name) for name in sorted(names))


def read_text(run: Run, trial: Trial, path: str) -> str:
    """The end of one of the trial's files as plain text with secrets masked; UserError if it is not one of them."""
    if not any(file.path == path and file.is_text for file in list_files(run, trial)):
        raise UserError(f"trial {trial.number} has no such file of text")
    try:
        with open_job_file(run.folder / path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - SHOWN_BYTES))
            text = file.read(SHOWN_BYTES).decode(errors="replace")
    except (OSError, JobFileError) as error:
        raise UserError(f"the file cannot be read: {error}") from None
    cut = f"[the last {SHOWN_BYTES:,} of {size:,} bytes]\n" if size > SHOWN_BYTES else ""
    return cut + plain(redact(text))
