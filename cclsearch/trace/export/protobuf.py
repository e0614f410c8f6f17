"""The part of protobuf's wire format that Chakra's and Perfetto's schemas need.

The encoding is documented at protobuf.dev (encoding); fields are written in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_TABLE_SIZE = 1 << 14


def encode_varint(value: int) -> bytes:
    """Return an unsigned varint; negative numbers use the ten bytes of their two's complement, like int64."""
    ends, continued = _two_byte_tables()
    if 0 <= value < _TABLE_SIZE:
        return ends[value]
    value &= (1 << 64) - 1
    out = b""
    while value >= _TABLE_SIZE:
        out += continued[value % _TABLE_SIZE]
        value >>= 14
    return out + ends[value]


@cache
def _two_byte_tables() -> tuple[list[bytes], list[bytes]]:
    """Return the last bytes of a varint, and two bytes that others follow, for each 14 bits: files have millions."""
    continued = [bytes((value & 0x7F | 0x80, value >> 7 | 0x80)) for value in range(_TABLE_SIZE)]
    ends = [
        bytes((value,)) if value < 0x80 else bytes((value & 0x7F | 0x80, value >> 7)) for value in range(_TABLE_SIZE)
    ]
    return ends, continued


@cache
def _key(number: int, kind: int) -> bytes:
    return encode_varint(number << 3 | kind)


def uint_field(number: int, value: int) -> bytes:
    """Return an integer, boolean or enum field; proto3 does not write zero."""
    return _key(number, _VARINT) + encode_varint(value) if value else b""


def present_uint_field(number: int, value: int) -> bytes:
    """Return an integer field that is written even if it is zero, as a member of a oneof must be."""
    return _key(number, _VARINT) + encode_varint(value)


def fixed64_field(number: int, value: int) -> bytes:
    """Return an unsigned integer field of eight bytes."""
    return _key(number, _FIXED64) + value.to_bytes(8, "little")


def bytes_field(number: int, value: bytes) -> bytes:
    """Return a string, bytes or message field."""
    return _key(number, _BYTES) + encode_varint(len(value)) + value


def text_field(number: int, value: str) -> bytes:
    """Return a string field; proto3 does not write the empty string."""
    return bytes_field(number, value.encode("utf-8", "replace")) if value else b""


def packed_field(number: int, values: Iterable[int]) -> bytes:
    """Return a repeated integer field in packed form; nothing if there are no values."""
    packed = b"".join(encode_varint(value) for value in values)
    return bytes_field(number, packed) if packed else b""


def delimited(message: bytes) -> bytes:
    """Return a message after its length, as Chakra files store messages."""
    return encode_varint(len(message)) + message
