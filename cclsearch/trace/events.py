"""The one columnar table that every metric reads, whatever profiler wrote the trace.

A `TraceSet` holds one `EventTable` for each rank. A table's rows are events in the order of the file (not sorted);
`rows_of` gives sorted row numbers. Times are whole nanoseconds after `base_ns`, exact to the last digit that the file
prints. Device rows (compute, communication, memory) and host rows (launches, operators, annotations) share the columns.

A file that covers several devices (XSpace, Nsight Systems) becomes one table for each device: each device is a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cclsearch.trace.run_log import RunLog

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Ints32 = NDArray[np.int32]
    Floats32 = NDArray[np.float32]


class Kind(IntEnum):
    """What a row is. 1 to 4 is work on a device; from 10 on it happens on the host (or only annotates)."""

    OTHER = 0
    COMPUTE = 1
    """A kernel that computes; on CPU traces a span of an outermost operator, less the `c10d` operators in it."""
    COMM = 2
    """A collective or point-to-point kernel (a gloo call on CPU traces); `coll_id` says which."""
    MEMCPY = 3
    MEMSET = 4
    RUNTIME = 10
    """A runtime or driver call on the host: launches and synchronisations."""
    CPU_OP = 11
    ANNOTATION = 12
    """A user's range on the host (record_function, NVTX, TraceAnnotation), step markers included."""
    DEVICE_ANNOTATION = 13
    """The same range drawn on the device: re-covers other rows."""
    SYNC = 14
    """A wait of the host or of a stream (`cuda_sync` events, Nsight SYNCHRONIZATION)."""
    OVERHEAD = 15
    """Time that the profiler itself took."""
    CONTAINER = 16
    """A device row that only encloses other device rows (an XLA while loop, a module)."""


DEVICE_WORK = (Kind.COMPUTE, Kind.COMM, Kind.MEMCPY, Kind.MEMSET)


class ComputeClass(IntEnum):
    """What a compute kernel does, by its name: see the rule table `kernels.yaml`."""

    OTHER = 0
    GEMM = 1
    ATTENTION = 2
    NORM = 3
    ELEMENTWISE = 4
    REDUCTION = 5
    MOE = 6
    """Only by names that can mean nothing else; a metric asks the card whether the model has experts."""
    OPTIMIZER = 7
    EMBEDDING = 8
    CONVOLUTION = 9


class CollectiveKind(StrEnum):
    """The operation a communication row belongs to."""

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
    """Point to point with direction unknown, and collective-permute."""
    BARRIER = "barrier"
    UNKNOWN = "unknown"


class Reason(StrEnum):
    """Why something is not available or only partly so (closed list)."""

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
    CARD_MISSING_FIELD = "card_missing_field"
    PHASE_MISMATCH = "phase_mismatch"


@dataclass(frozen=True)
class Collective:
    """What one distinct call of a collective moved, as far as the trace says; None where it does not say."""

    kind: CollectiveKind
    group: str | None = None
    """The process group's name in the trace; the same name means the same group on every rank."""
    group_desc: str | None = None
    """What the framework calls it (`mesh_tp`, `default_pg`), or the axis of a `comm::tp::all_reduce` range."""
    group_ranks: tuple[int, ...] | None = None
    group_size: int | None = None
    dtype: str | None = None
    """As the trace writes it (`BFloat16`, `float`, `bf16`)."""
    in_nelems: int | None = None
    out_nelems: int | None = None
    in_bytes: int | None = None
    """Bytes of this rank's input; None when the data type is not known."""
    out_bytes: int | None = None
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    peer: int | None = None
    """The other rank of a point-to-point call."""
    has_args: bool = False
    """False: only the kernel's name told what it is."""
    world_size: int | None = None
    """Devices of all groups of the call together, where it names them all: as many as the run has at least."""

    @property
    def message_bytes(self) -> int | None:
        """The size that bandwidth counts: all-gather its output, else its input (the full tensor for each)."""
        return self.out_bytes if self.kind == CollectiveKind.ALL_GATHER else self.in_bytes


@dataclass(frozen=True)
class OpShape:
    """Input shapes of one distinct call of an operator whose FLOPs can be counted."""

    dims: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    """`Concrete Inputs` where recorded: strides, paddings, flags, as text."""


@dataclass(frozen=True)
class LaunchShape:
    """Grid and resources of one distinct kernel launch."""

    blocks: int
    threads_per_block: int
    registers_per_thread: int | None = None
    shared_memory_bytes: int | None = None


@dataclass(frozen=True)
class OpCost:
    """What XLA says one run of an operation costs."""

    flops: float | None = None
    bytes_accessed: float | None = None


@dataclass(frozen=True)
class Step:
    """One step marker of the host (or of the device where only that is marked)."""

    number: int
    """As the marker says; else counted from 0."""
    name: str
    start_ns: int
    end_ns: int
    complete: bool = True
    """False: the window of the trace cuts the marker or the launches of its device rows."""


@dataclass(frozen=True)
class DeviceInfo:
    """The device that this table's device rows ran on, as far as the trace says."""

    ordinal: int
    """As the trace counts it on its host."""
    name: str = ""
    num_sms: int | None = None
    memory_bytes: int | None = None
    max_threads_per_sm: int | None = None
    registers_per_sm: int | None = None
    shared_memory_per_sm_bytes: int | None = None
    compute_capability: str | None = None
    peak_flops: float | None = None
    """Only where the trace itself states it (TPU planes)."""
    peak_memory_gbps: float | None = None


@dataclass(frozen=True)
class ProcessGroup:
    """One communicator that this rank belongs to."""

    name: str
    desc: str = ""
    ranks: tuple[int, ...] = ()
    size: int | None = None
    backend: str = ""


@dataclass(frozen=True)
class MemoryPoints:
    """The allocator's reports (`[memory]` instants), in the order of the file."""

    ts_ns: Ints
    allocated_bytes: Ints
    """Total allocated after the event; starts near 0 in a profiled window, so it leaves out what was there before."""
    reserved_bytes: Ints
    """-1 where not reported (CPU)."""
    device: NDArray[np.int16]
    """-1 is the host."""


@dataclass(frozen=True)
class Distributed:
    """What the trace says about the run it belongs to."""

    backend: str = ""
    groups: tuple[ProcessGroup, ...] = ()


def _empty_memory() -> MemoryPoints:
    none = np.zeros(0, np.int64)
    return MemoryPoints(none, none, none, np.zeros(0, np.int16))


@dataclass(frozen=True, eq=False)
class EventTable:
    """All events of one rank as columns of equal length n; -1 in a column means "none" unless said otherwise."""

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
    """Correlation id that ties a runtime call to what it launched."""
    step_id: Ints32
    """Index into `steps`: for device rows the step whose window holds the launch; -1 is backlog or unattributed."""

    names: tuple[str, ...]
    name_class: NDArray[np.uint8]
    """A `ComputeClass` for each name."""
    collectives: tuple[Collective, ...] = ()
    shapes: tuple[OpShape, ...] = ()
    grids: tuple[LaunchShape, ...] = ()
    threads: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    step_source: str = ""
    """What marked them: profiler_step, inference, step_num, steps_line, step_marker, module, nvtx, or "" (no steps)."""
    op_costs: Mapping[int, OpCost] = field(default_factory=lambda: MappingProxyType({}))
    """name_id -> what XLA says of it."""
    memory: MemoryPoints = field(default_factory=_empty_memory)
    sparse: Mapping[str, tuple[Ints32, NDArray[Any]]] = field(default_factory=lambda: MappingProxyType({}))
    """Columns that few rows have, as (row numbers, values); the properties of the same name give them dense."""

    rank: int = 0
    world_size: int | None = None
    """As the trace says; None where it does not."""
    format: str = "kineto"
    """kineto, xla or nsys."""
    accelerator: str = "gpu"
    """gpu, tpu or cpu: where the device rows ran."""
    devices: tuple[DeviceInfo, ...] = ()
    """Devices that have rows here; one in almost every trace."""
    distributed: Distributed = field(default_factory=Distributed)
    host: str = ""
    """Host name where the trace or the file's name says; tables of one host share a clock."""
    base_ns: int = 0
    """Absolute time of ts_ns = 0: Unix time where `clock` is "unix", else only comparable within one host."""
    clock: str = "unix"
    run_key: str = ""
    """Equal for all ranks of one run where the trace has such a mark; "" where not."""
    source: str = ""
    """The file's path relative to the folder that was read."""
    status: str = "complete"
    """complete or partial (then `reasons` says why)."""
    reasons: tuple[Reason, ...] = ()

    def __len__(self) -> int:
        return len(self.ts_ns)

    @cached_property
    def bytes(self) -> Ints:
        """Bytes of a memory copy or set; -1 elsewhere."""
        return self._dense("bytes", -1)

    @cached_property
    def blocks_per_sm(self) -> Floats32:
        """Thread blocks a multiprocessor; NaN where the trace does not say (ROCm, XLA, CPU)."""
        return self._dense("blocks_per_sm", np.nan)

    @cached_property
    def coll_id(self) -> Ints32:
        """Index into `collectives`; every COMM row has one, all others -1."""
        return self._dense("coll_id", -1)

    @cached_property
    def launch(self) -> Ints32:
        """Of a device row: the row of the runtime call that launched it; -1 where there is no record of it."""
        return self._dense("launch", -1)

    @cached_property
    def op(self) -> Ints32:
        """Of a device row: the row of the shaped operator (`shape_id` >= 0) that it ran for; else -1."""
        return self._dense("op", -1)

    @cached_property
    def shape_id(self) -> Ints32:
        """Of an operator whose FLOPs can be counted: index into `shapes`; else -1."""
        return self._dense("shape_id", -1)

    @cached_property
    def grid_id(self) -> Ints32:
        """Of a kernel: index into `grids`; else -1."""
        return self._dense("grid_id", -1)

    def _dense(self, name: str, missing: float) -> NDArray[Any]:
        dense = np.full(len(self), missing, np.dtype(SPARSE_COLUMNS[name]))
        if name in self.sparse:
            rows, values = self.sparse[name]
            dense[rows] = values
        return dense

    @property
    def nbytes(self) -> int:
        """Bytes that the columns take."""
        dense = sum(getattr(self, name).nbytes for name in COLUMNS)
        return int(dense + sum(rows.nbytes + values.nbytes for rows, values in self.sparse.values()))

    @property
    def end_ns(self) -> Ints:
        """End of each row, after `base_ns`."""
        return self.ts_ns + self.dur_ns

    def rows_of(self, *kinds: Kind, step: int | None = None) -> Ints:
        """Row numbers of these kinds (and of that step), sorted by start."""
        wanted = np.zeros(256, bool)
        wanted[list(kinds)] = True
        mask = wanted[self.kind]
        if step is not None:
            mask &= self.step_id == step
        rows = np.flatnonzero(mask)
        return rows[np.argsort(self.ts_ns[rows], kind="stable")]


COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "ts_ns": "<i8",
        "dur_ns": "<i8",
        "kind": "|u1",
        "name_id": "<i4",
        "device": "<i2",
        "stream": "<i4",
        "corr": "<i4",
        "step_id": "<i4",
    }
)
"""The dense columns of a table and their types."""

SPARSE_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "bytes": "<i8",
        "blocks_per_sm": "<f4",
        "coll_id": "<i4",
        "launch": "<i4",
        "op": "<i4",
        "shape_id": "<i4",
        "grid_id": "<i4",
    }
)
"""The columns that few rows have, and their types."""


@dataclass(frozen=True)
class FileReport:
    """What became of one trace file."""

    path: str
    status: str
    """complete, partial or not_available."""
    reason: Reason | None = None
    message: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class TraceSet:
    """The tables of one run by rank, and what is wrong with them."""

    tables: Mapping[int, EventTable]
    status: str
    """ok, partial (a rank is missing or cut) or not_available (no usable table: `tables` is empty)."""
    reasons: tuple[Reason, ...] = ()
    message: str = ""
    """One line that says what is wrong, for people; "" when all is well."""
    world_size: int | None = None
    """As the traces say, else None: what was launched may know better."""
    missing_ranks: tuple[int, ...] = ()
    files: tuple[FileReport, ...] = ()
    folder: Path | None = None
    run_log: RunLog | None = None
    """What lies beside the traces: the run's own peak memory, a server's request log."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a table, sorted."""
        return tuple(sorted(self.tables))

    @property
    def reason(self) -> Reason | None:
        """The first and worst of the reasons."""
        return self.reasons[0] if self.reasons else None
