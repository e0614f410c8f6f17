"""One line of the ledger: an event as JSON, with a checksum as its last field."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from cclsearch.core.text import count_of, one_line
from cclsearch.record.event import EVENT, Event

_BOM = b"\xef\xbb\xbf"
_END = b',"crc":"%08x"}\n'
_NUM_BYTES = len(_END % 0)
SHOWN_BAD_LINES = 3
"""Lines that a message describes; it counts the others."""

_EVENT = re.compile(rb'"event" ?: ?"([a-z_]{1,40})"')
_TRIAL = re.compile(rb'"trial" ?: ?(\d{1,7})[,}]')


@dataclass(frozen=True)
class BadLine:
    """A line of a ledger that is not used, and its probable meaning."""

    number: int
    """1 for the first line."""
    problem: str
    event: str = ""
    """Its kind of event; empty if it cannot be seen."""
    trial: int | None = None

    def describe(self) -> str:
        """`line 7 (trial_finished of trial 3): its checksum does not match, ...`."""
        trial = f" of trial {self.trial}" if self.trial is not None else ""
        return f"line {self.number}{f' ({self.event}{trial})' if self.event else ''}: {self.problem}"


def describe_bad_line(number: int, line: bytes, error: Exception) -> BadLine:
    """The line as one that is not used, because of this error."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"][1:]))
        problem = f"{place}: {first['msg']}" if place else first["msg"]
    else:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    event, trial = _EVENT.search(line), _TRIAL.search(line)
    return BadLine(number, one_line(problem, 200), event[1].decode() if event else "", int(trial[1]) if trial else None)


def explain_bad_lines(path: Path, bad: Sequence[BadLine]) -> str:
    """One line about the lines of a ledger that are not used."""
    shown = "; ".join(line.describe() for line in bad[:SHOWN_BAD_LINES])
    more = f"; and {len(bad) - SHOWN_BAD_LINES} more" if len(bad) > SHOWN_BAD_LINES else ""
    verb = "is" if len(bad) == 1 else "are"
    return f"{str(path)!r}: {count_of(len(bad), 'line')} {verb} not used, all others are: {shown}{more}"


def encode_line(event: Event) -> bytes:
    """The event's line, with its end; `crc` is the CRC-32 of the bytes before that field, as eight hex digits.

    Raises ValueError if the line would not be read as the same event: it must never reach a ledger.
    """
    data = EVENT.dump_json(event)
    try:
        is_same = EVENT.validate_json(data) == event
    except ValidationError:  # JSON writes a number that is not finite as null
        is_same = False
    if not is_same:
        raise ValueError(f"the event {event.event!r} would not be read as it is: {one_line(data.decode(), 500)}")
    return data[:-1] + _END % zlib.crc32(data[:-1])


def has_checksum(line: bytes) -> bool:
    """Return whether the line has a checksum; raises ValueError if it has a wrong one."""
    line = _undo_editor(line)
    data, end = line[:-_NUM_BYTES], line[-_NUM_BYTES:]
    if end == _END % zlib.crc32(data):
        return True
    if end.startswith(_END[: _END.index(b"%")]):
        raise ValueError("its checksum does not match, so it was changed after it was written")
    return False


def decode_line(line: bytes) -> Event:
    """Return the event of a line; raises ValueError if it is not one, or was changed after it was written."""
    if not has_checksum(line):
        raise ValueError("it has no checksum")
    return EVENT.validate_json(_undo_editor(line)[:-_NUM_BYTES] + b"}")


def _undo_editor(line: bytes) -> bytes:
    """Remove an editor's additions on Windows from the line: a byte order mark, a carriage return at its end."""
    line = line.removeprefix(_BOM)
    return line[:-2] + b"\n" if line.endswith(b"\r\n") else line
