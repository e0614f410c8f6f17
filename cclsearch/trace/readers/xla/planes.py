"""Data model shared by XLA's two formats: planes (a device or a host) with lines of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cclsearch.trace.events import Kind, OpCost
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.readers.protobuf_wire import Buffer, ByteRange

Stats = dict[str, Any]


class ProgramBytes(NamedTuple):
    """Position of a serialized HloProto in a file."""

    data: Buffer
    span: ByteRange


class XEvent(NamedTuple):
    """One event on a line; `read_stats` returns its statistics with its metadata's."""

    key: Any
    """Equal for events of the same operation."""
    name: str
    start_ps: int
    duration_ps: int
    read_stats: Callable[[], Stats]

    @property
    def end_ps(self) -> int:
        """End of the event."""
        return self.start_ps + self.duration_ps


@dataclass(frozen=True)
class PlaneLine:
    """One line of a plane; `read_events` may be called repeatedly."""

    name: str
    read_events: Callable[[], Iterator[XEvent]]


@dataclass(frozen=True)
class Plane:
    """A device or a host."""

    name: str
    lines: tuple[PlaneLine, ...] = ()
    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True)
class PlaneSpace:
    """All planes of one file."""

    planes: tuple[Plane, ...]
    is_complete: bool
    host: str = ""
    start_ns: int = 0
    """Unix time of event time 0; 0 if the file does not say."""
    programs: Mapping[str, ProgramBytes] = field(default_factory=dict)
    """`jit_step(17)` -> the compiled program."""


class XlaOp(NamedTuple):
    """A run operation: an instruction of a program, or a graph of several."""

    program: str
    """Name and number, as in `jit_step(17)`."""
    name: str


@dataclass
class XlaRow:
    """One row under construction: of the device, or of the host (`key` is None)."""

    key: Any
    name: str
    start_ps: int
    duration_ps: int
    kind: Kind
    line: int
    run: int = -1
    compute: ComputeClass = ComputeClass.OTHER
    stats: Stats | None = None
    """Statistics of the first event of that operation."""
    op: XlaOp | None = None
    cost: OpCost | None = None
    """Cost of the matrix products in one run of the row; None if the file's program does not show them."""


def op_of(stats: Stats) -> XlaOp | None:
    """Return the instruction that an event's statistics name."""
    if "hlo_op" not in stats:
        return None
    return XlaOp(f"{stats.get('hlo_module')}({stats.get('program_id')})", str(stats["hlo_op"]))


def int_or_none(value: Any) -> int | None:
    """Return the value as a whole number, also from text; None for other values."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 2**62 else None
