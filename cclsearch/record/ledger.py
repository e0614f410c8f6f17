"""The append-only ledger of a search: one JSON object per line, synced to disk before anything depends on it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pydantic import ValidationError

from cclsearch.core.errors import UserError
from cclsearch.record.event import LEDGER_VERSION, Event, LedgerUpgraded, SearchStarted
from cclsearch.record.line import decode_line, encode_line, has_checksum
from cclsearch.record.state import RunState

LEDGER_FILE = "ledger.jsonl"
BUFFER_BYTES = 1 << 20


def read_events(path: Path) -> Iterator[Event]:
    """The ledger's events in order, each fully validated; those of earlier versions in the form of the present one.

    An incomplete last line (after a kill or on a full disk) is ignored. Raises UserError if an earlier line is not an
    event or was changed (with its line number), or if the ledger was written by a newer version.
    """
    for number, line in _read_lines(path):
        yield _parse(path, number, line)


def fold_ledger(path: Path) -> RunState:
    """The state after the ledger's events; raises UserError as `read_events` does."""
    state = RunState(path)
    offset = 0
    for number, line in _read_lines(path):
        try:
            state.apply(line, offset)
        except (msgspec.MsgspecError, KeyError, ValueError, OverflowError) as error:
            _parse(path, number, line)
            if isinstance(error, msgspec.MsgspecError):
                raise _describe_damage(path, number, str(error)) from None
            raise UserError(f"{str(path)!r} line {number} is about a trial that was never proposed") from None
        if state.ledger_version > LEDGER_VERSION:
            _refuse_newer(path, state.ledger_version)
        offset += len(line)
    return state


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each complete line, with its end; raises UserError if one was changed."""
    is_checked = False
    try:
        with path.open("rb", buffering=BUFFER_BYTES) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                was_checked, is_checked = is_checked, has_checksum(line)
                if was_checked and not is_checked:
                    raise ValueError("it has no checksum, although the lines before it have one")
                yield number, line
    except FileNotFoundError:
        raise UserError(f"{str(path.parent)!r} is not a run folder: it has no {LEDGER_FILE}") from None
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise _describe_damage(path, number, str(error)) from None


def _parse(path: Path, number: int, line: bytes) -> Event:
    try:
        event = decode_line(line)
    except ValueError as error:
        _refuse_newer(path, _find_version(line))
        text = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise _describe_damage(path, number, text) from None
    if isinstance(event, SearchStarted | LedgerUpgraded):
        _refuse_newer(path, event.ledger_version)
    return event


def _describe_damage(path: Path, number: int, problem: str) -> UserError:
    return UserError(
        f"{str(path)!r} line {number} is not an event of this version: {problem};"
        " the lines before it are valid: to continue from them, cut the file before this line"
    )


def _find_version(line: bytes) -> int:
    """The ledger version that a line names which is not an event of this version; 0 if it names none."""
    try:
        version = json.loads(line)["ledger_version"]
    except (ValueError, KeyError, TypeError):
        return 0
    return version if isinstance(version, int) else 0


def _refuse_newer(path: Path, version: int) -> None:
    if version > LEDGER_VERSION:
        raise UserError(
            f"{str(path)!r} was written by a newer ccl-search (ledger version {version}, this one reads up to"
            f" {LEDGER_VERSION}): upgrade with `pip install --upgrade ccl-search`"
        )


class Ledger:
    """The ledger, opened for writing; the caller must have locked the run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._end = self._cut_torn_line()

    def append(self, event: Event) -> tuple[bytes, int]:
        """Write one event and sync it; return its line and the line's offset.

        On an error (disk full) the file is restored and OSError is raised; UserError if another process wrote to it.
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
        return line, offset

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
