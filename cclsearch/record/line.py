"""One line of the ledger: an event as JSON, with a checksum as its last field."""

from __future__ import annotations

import json
import zlib

from cclsearch.record.event import EVENT, Event
from cclsearch.record.version_1 import upgrade

_END = b',"crc":"%08x"}\n'
_NUM_BYTES = len(_END % 0)


def encode_line(event: Event) -> bytes:
    """The event's line, with its end; `crc` is the CRC-32 of the bytes before that field, as eight hex digits."""
    data = EVENT.dump_json(event)[:-1]
    return data + _END % zlib.crc32(data)


def has_checksum(line: bytes) -> bool:
    """Whether the line has a checksum, as each has since version 2; raises ValueError if it has a wrong one."""
    data, end = line[:-_NUM_BYTES], line[-_NUM_BYTES:]
    if end == _END % zlib.crc32(data):
        return True
    if end.startswith(_END[: _END.index(b"%")]):
        raise ValueError("its checksum does not match, so it was changed after it was written")
    return False


def decode_line(line: bytes) -> Event:
    """The event of a line, of any version; raises ValueError if it is not one."""
    if has_checksum(line):
        return EVENT.validate_json(line[:-_NUM_BYTES] + b"}")
    try:
        data = json.loads(line)
        return EVENT.validate_python(upgrade(data) if isinstance(data, dict) else data)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
