"""The append-only ledger of a search: one JSON object per line, synced to disk before anything depends on it."""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

from cclsearch.core.atomic_file import NEW_FILE_MODE, sync_folder
from cclsearch.core.errors import DamagedLedger, UserError, refuse_newer
from cclsearch.core.job_file import open_inside
from cclsearch.record.event import (
    LEDGER_VERSION,
    BadLine,
    Event,
    SearchStarted,
    decode_line,
    describe_bad_line,
    encode_line,
    explain_bad_lines,
    has_checksum,
)
from cclsearch.record.state import RunState

LEDGER_FILE = "ledger.jsonl"
BUFFER_BYTES = 1 << 20
MAX_LINE_BYTES, MAX_SKIPPED_BYTES = 64 << 20, 256 << 20
"""Maximum length of a line that is read, and of one after which the next line is looked for."""


def read_events(path: Path) -> Iterator[Event]:
    """Yield the ledger's events in order, each fully validated.

    An incomplete last line (after a kill or on a full disk) is ignored, and so is a line that is not an event, was
    changed or cannot follow: `fold_ledger` lists them. Raises UserError if the ledger was written by a newer version.
    """
    return LedgerFollower(path).read()


def fold_ledger(path: Path) -> RunState:
    """The state after the ledger's events; lines that cannot be used are in its `bad_lines`, and a warning names them.

    Raises UserError if the run has no ledger, or if a newer version wrote it.
    """
    follower = LedgerFollower(path)
    for _ in follower.read():
        pass
    if follower.state.bad_lines:
        warnings.warn(explain_bad_lines(path, follower.state.bad_lines), DamagedLedger, stacklevel=2)
    return follower.state


class LedgerFollower:
    """Folds a ledger that may still grow: each call of `read` takes only the lines that were added since the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.state = RunState(self.path)
        self.offset = self._number = 0
        """Bytes and lines of the ledger that the state contains."""
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that was read."""

    def read(self) -> Iterator[Event]:
        """Apply the complete lines that follow and return the event of each that is used.

        A caller may stop between two events and read on later. If the file was replaced or became shorter, `state` is
        begun anew. Raises UserError as `fold_ledger` does.
        """
        if self._is_replaced():
            self._begin()
        for line in self._split():
            found, offset = self._examine(line, self._number + 1), self.offset
            self._number, self.offset = self._number + 1, offset + (line if isinstance(line, int) else len(line))
            if isinstance(found, BadLine):
                self.state.bad_lines.append(found)
                continue
            try:
                self.state.apply(found, offset)
            except ValueError as error:
                trial = getattr(found, "trial", None)
                self.state.bad_lines.append(BadLine(self._number, str(error), found.event, trial))
                continue
            yield found

    def _is_replaced(self) -> bool:
        """Whether the path has another file than before, or the file is shorter than what was read."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False  # `_split` reports it
        return self._file is not None and (self._file != (found.st_dev, found.st_ino) or found.st_size < self.offset)

    def _examine(self, line: bytes | int, number: int) -> Event | BadLine:
        try:
            if isinstance(line, int):
                raise ValueError(f"it has {line:,} bytes, more than the {MAX_LINE_BYTES:,} allowed")
            event = decode_line(line)
            if isinstance(event, SearchStarted):
                refuse_newer(self.path, event.ledger_version, LEDGER_VERSION)
            return event
        except (ValueError, RecursionError) as error:
            head = b"" if isinstance(line, int) else line
            refuse_newer(self.path, _find_version(head), LEDGER_VERSION)
            return describe_bad_line(number, head, error)

    def _split(self) -> Iterator[bytes | int]:
        """Each complete line with its end; of one that is too long only its length in bytes."""
        path = self.path
        try:
            with open(path, "rb", buffering=BUFFER_BYTES, opener=open_inside) as file:
                found = os.fstat(file.fileno())
                self._file = found.st_dev, found.st_ino
                if not stat.S_ISREG(found.st_mode):
                    raise UserError(f"{str(path)!r} is not a regular file: restore the {LEDGER_FILE} of this run")
                if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise UserError(f"{str(path)!r} is UTF-16 text: an editor changed it; save it as UTF-8")
                file.seek(self.offset)
                while line := file.readline(MAX_LINE_BYTES):
                    length = len(line)
                    while line and not line.endswith(b"\n"):
                        if length >= MAX_SKIPPED_BYTES:  # a file that has no line ends, however large
                            yield found.st_size - self.offset
                            return
                        line = file.readline(MAX_LINE_BYTES)
                        length += len(line)
                    if not line:
                        return
                    yield line if length == len(line) else length
        except FileNotFoundError:
            raise UserError(f"{str(path.parent)!r} is not a run folder: it has no {LEDGER_FILE}") from None
        except OSError as error:
            raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _find_version(line: bytes) -> int:
    """Return the version that the line of a newer version names; 0 if it names none, or was changed.

    A newer version may sign its lines in another way, so a line without a checksum counts too.
    """
    try:
        has_checksum(line)
        version = json.loads(line)["ledger_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return version if isinstance(version, int) else 0


class Ledger:
    """The ledger, opened for writing; the caller must have locked the run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, NEW_FILE_MODE)
        sync_folder(path.parent)
        self._end = self._cut_torn_line()

    def append(self, event: Event) -> int:
        """Write one event and sync it; return where its line begins.

        On an error (disk full) the file is restored and OSError is raised; UserError if another process wrote to it;
        ValueError, and nothing is written, if the line could not be read again.
        """
        if os.fstat(self._fd).st_size != self._end:
            raise UserError(f"{str(self.path)!r} was written by another process since this one opened it")
        line = encode_line(event)
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._fd, line[written:], self._end + written)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        offset, self._end = self._end, self._end + len(line)
        return offset

    def check_present(self) -> None:
        """Raise OSError if the file at the path is another one: its file system is gone, or its folder was moved."""
        opened, found = os.fstat(self._fd), os.stat(self.path)
        if (opened.st_dev, opened.st_ino) != (found.st_dev, found.st_ino):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.path))

    def close(self) -> None:
        os.close(self._fd)

    def _cut_torn_line(self) -> int:
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0:
            start = max(0, end - 65536)
            cut = os.pread(self._fd, end - start, start).rfind(b"\n")
            if cut >= 0:
                end = start + cut + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)
        return end
