"""The append-only ledger of a search: one JSON object per line, synced to disk before anything depends on it."""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.atomic_file import sync_folder
from cclsearch.core.errors import DamagedLedger, UserError, refuse_newer
from cclsearch.record.event import LEDGER_VERSION, Event, LedgerUpgraded, SearchStarted
from cclsearch.record.line import BadLine, decode_line, describe_bad_line, encode_line, explain_bad_lines, has_checksum
from cclsearch.record.state import RunState

LEDGER_FILE = "ledger.jsonl"
BUFFER_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20


def read_events(path: Path) -> Iterator[Event]:
    """The ledger's events in order, each fully validated; those of earlier versions in the form of the present one.

    An incomplete last line (after a kill or on a full disk) is ignored, and so is a line that is not an event or was
    changed: `fold_ledger` lists them. Raises UserError if the ledger was written by a newer version.
    """
    for found in _read_lines(path):
        if not isinstance(found, BadLine):
            yield found.event


def fold_ledger(path: Path) -> RunState:
    """The state after the ledger's events; lines that cannot be used are in its `bad_lines`, and a warning names them.

    Raises UserError if the run has no ledger, or if a newer version wrote it.
    """
    state = RunState(path)
    for found in _read_lines(path):
        if isinstance(found, BadLine):
            state.skip(found)
            continue
        if not state.has_begun and not found.has_checksum:
            state.ledger_version = 1
        try:
            state.apply(found.event, found.offset, found.end)
        except ValueError as error:
            state.skip(BadLine(found.number, str(error), found.event.event, getattr(found.event, "trial", None)))
    if state.bad_lines:
        warnings.warn(explain_bad_lines(path, state.bad_lines), DamagedLedger, stacklevel=2)
    return state


@dataclass(frozen=True)
class _Line:
    """A line that is an event."""

    number: int
    offset: int
    end: int
    event: Event
    has_checksum: bool


def _read_lines(path: Path) -> Iterator[_Line | BadLine]:
    """Every complete line: as an event, or with what is wrong with it."""
    is_checked, offset = False, 0
    for number, line in enumerate(_split_lines(path), 1):
        try:
            if isinstance(line, int):
                raise ValueError(f"it has {line:,} bytes, more than the {MAX_LINE_BYTES:,} allowed")
            was_checked, has_one = is_checked, has_checksum(line)
            is_checked |= has_one
            if was_checked and not has_one:
                raise ValueError("it has no checksum, although lines before it have one")
            event = decode_line(line)
            if isinstance(event, SearchStarted | LedgerUpgraded):
                refuse_newer(path, event.ledger_version, LEDGER_VERSION)
            yield _Line(number, offset, offset + len(line), event, has_one)
        except (ValueError, RecursionError) as error:
            head = b"" if isinstance(line, int) else line
            refuse_newer(path, _find_version(head), LEDGER_VERSION)
            yield describe_bad_line(number, head, error)
        offset += line if isinstance(line, int) else len(line)


def _split_lines(path: Path) -> Iterator[bytes | int]:
    """Each complete line with its end; of one that is too long only its length in bytes."""
    try:
        with open(path, "rb", buffering=BUFFER_BYTES, opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{str(path)!r} is not a regular file: restore the {LEDGER_FILE} of this run")
            is_utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            file.seek(0)
            if is_utf16:
                raise UserError(f"{str(path)!r} is UTF-16 text: an editor changed it; save it as UTF-8")
            while line := file.readline(MAX_LINE_BYTES):
                length = len(line)
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                    length += len(line)
                if not line:
                    return
                yield line if length == len(line) else length
    except FileNotFoundError:
        raise UserError(f"{str(path.parent)!r} is not a run folder: it has no {LEDGER_FILE}") from None
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _open_without_waiting(path: str, flags: int) -> int:
    """A FIFO would block until somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _find_version(line: bytes) -> int:
    """The version that a line names which is not an event of this version; 0 if it names none, or was changed."""
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
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        sync_folder(path.parent)
        self._end = self._cut_torn_line()

    def append(self, event: Event) -> tuple[int, int]:
        """Write one event and sync it; return where its line begins and ends.

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
        return offset, self._end

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
