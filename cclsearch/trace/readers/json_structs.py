"""The events of a Chrome-format JSON trace as msgspec structs, and a slow, tolerant way to read them one by one."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec

from cclsearch.trace.readers.json_repair import MAX_CHARS, Broken, repair_object
from cclsearch.trace.readers.stream import ReadLimits

NO_ARGS = msgspec.Raw(b"")
# float64 resolves 2e12 us to 0.2 ns, and 1e12 us are eleven days.
KEEP_DIGITS = 12
"""Digits kept of a long time."""
_LONG_TIME = re.compile(rb'(?P<key>"ts":\s*)(?P<digits>[1-9]\d*)\.\d')


Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | str
"""Process or thread; the slow way reads other numbers as 0."""


class Span(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event; `args` stays undecoded until needed (for XLA, process and thread are plane and line)."""

    cat: str = ""
    name: str = ""
    pid: Id = 0
    tid: Id = 0
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = NO_ARGS


class Meta(msgspec.Struct, tag_field="ph", tag="M", gc=False):
    """The name of a process or thread."""

    name: str = ""
    pid: Id = 0
    tid: Id = 0
    args: msgspec.Raw = NO_ARGS


class Instant(msgspec.Struct, tag_field="ph", tag="i", gc=False):
    """A point in time, such as an allocation."""

    name: str = ""
    ts: float = 0.0
    args: msgspec.Raw = NO_ARGS


IGNORED_PHASES = tuple(msgspec.defstruct(f"Phase_{p}", [], gc=False, tag_field="ph", tag=p) for p in "sftbenCBEIPNOD")
"""Phases that no metric needs (flows, counters): decoding into empty structs is the fastest way to skip them."""


class TimePrefix(NamedTuple):
    """The leading digits to blank in times that exceed float64 (`1712195495519703.772`), and their value."""

    old: bytes
    new: bytes
    offset_us: int

    @classmethod
    def find(cls, text: bytes) -> TimePrefix:
        """Take the prefix from the first time in the text; nothing to blank if it is short or whole."""
        found = _LONG_TIME.search(text)
        if not found or len(found["digits"]) <= KEEP_DIGITS + 1:
            return cls(b"", b"", 0)
        prefix: bytes = found["digits"][:-KEEP_DIGITS]
        new = found["key"] + b" " * (len(prefix) - 1) + b"1"
        return cls(found["key"] + prefix, new, (int(prefix) - 1) * 10**KEEP_DIGITS)


_BETWEEN = re.compile(rb"[ \t\r\n,]*")
_NEXT_EVENT = re.compile(rb'\s*,\s*\{\s*"ph"')
_EVENT_END = re.compile(_NEXT_EVENT.pattern + rb"|\s*,?\s*\]")
_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
MAX_ENDS = 4
"""Separators that are tried as the end of a broken event: an event may contain objects like those around it."""


class NeedMoreData(Exception):
    """The text ends before the searched position."""


@dataclass
class ScanResult:
    """Result of one call of `EventScanner.scan`."""

    events: list[Any] = field(default_factory=list)
    used: int = 0
    """Number of bytes read; the next call starts after them."""
    closed: bool = False
    """Whether the bracket that ends the list was reached; `used` includes it."""
    num_bad: int = 0


class EventScanner:
    """Reads events with Python's parser, which accepts NaN, infinities, control characters and broken UTF-8."""

    def __init__(self, limits: ReadLimits) -> None:
        # A number of very many digits would take long as an integer.
        self._decoder = json.JSONDecoder(parse_int=lambda n: int(n) if len(n) < 40 else float(n), strict=False)
        self._limits = limits

    def find_separator(self, piece: bytes) -> bytes:
        """Return the bytes between the first two events: from the newline before `}`, else from `}`, to `{` or `{"`.

        Empty without a second event; raises NeedMoreData if the piece is too short to decide.
        """
        start = _skip(piece, 1)
        if start >= len(piece):
            raise NeedMoreData
        try:
            _, end = self._decoder.raw_decode(piece.decode("latin-1"), start)
        except (ValueError, RecursionError):
            _, length, closed = _repair(piece[start : start + MAX_CHARS])
            if not closed:
                raise NeedMoreData from None
            end = start + length
        following = _skip(piece, end)
        if following >= len(piece) - 1:
            raise NeedMoreData
        if piece[following : following + 1] != b"{" or b"," not in piece[end:following]:
            return b""
        line = piece.rfind(b"\n", 0, end)
        if line >= 0 and not piece[line : end - 1].strip():
            return piece[line : following + 1]
        quote = piece[following : following + 2]
        return piece[end - 1 : following] + (quote if quote == b'{"' else b"{")

    def scan(self, piece: bytes, separator: bytes, *, is_last: bool = True) -> ScanResult:
        """Return the events in `piece`; a broken one, if it has an end, without what is lost.

        Text at the end that does not parse is not used: more text, which follows unless `is_last`, may complete it.
        """
        scan = ScanResult()
        position = 0
        while True:
            position = _skip(piece, position)
            scan.used = position
            if position >= len(piece):
                return scan
            if piece[position : position + 1] == b"]":
                scan.used, scan.closed = position + 1, True
                return scan
            end = self._read_event(piece, position, scan)
            if end is None:
                end = self._repair_event(piece, position, separator, scan, is_last=is_last)
            if end is None or scan.num_bad > self._limits.bad_events:
                return scan
            position = end

    def _repair_event(
        self, piece: bytes, position: int, separator: bytes, scan: ScanResult, *, is_last: bool
    ) -> int | None:
        """Append what can be read of the broken event at `position`; return its end, None if that is not known.

        The event is bad if its own members are lost, not if only arguments are.
        """
        ends: list[int] = []
        following = position
        while separator and len(ends) < MAX_ENDS:
            following = piece.find(separator, following + 1, position + MAX_CHARS)
            if following < 0:
                break
            ends.append(following + separator.find(b"}") + 1)
            event, length, closed = _repair(piece[position : ends[-1]])
            if closed and _NEXT_EVENT.match(piece, position + length):  # an end that is not laid out like the others
                ends[-1] = position + length
            if closed and length == ends[-1] - position:
                ends = ends[-1:]
                break
        else:
            ends = ends[:1]
        if following < 0 or not ends:
            if not is_last:
                return None
            event, length, closed = _repair(piece[position : position + MAX_CHARS])
            if closed and _EVENT_END.match(piece, position + length):
                ends = [position + length]
        if not ends:
            return None
        event, _, _ = _repair(piece[position : ends[0]])
        known = self._convert(event)
        if known is not None:
            scan.events.append(known)
        lost = known is None or any(event.get(name, 0) is None for name in _FIELDS)
        scan.num_bad += lost and event.get("ph") in ("X", None)
        return ends[0]

    def _read_event(self, piece: bytes, position: int, scan: ScanResult) -> int | None:
        """Append the event that begins at `position`; return its end, or None if it does not parse."""
        window = 1 << 12
        while True:
            text = piece[position : position + window].decode("utf-8", "surrogateescape")
            try:
                event, length = self._decoder.raw_decode(text)
                break
            except RecursionError:
                return None
            except json.JSONDecodeError as error:
                is_cut = error.pos > len(text) - 16 or error.msg.startswith("Unterminated")
                if not is_cut or position + window >= len(piece):
                    return None
                window *= 8
            except ValueError:
                return None
        end = position + len(text[:length].encode("utf-8", "surrogateescape"))
        known = self._convert(event)
        if known is not None:
            scan.events.append(known)
        elif isinstance(event, dict) and event.get("ph") == "X":
            scan.num_bad += 1
        return end

    def _convert(self, event: Any) -> Any:
        if not isinstance(event, dict):
            return None
        phase, name = event.get("ph"), _clean(event.get("name", ""))
        time, args = number_of(event.get("ts")), _raw(event.get("args"))
        if phase == "M":
            return Meta(name, _key(event.get("pid")), _key(event.get("tid")), args)
        if time is None:
            return None
        if phase == "i":
            return Instant(name, time, args)
        duration = number_of(event.get("dur", 0))
        if phase != "X" or duration is None:
            return None
        process, thread = _key(event.get("pid")), _key(event.get("tid"))
        return Span(_clean(event.get("cat", "")), name, process, thread, time, duration, args)

    def read_object(self, text: str) -> dict[str, Any] | None:
        """Parse the text as one JSON object (followed by white space only); None if it is not one, or has no end."""
        try:
            value, end = self._decoder.raw_decode(text)
        except (ValueError, RecursionError):
            value, end, closed = repair_text(text)
            return value if closed and not text[end:].strip() else None
        return value if isinstance(value, dict) and not text[end:].strip() else None


def number_of(value: Any) -> float | None:
    """Return the value as a finite number, also from a string (`"12"`, `"0x1f"`); None for other values."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        if isinstance(value, str):
            value = int(value, 16) if value.strip().lower().startswith("0x") else float(value)
        number = float(value)
    except (ValueError, OverflowError, TypeError):
        return None
    return number if math.isfinite(number) else None


def _repair(piece: bytes) -> tuple[dict[str, Any], int, bool]:
    """Return the object at the beginning, its size in bytes, and whether it is closed."""
    text = piece.decode("utf-8", "surrogateescape")
    value, end, closed = repair_text(text)
    return value, len(text[:end].encode("utf-8", "surrogateescape")), closed


def repair_text(text: str) -> tuple[dict[str, Any], int, bool]:
    """Return what `repair_object` does; nothing if the text is not an object."""
    try:
        return repair_object(text)
    except Broken:
        return {}, 0, False


def _skip(piece: bytes, position: int) -> int:
    found = _BETWEEN.match(piece, position)
    return found.end() if found else position


def _clean(value: Any) -> str:
    text = value if isinstance(value, str) else str(value) if value is not None else ""
    return text.encode("utf-8", "replace").decode("utf-8")


def _key(value: Any) -> int | str:
    if isinstance(value, str):
        return _clean(value)
    number = number_of(value)
    return int(number) if number is not None and abs(number) < 2**63 else 0


def _raw(args: Any) -> msgspec.Raw:
    if not isinstance(args, dict):
        return NO_ARGS
    text = json.dumps(args, default=str, allow_nan=True)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(_without_nan(args), default=str)
    return msgspec.Raw(text.encode("utf-8", "replace"))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return value
