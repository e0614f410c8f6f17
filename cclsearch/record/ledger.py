"""The append-only ledger of a search: one JSON object per line, synced to disk before anything depends on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pydantic import ValidationError

from cclsearch.core.errors import UserError
from cclsearch.record.event import EVENT, LEDGER_VERSION, Event, SearchStarted
from cclsearch.record.state import RunState

LEDGER_FILE = "ledger.jsonl"


def read_events(path: Path) -> Iterator[Event]:
    """The ledger's events in order, each fully validated.

    An incomplete last line (after a kill or on a full disk) is ignored. Raises UserError if an earlier line is not an
    event (with its line number), or if the ledger was written by a newer version.
    """
    for number, line in enumerate(_read_lines(path), 1):
        yield _parse(path, number, line)


def fold_ledger(path: Path) -> RunState:
    """The state after the ledger's events; raises UserError as `read_events` does."""
    state = RunState(path)
    offset = 0
    for number, line in enumerate(_read_lines(path), 1):
        try:
            state.apply(line, offset)
        except (msgspec.MsgspecError, ValidationError, KeyError, ValueError, OverflowError):
            _parse(path, number, line)
            raise UserError(f"{str(path)!r} line {number} is about a trial that was never proposed") from None
        if number == 1 and b'"ledger_version":1,' not in line:
            _parse(path, number, line)
        offset += len(line) + 1
    return state


def _read_lines(path: Path) -> list[bytes]:
    """Complete lines of the file, without line ends."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{str(path.parent)!r} is not a run folder: it has no {LEDGER_FILE}") from None
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from None
    return data.split(b"\n")[:-1]


def _parse(path: Path, number: int, line: bytes) -> Event:
    try:
        event = EVENT.validate_json(line)
    except ValidationError as error:
        if number == 1 and b'"ledger_version"' in line:
            _refuse_newer(path, line)
        first = error.errors(include_url=False)[0]
        raise UserError(
            f"{str(path)!r} line {number} is not an event of this version: {first['msg']};"
            " the lines before it are valid: to continue from them, cut the file before this line"
        ) from None
    if isinstance(event, SearchStarted) and event.ledger_version > LEDGER_VERSION:
        _refuse_newer(path, line)
    return event


def _refuse_newer(path: Path, line: bytes) -> None:
    import json

    try:
        version = json.loads(line).get("ledger_version")
    except ValueError:
        return
    if isinstance(version, int) and version > LEDGER_VERSION:
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
        line = EVENT.dump_json(event, exclude_defaults=False) + b"\n"
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
