"""Protocol buffer messages by their wire format, in place: only the fields that a reader needs are decoded."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from cclsearch.trace.events import Reason
from cclsearch.trace.readers.stream import GZIP_MAGIC, ByteStream, ReadLimits, TraceError

Buffer = bytes | mmap.mmap
ByteRange = tuple[int, int]
_MAX_BYTES = 4 << 30


class MalformedMessage(Exception):
    """The bytes are not a protocol buffer message."""


def read_message_bytes(path: Path, limits: ReadLimits) -> Buffer:
    """Return the file's bytes, mapped or unpacked; raises TraceError if there are too many."""
    size, limit = path.stat().st_size, min(_MAX_BYTES, limits.raw_bytes)
    if size > limit:
        raise TraceError(Reason.TOO_LARGE, f"a file of {size >> 20} MiB; the limit is {limit >> 20} MiB")
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
                raise TraceError(Reason.TOO_LARGE, "the file is larger than 1 GiB when unpacked")
    return bytes(whole)


def read_fields(
    data: Buffer, start: int, stop: int, *, may_be_cut: bool = False
) -> Iterator[tuple[int, int, ByteRange, bool]]:
    """Yield (field number, wire type, value, whether the value is truncated); a varint's value is (value, 0)."""
    position = start
    while position < stop:
        key, position = read_varint(data, position, stop, may_be_cut)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise MalformedMessage
        if wire == 0:
            value, position = read_varint(data, position, stop, may_be_cut)
            yield number, wire, (value, 0), False
            continue
        if wire == 2:
            length, position = read_varint(data, position, stop, may_be_cut)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise MalformedMessage
        end = position + length
        if end > stop:
            if not may_be_cut:
                raise MalformedMessage
            yield number, wire, (position, stop), True
            return
        yield number, wire, (position, end), False
        position = end


def read_varint(data: Buffer, position: int, stop: int, may_be_cut: bool) -> tuple[int, int]:
    """Return the varint at this position and the position behind it."""
    value = shift = 0
    while position < stop and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
    raise MalformedMessage


class WireMessage:
    """The fields of one embedded message by number; decoded in place, and text and messages in it on demand."""

    def __init__(self, data: Buffer, span: ByteRange) -> None:
        """Find the fields; raises MalformedMessage."""
        self._data = data
        self._numbers: dict[int, list[int]] = {}
        self._spans: dict[int, list[ByteRange]] = {}
        for number, wire, value, _ in read_fields(data, *span):
            if wire == 0:
                self._numbers.setdefault(number, []).append(value[0])
            elif wire == 2:
                self._spans.setdefault(number, []).append(value)

    def number(self, field: int, default: int = 0) -> int:
        """Return a whole number, without its sign."""
        return self._numbers[field][-1] if field in self._numbers else default

    def text(self, field: int) -> str:
        """Return a string; "" without one."""
        return text_of(self._data, self._spans[field][-1]) if field in self._spans else ""

    def bytes(self, field: int) -> bytes:
        """Return the bytes of a field; raises LookupError without one."""
        start, stop = self._spans[field][-1]
        return self._data[start:stop]

    def message(self, field: int) -> WireMessage:
        """Return an embedded message; raises LookupError without one."""
        return WireMessage(self._data, self._spans[field][-1])

    def spans(self, field: int) -> list[ByteRange]:
        """Return the places of a repeated field's values."""
        return self._spans.get(field, [])

    def messages(self, field: int) -> list[WireMessage]:
        """Return the embedded messages of a repeated field."""
        return [WireMessage(self._data, span) for span in self.spans(field)]

    def numbers(self, field: int) -> tuple[int, ...]:
        """Return the whole numbers of a repeated field, packed or not."""
        found = list(self._numbers.get(field, ()))
        for position, stop in self.spans(field):
            while position < stop:
                value, position = read_varint(self._data, position, stop, False)
                found.append(value)
        return tuple(found)


def to_signed(value: int) -> int:
    """Return the int64 with the varint as its two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def text_of(data: Buffer, span: ByteRange) -> str:
    """Return the string at these bytes."""
    return data[span[0] : span[1]].decode("utf-8", "replace")
