"""Masks secrets in the logs of ended trials beside the search, so that a large log holds nothing up.

What an interrupted search left is masked when it goes on. Until then, whatever reads a log masks what it reads.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from cclsearch.core.job_file import RESULT_BYTES, JobFileError, open_job_file, read_job_text
from cclsearch.core.redact import Masker
from cclsearch.record.state import RunState

PIECE_BYTES = 1 << 18
"""Bytes of a log that are in memory at once; a line that is longer is masked in parts."""
DONE_FILE = "masked_logs.txt"
"""In the run folder: inode, size and time in ns of each log that is masked, one a line."""
TRIALS_FOLDER = "trials"
_LOGS = ("*.log", "failures/*.json", "again-*/*.log")
_WAIT_S = 1.0

moving = threading.Lock()
"""Held while a trial's files are moved, and while a masked log takes the place of the log that it was made of."""


def scrub_logs(folder: Path) -> None:
    """Mask secrets, known by value or by shape, in the logs of an ended trial or attempt, in bounded memory."""
    for path in _find_logs(folder):
        with contextlib.suppress(FileNotFoundError, JobFileError):
            _scrub(path)


class LogMasker:
    """A thread that masks the logs of one run, in the order in which their folders are given."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._queue: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._changed = threading.Condition()
        self._done: set[str] | None = None

    def add(self, folder: Path) -> None:
        """Mask the logs of this folder soon."""
        with self._changed:
            self._waiting += 1
        self._queue.put(folder)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mask logs", daemon=True)
            self._thread.start()

    def add_ended(self, state: RunState) -> None:
        """Mask the logs of every attempt that has ended; those of running ones still grow."""
        running = {trial.number: trial.attempt for trial in state.unfinished}
        for folder in sorted((self._folder / TRIALS_FOLDER).glob("[0-9]*")):
            current = running.get(int(folder.name)) if folder.name.isdigit() else None
            for attempt in sorted(folder.glob("attempts/*")):
                if current is None or not attempt.name.startswith(str(current)):
                    self.add(attempt)
            if current is None:
                self.add(folder)

    def finish(self, meanwhile: Callable[[], None]) -> None:
        """Wait until all is masked; calls `meanwhile` every second."""
        while not self._is_done():
            meanwhile()

    def _is_done(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, _WAIT_S)

    def _work(self) -> None:
        while True:
            folder = self._queue.get()
            with contextlib.suppress(OSError):  # such as a full disk: `resume` masks what is left
                self._mask(folder)
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def _mask(self, folder: Path) -> None:
        done = self._read_done()
        for path in _find_logs(folder):
            with contextlib.suppress(FileNotFoundError, JobFileError):
                if _identity(path.lstat()) in done:
                    continue
                _scrub(path)
                identity = _identity(path.lstat())
                done.add(identity)
                with contextlib.suppress(OSError):  # without its line, `resume` looks at the log again
                    _append_line(self._folder / DONE_FILE, identity)

    def _read_done(self) -> set[str]:
        if self._done is None:
            try:
                self._done = set(read_job_text(self._folder / DONE_FILE, RESULT_BYTES).splitlines())
            except (OSError, JobFileError):  # the run folder is within a job's reach
                self._done = set()
        return self._done


def _append_line(path: Path, line: str) -> None:
    """Append to a file without waiting for a reader and without following a link; OSError if that is impossible."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def _find_logs(folder: Path) -> Iterator[Path]:
    for pattern in _LOGS:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                yield path


def _identity(status: os.stat_result) -> str:
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _scrub(path: Path) -> None:
    masker, changed = Masker(), False
    source = open_job_file(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # a path that no job can prepare
    clean = Path(name)
    try:
        with source, os.fdopen(descriptor, "wb") as target:
            while piece := source.read(PIECE_BYTES):
                piece += source.readline(PIECE_BYTES)
                masked = masker.mask(piece)
                changed |= masked != piece
                target.write(masked)
            opened = os.fstat(source.fileno())
        if changed:
            clean.chmod(0o644)
            with moving:
                if os.path.samestat(opened, path.lstat()):  # else it was moved aside meanwhile
                    clean.replace(path)
    finally:
        clean.unlink(missing_ok=True)
