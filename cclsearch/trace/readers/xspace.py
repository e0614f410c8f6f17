"""Reads XSpace (`*.xplane.pb`) by its wire format: no TensorFlow, no generated code, only the needed fields.

Fields: XSpace planes=1 hostnames=4; XPlane name=2 lines=3 event_metadata=4 stat_metadata=5 stats=6; XLine name=2
timestamp_ns=3 events=4 display_name=11; XEvent metadata_id=1 offset_ps=2 duration_ps=3 stats=4; XEventMetadata id=1
name=2 display_name=4 stats=5; XStat metadata_id=1 double=2 uint64=3 int64=4 str=5 bytes=6 ref=7.
(openxla/xla, `xla/tsl/profiler/protobuf/xplane.proto`.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cclsearch.trace.events import Reason
from cclsearch.trace.readers.stream import GZIP_MAGIC, ByteStream, ReadLimits, TraceError
from cclsearch.trace.readers.xla_planes import Plane, PlaneLine, PlaneSpace, Stats, XEvent

Buffer = bytes | mmap.mmap
ByteRange = tuple[int, int]
_DOUBLE = struct.Struct("<d")
_MAX_BYTES = 4 << 30
_MAX_PS = 2**61


class _Malformed(Exception):
    """The bytes are not a protocol buffer message."""


def read_space(path: Path, limits: ReadLimits) -> PlaneSpace:
    """Return the planes of the file; a truncated file gives its complete planes. Raises TraceError for other files."""
    data = _read_bytes(path, limits)
    if not data:
        raise TraceError(Reason.UNREADABLE, "the file is empty")
    planes, host, cut = [], "", False
    try:
        for number, wire, value, is_cut in _fields(data, 0, len(data), may_be_cut=True):
            cut |= is_cut
            if wire != 2 or not 1 <= number <= 4:
                raise _Malformed
            if number == 1 and not is_cut:
                planes.append(_PlaneReader(data, value).plane())
            elif number == 4 and not is_cut:
                host = _text(data, value)
    except (_Malformed, struct.error, RecursionError):
        raise TraceError(Reason.UNREADABLE, "not an XSpace") from None
    if not any(plane.lines for plane in planes):
        raise TraceError(Reason.TRACE_TRUNCATED if cut and planes else Reason.UNREADABLE, "contains no complete plane")
    starts = [plane.stats.get("profile_start_time", 0) for plane in planes if plane.name == "Task Environment"]
    start_ns = next((start for start in starts if isinstance(start, int) and 0 < start < 2**63), 0)
    return PlaneSpace(tuple(planes), not cut, host, start_ns)


def _read_bytes(path: Path, limits: ReadLimits) -> Buffer:
    size, limit = path.stat().st_size, min(_MAX_BYTES, limits.raw_bytes)
    if size > limit:
        raise TraceError(Reason.TOO_LARGE, f"an XSpace of {size >> 20} MiB; the limit is {limit >> 20} MiB")
    if not size:
        return b""
    with path.open("rb") as file:
        if file.read(2) != GZIP_MAGIC:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with ByteStream(path, limits) as stream:
        block, whole = memoryview(bytearray(1 << 20)), bytearray()
        while count := stream.readinto(block):
            whole += block[:count]
            if len(whole) > _MAX_BYTES // 4:
                raise TraceError(Reason.TOO_LARGE, "the XSpace file is larger than 1 GiB when unpacked")
    return bytes(whole)


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
        for number, wire, value, _ in _fields(data, *span):
            if wire != 2:
                continue
            if number == 2:
                self._name = _text(data, value)
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

    def _metadata(self, entry: ByteRange) -> Iterator[tuple[int, str, str, list[ByteRange]]]:
        """Yield id, name, display name and statistics of the event or statistic that an entry of a map describes."""
        for number, wire, value, _ in _fields(self._data, *entry):
            if number != 2 or wire != 2:
                continue
            key, name, display, stats = 0, "", "", []
            for field, kind, content, _ in _fields(self._data, *value):
                if field == 1 and kind == 0:
                    key = content[0]
                elif kind == 2 and field == 2:
                    name = _text(self._data, content)
                elif kind == 2 and field == 4:
                    display = _text(self._data, content)
                elif kind == 2 and field == 5:
                    stats.append(content)
            yield key, name, display, stats

    def _line(self, span: ByteRange) -> PlaneLine:
        name, display, start_ns = "", "", 0
        for number, wire, value, _ in _fields(self._data, *span):
            if number == 4:
                continue
            if number == 2 and wire == 2:
                name = _text(self._data, value)
            elif number == 11 and wire == 2:
                display = _text(self._data, value)
            elif number == 3 and wire == 0:
                start_ns = _signed(value[0])
        return PlaneLine(display or name, partial(self._read_events, span, start_ns))

    def _read_events(self, span: ByteRange, start_ns: int) -> Iterator[XEvent]:
        for number, wire, value, _ in _fields(self._data, *span):
            if number != 4 or wire != 2:
                continue
            key, offset, duration, stats = 0, 0, 0, []
            for field, kind, content, _ in _fields(self._data, *value):
                if field == 4 and kind == 2:
                    stats.append(content)
                elif kind == 0 and field == 1:
                    key = content[0]
                elif kind == 0 and field == 2:
                    offset = _signed(content[0])
                elif kind == 0 and field == 3:
                    duration = _signed(content[0])
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
            for number, wire, content, _ in _fields(self._data, *span):
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
            return {3: content[0], 4: _signed(content[0]), 7: self._stat_names.get(content[0])}.get(number)
        if wire == 2 and number == 5:
            return _text(self._data, content)
        if wire == 2 and number == 6:
            return self._data[content[0] : content[1]]
        return None


def _fields(
    data: Buffer, start: int, stop: int, *, may_be_cut: bool = False
) -> Iterator[tuple[int, int, ByteRange, bool]]:
    """Yield (field number, wire type, value, whether the value is truncated); a varint's value is (value, 0)."""
    position = start
    while position < stop:
        key, position = _varint(data, position, stop, may_be_cut)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise _Malformed
        if wire == 0:
            value, position = _varint(data, position, stop, may_be_cut)
            yield number, wire, (value, 0), False
            continue
        if wire == 2:
            length, position = _varint(data, position, stop, may_be_cut)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise _Malformed
        end = position + length
        if end > stop:
            if not may_be_cut:
                raise _Malformed
            yield number, wire, (position, stop), True
            return
        yield number, wire, (position, end), False
        position = end


def _varint(data: Buffer, position: int, stop: int, may_be_cut: bool) -> tuple[int, int]:
    value = shift = 0
    while position < stop and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
    raise _Malformed


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(data: Buffer, span: ByteRange) -> str:
    return data[span[0] : span[1]].decode("utf-8", "replace")
