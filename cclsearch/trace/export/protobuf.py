"""Protobuf's wire format, as far as Chakra's schema needs it: varints and length-delimited fields.

The encoding is documented at protobuf.dev (encoding); fields are written in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

_VARINT, _BYTES = 0, 2


def encode_varint(value: int) -> bytes:
    """An unsigned varint; negative numbers take the ten bytes of their two's complement, as int64 does."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(number: int, kind: int) -> bytes:
    return encode_varint(number << 3 | kind)


def uint_field(number: int, value: int) -> bytes:
    """An integer, boolean or enum field; proto3 leaves out zero."""
    return _key(number, _VARINT) + encode_varint(value) if value else b""


def present_uint_field(number: int, value: int) -> bytes:
    """As `uint_field`, but zero is written too: a member of a oneof is there or not."""
    return _key(number, _VARINT) + encode_varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    """A string, bytes or message field."""
    return _key(number, _BYTES) + encode_varint(len(value)) + value


def text_field(number: int, value: str) -> bytes:
    """A string field; proto3 leaves out the empty string."""
    return bytes_field(number, value.encode("utf-8", "replace")) if value else b""


def packed_field(number: int, values: Iterable[int]) -> bytes:
    """A repeated integer field in packed form; empty where there is none."""
    packed = b"".join(encode_varint(value) for value in values)
    return bytes_field(number, packed) if packed else b""


def delimited(message: bytes) -> bytes:
    """A message with its length in front: how Chakra strings messages together in a file."""
    return encode_varint(len(message)) + message
