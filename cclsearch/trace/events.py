"""The columnar table that every metric reads, whichever profiler wrote the trace.

A `TraceSet` has one `EventTable` per rank. A table's rows are events in the order of the file (not sorted);
`rows_of` gives sorted row numbers. Times are whole nanoseconds after `base_ns`, exact to the last digit in the
file. Device rows (compute, communication, memory) and host rows (launches, operators, annotations) share the columns.

A file that covers several devices (XSpace, Nsight Systems) becomes one table per device: each device is a rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.files.run_log import RunLog

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]


class Status(StrEnum):
    """Trust in a result."""

    OK = "ok"
    PARTIAL = "partial"
    NOT_AVAILABLE = "not_available"


class FileStatus(StrEnum):
    """Part of a trace file that could be read."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    NOT_AVAILABLE = "not_available"


class Kind(IntEnum):
    """Kind of a row. 1 to 4 are work on a device; 10 and above are host events or annotations."""

    OTHER = 0
    COMPUTE = 1
    """A compute kernel; on CPU traces an outermost operator without the `c10d` operators in it."""
    COMM = 2
    """A collective or point-to-point kernel (a gloo call on CPU traces); `coll_id` is its entry."""
    MEMCPY = 3
    MEMSET = 4
    RUNTIME = 10
    """A runtime or driver call on the host: launches and synchronizations."""
    CPU_OP = 11
    ANNOTATION = 12
    """A user's range on the host (record_function, NVTX, TraceAnnotation), step markers included."""
    DEVICE_ANNOTATION = 13
    """The same range on the device's timeline: overlaps other rows."""
    SYNC = 14
    """A wait of the host or of a stream (`cuda_sync` events, Nsight SYNCHRONIZATION)."""
    OVERHEAD = 15
    """Overhead of the profiler."""
    CONTAINER = 16
    """A device row that only encloses other device rows (an XLA while loop, a module)."""


DEVICE_WORK = (Kind.COMPUTE, Kind.COMM, Kind.MEMCPY, Kind.MEMSET)


class CollectiveKind(StrEnum):
    """Collective operation of a communication row."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    SEND_RECV = "send_recv"
    """Point to point with unknown direction, and collective-permute."""
    BARRIER = "barrier"
    UNKNOWN = "unknown"


POINT_TO_POINT = frozenset({CollectiveKind.SEND, CollectiveKind.RECV, CollectiveKind.SEND_RECV})


class Reason(StrEnum):
    """Reason for a partial or missing value (closed list)."""

    NO_TRACE_FILES = "no_trace_files"
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    MIXED_RUNS = "mixed_runs"
    NO_GPU_EVENTS = "no_gpu_events"
    NO_STEP_MARKERS = "no_step_markers"
    TOO_FEW_STEPS = "too_few_steps"
    NO_COMM_EVENTS = "no_comm_events"
    NO_COLLECTIVE_ARGS = "no_collective_args"
    UNKNOWN_DTYPE = "unknown_dtype"
    SINGLE_RANK = "single_rank"
    RANKS_MISSING = "ranks_missing"
    SEQUENCE_MISMATCH = "sequence_mismatch"
    NO_CLOCK_ALIGNMENT = "no_clock_alignment"
    NO_SHAPES = "no_shapes"
    NO_FLOPS_MODEL = "no_flops_model"
    UNKNOWN_PEAK = "unknown_peak"
    NO_LAUNCH_RECORDS = "no_launch_records"
    NO_GRID_INFO = "no_grid_info"
    FORMAT_UNSUPPORTED = "format_unsupported"
    TRACE_TRUNCATED = "trace_truncated"
    IMPOSSIBLE_TIMES = "impossible_times"
    MISSING_KERNELS = "missing_kernels"
    EMPTY_STEPS = "empty_steps"
    CARD_MISSING_FIELD = "card_missing_field"
    PHASE_MISMATCH = "phase_mismatch"
    PATH_INCOMPLETE = "path_incomplete"
    NO_TIMES = "no_times"


@dataclass(frozen=True)
class Collective:
    """Operation, group and sizes of one distinct collective call; None if the trace does not say."""

    kind: CollectiveKind
    group: str | None = None
    """Name of the process group in the trace, equal on all ranks of the group."""
    group_desc: str | None = None
    """The framework's name for it (`mesh_tp`, `default_pg`), or the axis of a `comm::tp::all_reduce` range."""
    group_ranks: tuple[int, ...] | None = None
    group_size: int | None = None
    dtype: str | None = None
    """Data type in the trace's own spelling (`BFloat16`, `float`, `bf16`)."""
    in_nelems: int | None = None
    out_nelems: int | None = None
    in_bytes: int | None = None
    """Bytes of this rank's input; None if the data type is unknown."""
    out_bytes: int | None = None
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    peer: int | None = None
    """The other rank of a point-to-point call."""
    has_args: bool = False
    """False if only the kernel's name identifies the operation."""
    world_size: int | None = None
    """Number of devices in all groups of the call, if it names them: a lower bound for the run."""

    @property
    def message_bytes(self) -> int | None:
        """Size used for bandwidth: the output of an all-gather, else the input (both are the full tensor)."""
        return self.out_bytes if self.kind == CollectiveKind.ALL_GATHER else self.in_bytes


@dataclass(frozen=True)
class OpShape:
    """Input shapes of one distinct call of an operator whose FLOPs can be counted."""

    dims: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    """`Concrete Inputs` if recorded: strides, paddings, flags, as text."""


@dataclass(frozen=True)
class LaunchShape:
    """Grid and resources of one distinct kernel launch."""

    blocks: int
    threads_per_block: int
    registers_per_thread: int | None = None
    shared_memory_bytes: int | None = None


@dataclass(frozen=True)
class OpCost:
    """Cost of one execution of an operation: XLA's own count, or the matrix products in the program it compiled."""

    flops: float | None = None
    bytes_accessed: float | None = None
    precision: str | None = None
    """Key of `peak_flops` for the data type of the operands (`bf16`); None if unknown."""


@dataclass(frozen=True)
class Step:
    """One step marker of the host (or of the device, if only that is marked)."""

    number: int
    """Number in the marker, else counted from 0."""
    name: str
    start_ns: int
    end_ns: int
    complete: bool = True
    """False if the window of the trace cuts the marker or the launches of its device rows."""


@dataclass(frozen=True)
class DeviceInfo:
    """The device of this table's device rows; fields that the trace leaves out are None."""

    ordinal: int
    name: str = ""
    num_sms: int | None = None
    memory_bytes: int | None = None
    max_threads_per_sm: int | None = None
    registers_per_sm: int | None = None
    shared_memory_per_sm_bytes: int | None = None
    peak_flops: float | None = None
    """Only from traces that state it (TPU planes)."""
    peak_memory_gbps: float | None = None


@dataclass(frozen=True)
class ProcessGroup:
    """One communicator that this rank belongs to."""

    name: str
    desc: str = ""
    ranks: tuple[int, ...] = ()
    size: int | None = None


@dataclass(frozen=True)
class MemoryPoints:
    """The allocator's reports (`[memory]` instants), in the order of the file."""

    ts_ns: Ints
    allocated_bytes: Ints
    """Total allocated after the event. Starts near 0 in a profiled window: earlier allocations are not counted."""
    reserved_bytes: Ints
    """-1 if not reported (CPU)."""
    device: NDArray[np.int16]
    """-1 is the host."""


_NONE = np.zeros(0, np.int64)
NO_MEMORY_POINTS = MemoryPoints(_NONE, _NONE, _NONE, np.zeros(0, np.int16))

COLUMNS: Mapping[str, str] = {
    "ts_ns": "<i8",
    "dur_ns": "<i8",
    "kind": "|u1",
    "name_id": "<i4",
    "device": "<i2",
    "stream": "<i4",
    "corr": "<i4",
    "step_id": "<i4",
}
"""The dense columns of a table and their types."""

SPARSE_COLUMNS: Mapping[str, str] = {
    "bytes": "<i8",
    "blocks_per_sm": "<f4",
    "coll_id": "<i4",
    "launch": "<i4",
    "op": "<i4",
    "shape_id": "<i4",
    "grid_id": "<i4",
    "rf_id": "<i8",
}
"""The columns that few rows have, and their types."""


def rows_of_kinds(kind: NDArray[np.uint8], kinds: Sequence[Kind]) -> Ints:
    """Return the row numbers of these kinds, in the order of the table."""
    wanted = np.zeros(len(kind), bool)
    for one in kinds:  # comparing bytes is ten times faster than looking each up in a table
        wanted |= kind == np.uint8(one)
    return np.flatnonzero(wanted)


def _dense(name: str) -> cached_property[NDArray[Any]]:
    """Return the property that gives a sparse column a value in every row: -1 (floats: NaN) where it has none."""

    def fill(table: EventTable) -> NDArray[Any]:
        dtype = np.dtype(SPARSE_COLUMNS[name])
        dense = np.full(len(table), np.nan if dtype.kind == "f" else -1, dtype)
        if name in table.sparse:
            rows, values = table.sparse[name]
            dense[rows] = values
        return dense

    return cached_property(fill)


@dataclass(frozen=True, eq=False, kw_only=True)
class TableFacts:
    """Facts about a table besides its arrays."""

    names: tuple[str, ...]
    collectives: tuple[Collective, ...] = ()
    shapes: tuple[OpShape, ...] = ()
    grids: tuple[LaunchShape, ...] = ()
    threads: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    step_source: str = ""
    """Source of the step markers (`nvtx`, ..., see `rules/steps.yaml`); "" without steps."""
    op_costs: Mapping[int, OpCost] = field(default_factory=lambda: MappingProxyType({}))
    """name_id -> XLA's cost of the operation."""
    rank: int = 0
    world_size: int | None = None
    """Number of ranks in the trace; None if it does not say."""
    format: str = "kineto"
    """kineto, xla, nsys, rocprof, chakra or pytorch-et."""
    is_timed: bool = True
    """False for a trace without times: `ts_ns` and `dur_ns` are then places in the order of starts, not nanoseconds."""
    accelerator: str = "gpu"
    """gpu, tpu or cpu: type of the device."""
    devices: tuple[DeviceInfo, ...] = ()
    """Devices that have rows here; one in almost every trace."""
    backend: str = ""
    groups: tuple[ProcessGroup, ...] = ()
    host: str = ""
    """Host name if the trace or the file's name states it; tables of one host share a clock."""
    base_ns: int = 0
    """Absolute time of ts_ns = 0: Unix time if `clock` is "unix", else only comparable within one host."""
    clock: str = "unix"
    process_id: int | None = None
    """Number of the recorded process, only in execution traces."""
    source: str = ""
    """The file's path relative to the folder that was read."""
    reasons: tuple[Reason, ...] = ()
    """Why only a part of the file could be read or trusted; empty if all of it can."""
    problems: tuple[str, ...] = ()
    """What cannot be in the trace, in words."""


@dataclass(frozen=True, eq=False)
class EventTable(TableFacts):
    """All events of one rank as columns of equal length n; -1 in a column means "none" unless stated otherwise."""

    ts_ns: Ints
    """Start, after `base_ns`."""
    dur_ns: Ints
    kind: NDArray[np.uint8]
    """A `Kind`."""
    name_id: Ints32
    """Index into `names` and `name_class`."""
    device: NDArray[np.int16]
    """The device's ordinal; -1 on host rows."""
    stream: Ints32
    """The device's stream (XLA: its line); on host rows an index into `threads`."""
    corr: Ints32
    """Correlation id that links a runtime call to the device row it launched."""
    step_id: Ints32
    """Index into `steps`: for device rows the step whose window contains the launch; -1 is backlog or unattributed."""

    name_class: NDArray[np.uint8]
    """A `ComputeClass` for each name."""
    memory: MemoryPoints = NO_MEMORY_POINTS
    sparse: Mapping[str, tuple[Ints32, NDArray[Any]]] = field(default_factory=lambda: MappingProxyType({}))
    """Columns that few rows have, as (row numbers, values); properties of the same name return them dense."""

    bytes: ClassVar[cached_property[Ints]] = _dense("bytes")
    """Bytes of a memory copy or set; -1 for other rows."""
    blocks_per_sm: ClassVar[cached_property[NDArray[np.float32]]] = _dense("blocks_per_sm")
    """Thread blocks per multiprocessor; NaN if the trace does not say (ROCm, XLA, CPU)."""
    coll_id: ClassVar[cached_property[Ints32]] = _dense("coll_id")
    """Index into `collectives`; every COMM row has one, all others -1."""
    launch: ClassVar[cached_property[Ints32]] = _dense("launch")
    """For a device row: the row of the runtime call that launched it; -1 without a launch record."""
    op: ClassVar[cached_property[Ints32]] = _dense("op")
    """For a device row: the row of the operator with shapes (`shape_id` >= 0) that it ran for; else -1."""
    shape_id: ClassVar[cached_property[Ints32]] = _dense("shape_id")
    """For an operator whose FLOPs can be counted: index into `shapes`; else -1."""
    grid_id: ClassVar[cached_property[Ints32]] = _dense("grid_id")
    """For a kernel: index into `grids`; else -1."""
    rf_id: ClassVar[cached_property[Ints]] = _dense("rf_id")
    """PyTorch's id of the recorded function, only in execution traces: the profiler of the same process has it too."""

    def __len__(self) -> int:
        return len(self.ts_ns)

    @property
    def status(self) -> FileStatus:
        """Complete, or partial for the `reasons`."""
        return FileStatus.PARTIAL if self.reasons else FileStatus.COMPLETE

    @property
    def nbytes(self) -> int:
        """Size of all columns in bytes."""
        dense = sum(getattr(self, name).nbytes for name in COLUMNS)
        return int(dense + sum(rows.nbytes + values.nbytes for rows, values in self.sparse.values()))

    @property
    def end_ns(self) -> Ints:
        """End of each row, after `base_ns`."""
        return self.ts_ns + self.dur_ns

    def rows_of(self, *kinds: Kind, step: int | None = None) -> Ints:
        """Return the row numbers of these kinds (and of that step), sorted by start."""
        rows = rows_of_kinds(self.kind, kinds)
        if step is not None:
            rows = rows[self.step_id[rows] == step]
        return rows[np.argsort(self.ts_ns[rows], kind="stable")]

    def rows_named(self, pattern: re.Pattern[str], *kinds: Kind) -> Ints:
        """Return the row numbers of these kinds whose name has the pattern, sorted by start."""
        wanted = np.array([bool(pattern.search(name)) for name in self.names], bool)
        rows = rows_of_kinds(self.kind, kinds)
        rows = rows[wanted[self.name_id[rows]]] if len(rows) else rows
        return rows[np.argsort(self.ts_ns[rows], kind="stable")]


@dataclass(frozen=True)
class FileReport:
    """Result of reading one trace file."""

    path: str
    status: FileStatus
    reason: Reason | None = None
    message: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class TraceSet:
    """The tables of one run by rank, and the problems found."""

    tables: Mapping[int, EventTable]
    status: Status
    """Partial: a rank is missing or truncated; not available: no usable table, so `tables` is empty."""
    reasons: tuple[Reason, ...] = ()
    message: str = ""
    """One line for people that names the fault; "" without problems."""
    world_size: int | None = None
    """Number of ranks in the traces, else None; the launcher may know better."""
    missing_ranks: tuple[int, ...] = ()
    files: tuple[FileReport, ...] = ()
    folder: Path | None = None
    run_log: RunLog | None = None
    """Files next to the traces: the run's peak memory, a server's request log."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a table, sorted."""
        return tuple(sorted(self.tables))

    @property
    def reason(self) -> Reason | None:
        """The first and most severe of the reasons."""
        return self.reasons[0] if self.reasons else None
