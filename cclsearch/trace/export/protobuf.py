"""The part of protobuf's wire format that Chakra's schema needs.

The encoding is documented at protobuf.dev (encoding); fields are written in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

_VARINT, _BYTES = 0, 2


def encode_varint(value: int) -> bytes:
    """Return an unsigned varint; negative numbers use the ten bytes of their two's complement, like int64."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@cache
def _key(number: int, kind: int) -> bytes:
    return encode_varint(number << 3 | kind)


def uint_field(number: int, value: int) -> bytes:
    """Return an integer, boolean or enum field; proto3 does not write zero."""
    return _key(number, _VARINT) + encode_varint(value) if value else b""


def present_uint_field(number: int, value: int) -> bytes:
    """Return an integer field that is written even if it is zero, as a member of a oneof must be."""
    return _key(number, _VARINT) + encode_varint(value)


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
