"""The files of a trial that pages show as text: what the run left, without secrets, and never anything else."""

from __future__ import annotations

import os
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
SHOWN_BYTES = 2**20
"""Of a longer file, the last so many bytes are shown: the end of a log says what happened."""
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
    found: list[EvidenceFile] = []
    folders = [(run.trial_folder(trial.number), 0)]
    while folders and len(found) < MAX_FILES:
        folder, depth = folders.pop(0)
        for item in _scan(folder):
            if item.is_dir(follow_symlinks=False) and depth < MAX_DEPTH:
                folders.append((Path(item.path), depth + 1))
            elif item.is_file(follow_symlinks=False):
                found.append(_describe(run.folder, Path(item.path)))
    if trial.turn is not None:
        turn = run.folder / "turns" / f"{trial.turn:04d}.json"
        found += [_describe(run.folder, turn)] if turn.is_file() and not turn.is_symlink() else []
    return found[:MAX_FILES]


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return sorted(items, key=lambda item: item.name)
    except OSError:
        return []


def _describe(root: Path, path: Path) -> EvidenceFile:
    try:
        size = path.lstat().st_size
    except OSError:
        size = 0
    return EvidenceFile(path.relative_to(root).as_posix(), size, path.name.endswith(TEXT_SUFFIXES))


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
