"""One line of the ledger: an event as JSON, with a checksum as its last field."""

from __future__ import annotations

import json
import zlib

from cclsearch.record.event import EVENT, Event
from cclsearch.record.version_1 import upgrade

_MARK = b',"crc":"'
_NUM_BYTES = len(_MARK) + len('01234567"}')


def encode_line(event: Event) -> bytes:
    """The event's line, with its end; `crc` is the CRC-32 of the bytes before that field, as eight hex digits."""
    data = EVENT.dump_json(event)[:-1]
    return data + _MARK + b'%08x"}\n' % zlib.crc32(data)


def has_checksum(line: bytes) -> bool:
    """Whether the line has a checksum, as each has since version 2; raises ValueError if it has a wrong one."""
    data, end = line[:-_NUM_BYTES], line[-_NUM_BYTES:]
    if not end.startswith(_MARK):
        return False
    if end[len(_MARK) :] != b'%08x"}' % zlib.crc32(data):
        raise ValueError("its checksum does not match, so it was changed after it was written")
    return True


def decode_line(line: bytes) -> Event:
    """The event of a line without its end, of any version; raises ValueError if it is not one."""
    if has_checksum(line):
        return EVENT.validate_json(line[:-_NUM_BYTES] + b"}")
    try:
        data = json.loads(line)
        return EVENT.validate_python(upgrade(data) if isinstance(data, dict) else data)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
