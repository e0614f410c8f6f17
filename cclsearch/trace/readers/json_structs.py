"""The events of a Chrome-format JSON trace as msgspec structs, and the digits that their times share."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

NO_ARGS = msgspec.Raw(b"")
# float64 resolves 2e12 us to 0.2 ns, and 1e12 us are eleven days.
KEEP_DIGITS = 12
"""Digits kept of a long time."""
_LONG_TIME = re.compile(rb'(?P<key>"ts":\s*)(?P<digits>[1-9]\d*)\.\d')


class Span(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event; `args` stays undecoded until needed (for XLA, process and thread are plane and line)."""

    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = NO_ARGS


class Meta(msgspec.Struct, tag_field="ph", tag="M", gc=False):
    """The name of a process or thread."""

    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
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
