"""The events of a Chrome-format JSON trace as msgspec structs."""

from __future__ import annotations

import msgspec

NO_ARGS = msgspec.Raw(b"")


class Span(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event; `args` stays undecoded until needed."""

    cat: str = ""
    name: str = ""
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


class SpanWithPid(Span, tag_field="ph", tag="X", gc=False):
    """A complete event with its process (for XLA, process and thread are plane and line)."""

    pid: int | str = 0


class AnyEvent(msgspec.Struct, gc=False):
    """An event of any phase, for traces whose events do not fit the tagged types."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: float | None = None
    dur: float | None = None
    args: msgspec.Raw = NO_ARGS


IGNORED_PHASES = tuple(msgspec.defstruct(f"Phase_{p}", [], gc=False, tag_field="ph", tag=p) for p in "sftbenCBEIPNOD")
"""Phases that no metric needs (flows, counters): decoding into empty structs is the fastest way to skip them."""
