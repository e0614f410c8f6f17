"""Mask secrets in the logs of ended trials beside the search, so that a large log delays nothing.

`resume` masks the logs that an interrupted search left. Until then, every reader masks the logs that it reads.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import queue
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from cclsearch.core.atomic_file import NEW_FILE_MODE
from cclsearch.core.content import TRIALS_FOLDER
from cclsearch.core.job_file import RESULT_BYTES, JobFileError, open_job_file, open_to_append, read_job_text
from cclsearch.core.secrets.redact import MASK, Masker, redact
from cclsearch.core.text import count_of
from cclsearch.launch.contract import EVIDENCE_FILE, TRACE_FOLDER
from cclsearch.record.state import RunState

PIECE_BYTES = 1 << 18
"""Bytes of a log that are in memory at once; a line that is longer is masked in parts."""
# A secret must not be cut in two.
_TAIL_BYTES = 1 << 14
"""Largest part of a long line, in bytes, that waits for the next piece."""
DONE_FILE = "masked_logs.txt"
"""File in the run folder: inode, size and time in ns of each masked log, one a line."""
PREFIX = ".masking-"
"""Start of the name of a file that is written to take the place of one with secrets; it contains none itself."""
EVIDENCE = (EVIDENCE_FILE, f"{TRACE_FOLDER}/**/*")
_PATTERNS = ("*", "failures/*", "again-*/*", *EVIDENCE[1:])
_SUFFIXES = (".log", ".txt", ".out", ".err", ".json", ".jsonl", ".yaml", ".yml", ".csv", ".toml", ".html")
"""Endings of the names of text, also with `.gz`, which jobs and frameworks leave in a trial's folder."""
# A small packed file may unpack to any size.
_MAX_BYTES = 1 << 33
"""Bytes of one unpacked file that are searched."""
_WAIT_S = 1.0
_LONG_WAIT_S = 10 * _WAIT_S
"""Seconds of waiting at the end of a search after which a line gives the reason."""

moving = threading.Lock()
"""Held while a trial's files move, and while a masked log replaces its original."""


def scrub_logs(folder: Path, patterns: tuple[str, ...] = _PATTERNS) -> None:
    """Mask secrets, known by value or by shape, in the logs of an ended trial or attempt, in bounded memory."""
    _rename_files(folder)
    for path in _find_logs(folder, patterns):
        with contextlib.suppress(FileNotFoundError, PermissionError, JobFileError):
            _scrub(path)


def scrub_result(path: Path) -> None:
    """Mask secrets in a job's `result.json`, before its hash is recorded; a file that is too large is refused later."""
    with contextlib.suppress(OSError, JobFileError):
        if path.lstat().st_size <= RESULT_BYTES:
            _scrub(path)


class LogMasker:
    """A thread that masks the logs of one run, in the order in which their folders are given."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._queue: queue.Queue[Path] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._done: set[str] | None = None

    def add(self, folder: Path) -> None:
        """Mask the logs of this folder soon."""
        self._queue.put(folder)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mask logs", daemon=True)
            self._thread.start()

    def add_ended(self, state: RunState) -> None:
        """Mask the logs of every ended attempt; running ones still write to theirs."""
        running = {trial.number: trial.attempt for trial in state.unfinished}
        for folder in sorted((self._folder / TRIALS_FOLDER).glob("[0-9]*")):
            current = running.get(int(folder.name)) if folder.name.isdigit() else None
            for attempt in sorted(folder.glob("attempts/*")):
                if current is None or not attempt.name.startswith(str(current)):
                    self.add(attempt)
            if current is None:
                self.add(folder)

    def finish(
        self,
        meanwhile: Callable[[], None],
        *,
        tell: Callable[[str], None] = lambda text: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until all is masked or `is_stopped`; calls `meanwhile` every second, `tell` once if it takes long."""
        seconds = 0.0
        while not self._is_done():
            meanwhile()
            if is_stopped():
                return
            seconds += _WAIT_S
            if seconds == _LONG_WAIT_S:
                tell(
                    f"masking secrets in the logs and traces of {count_of(self._queue.unfinished_tasks, 'folder')}. "
                    "Ctrl-C leaves the rest to `ccl-search resume`"
                )

    def _is_done(self) -> bool:
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, _WAIT_S)

    def _work(self) -> None:
        while True:
            folder = self._queue.get()
            with contextlib.suppress(OSError):  # such as a full disk: `resume` masks what is left
                self._mask(folder)
            self._queue.task_done()

    def _mask(self, folder: Path) -> None:
        done = self._read_done()
        for left in folder.rglob(f"{PREFIX}*"):  # by a search that was killed
            with contextlib.suppress(OSError):
                left.unlink()
        _rename_files(folder)
        for path in _find_logs(folder):
            with contextlib.suppress(FileNotFoundError, JobFileError):
                if _identity(path.lstat()) in done:
                    continue
                _scrub(path)
                identity = _identity(path.lstat())
                done.add(identity)
                with contextlib.suppress(OSError), open_to_append(self._folder / DONE_FILE) as file:
                    file.write(f"{identity}\n".encode())  # without its line, `resume` looks at the log again

    def _read_done(self) -> set[str]:
        if self._done is None:
            self._done = set()
            with contextlib.suppress(OSError, JobFileError):  # the run folder is within a job's reach
                self._done |= set(read_job_text(self._folder / DONE_FILE, RESULT_BYTES).splitlines())
        return self._done


def _rename_files(folder: Path) -> None:
    """Mask secrets in the names of files."""
    for path in _find_files(folder):
        name = redact(path.name)
        if name != path.name:
            name = name.replace(MASK, "secret")
            while os.path.lexists(path.with_name(name)):
                name = f"again-{name}"
            with moving, contextlib.suppress(FileNotFoundError):
                path.rename(path.with_name(name))


def _find_logs(folder: Path, patterns: tuple[str, ...] = _PATTERNS) -> Iterator[Path]:
    return (path for path in _find_files(folder, patterns) if path.name.removesuffix(".gz").endswith(_SUFFIXES))


def _find_files(folder: Path, patterns: tuple[str, ...] = _PATTERNS) -> Iterator[Path]:
    """Yield the files of the folder; behind a link that a job left are files of others."""
    own = folder.resolve()
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and not path.is_symlink() and path.parent.resolve().is_relative_to(own):
                yield path


def _identity(status: os.stat_result) -> str:
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _scrub(path: Path) -> None:
    """Mask the secrets of a text file, packed or not; one without secrets is only read."""
    with open_job_file(path) as source:
        opened = os.fstat(source.fileno())
        with contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile):
            if any(masked != piece for piece, masked in mask_pieces(source, path)):
                source.seek(0)
                _replace(path, source, opened)


def _replace(path: Path, source: BinaryIO, opened: os.stat_result) -> None:
    """Put the masked text in the place of the opened file, unless that was moved aside meanwhile."""
    from cclsearch.trace.files.cache import cache_path  # with numpy

    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=PREFIX)  # a path that no job can prepare
    clean = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as target:
            packed = gzip.GzipFile(fileobj=target, mode="wb", compresslevel=6) if _is_packed(path) else None
            for _, masked in mask_pieces(source, path):
                (packed or target).write(masked)
            if packed:
                packed.close()
        clean.chmod(opened.st_mode & NEW_FILE_MODE)
        with moving:
            if os.path.samestat(opened, path.lstat()):
                clean.replace(path)
                cache_path(path).unlink(missing_ok=True)  # the cached columns of a trace have its texts
    finally:
        clean.unlink(missing_ok=True)


def mask_pieces(source: BinaryIO, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield each piece of the unpacked file, and the piece with its secrets masked; JobFileError if too large."""
    masker, left = Masker(), _MAX_BYTES
    for piece in _read_pieces(cast(IO[bytes], gzip.GzipFile(fileobj=source) if _is_packed(path) else source)):
        left -= len(piece)
        if _is_packed(path) and left < 0:
            raise JobFileError(f"{path.name} unpacks to more than {_MAX_BYTES >> 30} GiB")
        yield piece, masker.mask(piece)


def _read_pieces(reader: IO[bytes]) -> Iterator[bytes]:
    """Yield whole lines, and parts of a long line that end where an object, a field or a word does."""
    left = b""
    while piece := reader.read(PIECE_BYTES):
        piece = left + piece + reader.readline(PIECE_BYTES)
        end = _find_end(piece)
        left = piece[end:]
        yield piece[:end]
    if left:
        yield left


def _find_end(piece: bytes) -> int:
    if piece.endswith(b"\n"):
        return len(piece)
    ends = (piece.rfind(sign, len(piece) - _TAIL_BYTES) + 1 for sign in (b"}", b",", b" "))
    return next((end for end in ends if end > 0), len(piece))


def _is_packed(path: Path) -> bool:
    return path.name.endswith(".gz")
