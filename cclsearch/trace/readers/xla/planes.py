"""XLA's planes (a device or a host) with lines of events, read from XSpace (`*.xplane.pb`) by its wire format.

No TensorFlow, no generated code, only the needed fields: XSpace planes=1 hostnames=4; XPlane name=2 lines=3
event_metadata=4 stat_metadata=5 stats=6; XLine name=2 timestamp_ns=3 events=4 display_name=11; XEvent metadata_id=1
offset_ps=2 duration_ps=3 stats=4; XEventMetadata id=1 name=2 display_name=4 stats=5; XStat metadata_id=1 double=2
uint64=3 int64=4 str=5 bytes=6 ref=7. (openxla/xla, `xla/tsl/profiler/protobuf/xplane.proto`.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cclsearch.trace.events import Kind, OpCost, Reason
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.readers.protobuf_wire import (
    Buffer,
    ByteRange,
    MalformedMessage,
    WireMessage,
    read_fields,
    read_message_bytes,
    text_of,
    to_signed,
)
from cclsearch.trace.readers.stream import ReadLimits, TraceError

Stats = dict[str, Any]


class ProgramBytes(NamedTuple):
    """Position of a serialized HloProto in a file."""

    data: Buffer
    span: ByteRange


class XEvent(NamedTuple):
    """One event on a line; `read_stats` returns its statistics with its metadata's."""

    key: Any
    """Equal for events of the same operation."""
    name: str
    start_ps: int
    duration_ps: int
    read_stats: Callable[[], Stats]

    @property
    def end_ps(self) -> int:
        """End of the event."""
        return self.start_ps + self.duration_ps


@dataclass(frozen=True)
class PlaneLine:
    """One line of a plane; `read_events` may be called repeatedly."""

    name: str
    read_events: Callable[[], Iterator[XEvent]]


@dataclass(frozen=True)
class Plane:
    """A device or a host."""

    name: str
    lines: tuple[PlaneLine, ...] = ()
    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True)
class PlaneSpace:
    """All planes of one file."""

    planes: tuple[Plane, ...]
    is_complete: bool
    host: str = ""
    start_ns: int = 0
    """Unix time of event time 0; 0 if the file does not say."""
    programs: Mapping[str, ProgramBytes] = field(default_factory=dict)
    """`jit_step(17)` -> the compiled program."""


class XlaOp(NamedTuple):
    """A run operation: an instruction of a program, or a graph of several."""

    program: str
    """Name and number, as in `jit_step(17)`."""
    name: str


@dataclass
class XlaRow:
    """One row under construction: of the device, or of the host (`key` is None)."""

    key: Any
    name: str
    start_ps: int
    duration_ps: int
    kind: Kind
    line: int
    run: int = -1
    compute: ComputeClass = ComputeClass.OTHER
    stats: Stats | None = None
    """Statistics of the first event of that operation."""
    op: XlaOp | None = None
    cost: OpCost | None = None
    """Cost of the matrix products in one run of the row; None if the file's program does not show them."""


def op_of(stats: Stats) -> XlaOp | None:
    """Return the instruction that an event's statistics name."""
    if "hlo_op" not in stats:
        return None
    return XlaOp(f"{stats.get('hlo_module')}({stats.get('program_id')})", str(stats["hlo_op"]))


def int_or_none(value: Any) -> int | None:
    """Return the value as a whole number, also from text; None for other values."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 2**62 else None


_DOUBLE = struct.Struct("<d")
_MAX_PS = 2**61
_PROGRAMS = "/host:metadata"


def read_space(path: Path, limits: ReadLimits) -> PlaneSpace:
    """Return the planes of the file; a truncated file gives its complete planes. Raises TraceError for other files."""
    data = read_message_bytes(path, limits)
    if not data:
        raise TraceError(Reason.UNREADABLE, "the file is empty")
    planes, host, cut = [], "", False
    programs: dict[str, ProgramBytes] = {}
    try:
        for number, wire, value, is_cut in read_fields(data, 0, len(data), may_be_cut=True):
            cut |= is_cut
            if wire != 2 or not 1 <= number <= 4:
                raise MalformedMessage
            if number == 1 and not is_cut:
                reader = _PlaneReader(data, value)
                planes.append(reader.plane())
                programs |= reader.programs()
            elif number == 4 and not is_cut:
                host = text_of(data, value)
    except (MalformedMessage, struct.error, RecursionError):
        raise TraceError(Reason.UNREADABLE, "not an XSpace") from None
    if not any(plane.lines for plane in planes):
        raise TraceError(Reason.TRACE_TRUNCATED if cut and planes else Reason.UNREADABLE, "contains no complete plane")
    starts = [plane.stats.get("profile_start_time", 0) for plane in planes if plane.name == "Task Environment"]
    start_ns = next((start for start in starts if isinstance(start, int) and 0 < start < 2**63), 0)
    return PlaneSpace(tuple(planes), not cut, host, start_ns, programs)


class _PlaneReader:
    """Decodes one plane: names at once, events on demand."""

    def __init__(self, data: Buffer, span: ByteRange) -> None:
        self._data = data
        self._names: dict[int, tuple[str, str]] = {}
        self._own_stats: dict[int, list[ByteRange]] = {}
        self._stat_names: dict[int, str] = {}
        self._metadata_stats: dict[int, Stats] = {}
        self._lines: list[ByteRange] = []
        self._stats: list[ByteRange] = []
        self._name = ""
        for number, wire, value, _ in read_fields(data, *span):
            if wire != 2:
                continue
            if number == 2:
                self._name = text_of(data, value)
            elif number == 3:
                self._lines.append(value)
            elif number == 4:
                for key, name, display, stats in self._metadata(value):
                    self._names[key], self._own_stats[key] = (name, display), stats
            elif number == 5:
                self._stat_names.update((key, name) for key, name, *_ in self._metadata(value))
            elif number == 6:
                self._stats.append(value)

    def plane(self) -> Plane:
        """Return the plane; lines of the same name stay separate."""
        lines = tuple(self._line(span) for span in self._lines)
        return Plane(self._name, lines, self._read_stats(self._stats))

    def programs(self) -> dict[str, ProgramBytes]:
        """Return the compiled programs that the plane contains, by name."""
        if self._name != _PROGRAMS:
            return {}
        found = {}
        for key, (name, display) in self._names.items():
            for span in self._own_stats[key]:
                for number, wire, content, _ in read_fields(self._data, *span):
                    if number == 6 and wire == 2:
                        found[display or name] = ProgramBytes(self._data, content)
        return found

    def _metadata(self, entry: ByteRange) -> Iterator[tuple[int, str, str, list[ByteRange]]]:
        """Yield id, name, display name and statistics of the event or statistic that an entry of a map describes."""
        for described in WireMessage(self._data, entry).messages(2):
            yield described.number(1), described.text(2), described.text(4), described.spans(5)

    def _line(self, span: ByteRange) -> PlaneLine:
        name, display, start_ns = "", "", 0
        for number, wire, value, _ in read_fields(self._data, *span):
            if number == 4:
                continue
            if number == 2 and wire == 2:
                name = text_of(self._data, value)
            elif number == 11 and wire == 2:
                display = text_of(self._data, value)
            elif number == 3 and wire == 0:
                start_ns = to_signed(value[0])
        return PlaneLine(display or name, partial(self._read_events, span, start_ns))

    def _read_events(self, span: ByteRange, start_ns: int) -> Iterator[XEvent]:
        for number, wire, value, _ in read_fields(self._data, *span):
            if number != 4 or wire != 2:
                continue
            key, offset, duration, stats = 0, 0, 0, []
            for at, kind, content, _ in read_fields(self._data, *value):
                if at == 4 and kind == 2:
                    stats.append(content)
                elif kind == 0 and at == 1:
                    key = content[0]
                elif kind == 0 and at == 2:
                    offset = to_signed(content[0])
                elif kind == 0 and at == 3:
                    duration = to_signed(content[0])
            name, display = self._names.get(key, ("", ""))
            start_ps = start_ns * 1000 + offset
            if (name or display) and abs(start_ps) < _MAX_PS and 0 <= duration < _MAX_PS:
                yield XEvent(
                    key,
                    display or name.split(" = ", 1)[0].lstrip("%"),
                    start_ps,
                    duration,
                    partial(self._all_stats, key, name, stats),
                )

    def _all_stats(self, key: int, name: str, stats: list[ByteRange]) -> Stats:
        common = self._metadata_stats.get(key)
        if common is None:
            common = {"long_name": name, **self._read_stats(self._own_stats.get(key, []))}
            self._metadata_stats[key] = common
        return {**common, **self._read_stats(stats)} if stats else common

    def _read_stats(self, spans: list[ByteRange]) -> Stats:
        stats: Stats = {}
        for span in spans:
            name, value = "", None
            for number, wire, content, _ in read_fields(self._data, *span):
                if number == 1 and wire == 0:
                    name = self._stat_names.get(content[0], "")
                else:
                    value = self._stat_value(number, wire, content)
            if name and value is not None:
                stats[name] = value
        return stats

    def _stat_value(self, number: int, wire: int, content: ByteRange) -> Any:
        if number == 2 and wire == 1:
            return _DOUBLE.unpack(self._data[content[0] : content[1]])[0]
        if wire == 0:
            return {3: content[0], 4: to_signed(content[0]), 7: self._stat_names.get(content[0])}.get(number)
        if wire == 2 and number == 5:
            return text_of(self._data, content)
        if wire == 2 and number == 6:
            return self._data[content[0] : content[1]]
        return None
