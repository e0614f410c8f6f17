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


def to_signed(value: int) -> int:
    """Return the int64 with the varint as its two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def text_of(data: Buffer, span: ByteRange) -> str:
    """Return the string at these bytes."""
    return data[span[0] : span[1]].decode("utf-8", "replace")
