"""Reads Kineto's traces (`torch.profiler`), of 2021 and of today, into columns; their arguments leniently if needed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import Kind, LaunchShape, MemoryPoints, OpShape, Reason
from cclsearch.trace.names.kinds import KINETO_KINDS, UNSUPPORTED_PREFIX
from cclsearch.trace.readers.columns import Column, Interner, SparseColumn, is_time, to_int32, to_int64, to_ns
from cclsearch.trace.readers.json_events import EventReader
from cclsearch.trace.readers.json_structs import Instant, Meta, Span, number_of, repair_text
from cclsearch.trace.readers.kineto.scanner import DEVICE_KINDS, HOST_KINDS
from cclsearch.trace.readers.stream import ReadLimits, TraceError
from cclsearch.trace.readers.table_builder import TableBuilder

ABSENT = msgspec.Raw(b"")
_DECODER = json.JSONDecoder(strict=False)

SHAPED_OPS = re.compile(
    r"^(aten::(_?(mm|addmm|bmm|baddbmm|mv|addmv|scaled_mm|_scaled_mm|grouped_mm|_grouped_mm)(_out)?$"
    r"|_?(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)"
    r"|(cudnn|miopen|mkldnn)_convolution|convolution_backward$|slow_conv|thnn_conv)"
    r"|flash_attn|c10d::|_c10d_functional::|gloo:|mpi:|ucc:)"
)
"""Operators whose input shapes are kept: matrix products, attention, convolutions and collectives."""


class RuntimeArgs(msgspec.Struct, gc=False):
    """Arguments of a launch."""

    corr: int = msgspec.field(default=-1, name="correlation")


class DeviceArgs(msgspec.Struct, gc=False):
    """Arguments of a device row."""

    ext: int = msgspec.field(default=-1, name="External id")
    old_ext: int = msgspec.field(default=-1, name="external id")
    device: int = -1
    stream: int = -1
    corr: int = msgspec.field(default=-1, name="correlation")
    registers: int | None = msgspec.field(default=None, name="registers per thread")
    shared: int | None = msgspec.field(default=None, name="shared memory")
    blocks_per_sm: float = msgspec.field(default=-1.0, name="blocks per SM")
    grid: msgspec.Raw = ABSENT
    block: msgspec.Raw = ABSENT
    bytes: int = -1
    collective: str | None = msgspec.field(default=None, name="Collective name")


class ShapeArgs(msgspec.Struct, gc=False):
    """Arguments of an operator: shapes and types of its inputs."""

    ext: int = msgspec.field(default=-1, name="External id")
    old_ext: int = msgspec.field(default=-1, name="external id")
    scalars: msgspec.Raw = msgspec.field(default=ABSENT, name="Concrete Inputs")
    dtypes: msgspec.Raw = msgspec.field(default=ABSENT, name="Input type")
    dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Dims")


class MemoryArgs(msgspec.Struct, gc=False):
    """Arguments of an allocation: state of the allocator."""

    device_type: int = msgspec.field(default=0, name="Device Type")
    device_id: int = msgspec.field(default=-1, name="Device Id")
    allocated: int = msgspec.field(default=-1, name="Total Allocated")
    reserved: int = msgspec.field(default=-1, name="Total Reserved")


Args = TypeVar("Args", RuntimeArgs, DeviceArgs, ShapeArgs, MemoryArgs)


@cache
def _decoder(kind: type[Any]) -> Any:
    return msgspec.json.Decoder(list[kind], strict=False)  # type: ignore[valid-type]


def decode_args(kind: type[Args], raws: Sequence[msgspec.Raw]) -> list[Args]:
    """Return one value per argument object; fields that cannot be parsed keep their default."""
    try:
        decoded: list[Args] = _decoder(kind).decode(b"[" + b",".join(raws) + b"]")
        if len(decoded) == len(raws):
            return decoded
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    return [_decode_one(kind, raw) for raw in raws]


def _decode_one(kind: type[Args], raw: msgspec.Raw) -> Args:
    try:
        return msgspec.json.decode(raw, type=kind, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    values = plain_args(raw)
    found: dict[str, Any] = {}
    for info in msgspec.structs.fields(kind):
        value = values.get(info.encode_name)
        if value is None:
            continue
        if info.type is msgspec.Raw:
            found[info.name] = msgspec.Raw(json.dumps(value).encode("utf-8", "replace"))
        elif info.type is float:
            number = number_of(value)
            found[info.name] = -1.0 if number is None else number
        elif isinstance(info.default, int) or (info.default is None and info.name in ("registers", "shared")):
            number = number_of(value)
            if number is not None:
                found[info.name] = int(number)
        else:
            found[info.name] = str(value)
    return kind(**found)


def plain_args(raw: msgspec.Raw) -> dict[str, Any]:
    """Return the arguments as a plain dictionary, without values that are broken; empty if they are not an object."""
    text = bytes(raw).decode("utf-8", "replace")
    try:
        values = _DECODER.decode(text)
    except (ValueError, RecursionError):
        values = repair_text(text)[0]
    return values if isinstance(values, dict) else {}


def read_grid(key: tuple[bytes, bytes, int | None, int | None]) -> LaunchShape | None:
    """Return the launch shape of (grid, block, registers, shared memory); None without grid or block."""
    grid, block = _ints(key[0]), _ints(key[1])
    if not grid or not block:
        return None
    blocks, threads = math.prod(grid), math.prod(block)
    return LaunchShape(blocks, threads, key[2], key[3]) if blocks < 2**62 and threads < 2**62 else None


def read_shape(key: tuple[bytes, bytes, bytes]) -> OpShape:
    """Return the shape of (dims, types, scalars), each as JSON text."""
    dims, dtypes, scalars = (_list(text) for text in key)
    sizes = tuple(
        tuple(int(n) for n in dim) if isinstance(dim, list) and all(isinstance(n, int) for n in dim) else ()
        for dim in dims
    )
    return OpShape(sizes, tuple(str(item) for item in dtypes), tuple(str(item) for item in scalars))


def _list(text: bytes) -> list[Any]:
    try:
        value = _DECODER.decode(text.decode("utf-8", "replace")) if text else []
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def _ints(text: bytes) -> list[int]:
    numbers = _list(text)
    return numbers if all(isinstance(n, int) and 0 < n < 2**31 for n in numbers) else []


_LONG_TIME_US = 2e12
MAX_PROCESSES = 1 << 15
"""Further ones count as the last."""


_ASCEND = {"Ascend Hardware", "CANN"}
"""Processes in the traces of Ascend's profiler."""
_COLLECTIVE_FIELDS = (
    *("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "In split size"),
    *("Out split size", "Process Group Name", "Process Group Ranks", "Src Rank", "Dst Rank"),
)


class _KindOf(dict[str, int]):
    """Category -> kind; 0 for a dropped category, which is added to the mapping."""

    def __missing__(self, category: str) -> int:
        if len(self) < 1000:
            self[category] = 0
        return 0


class KinetoBuilder:
    """Collects batches of events; `table.build_tables` makes the table of them."""

    def __init__(self, reader: EventReader, limits: ReadLimits) -> None:
        self.reader = reader
        self.rows = TableBuilder()
        self.num_bad = 0
        self.base_us: int | None = None
        self.ext_of_device = SparseColumn("<i8")
        self.ext_of_op = SparseColumn("<i8")
        self.collective_args: dict[tuple[int, tuple[Any, ...]], dict[str, Any]] = {}
        self.thread_names: dict[Any, str] = {}
        self.process_names: dict[Any, str] = {}
        self.processes = Interner()
        self.process = Column("<i2")
        """Number of each row's process in `processes`."""
        self._process_of_thread = np.zeros(0, np.int32)
        self.host_rows = np.zeros((MAX_PROCESSES, len(HOST_KINDS) + 1), np.int64)
        """Number of rows of each process by `HOST_KINDS`, and of other kinds."""
        self.kind_of = _KindOf({category: int(kind) for category, kind in KINETO_KINDS.items()})
        self._limits = limits
        self.threads = limits.threads
        self._is_shaped_op = np.zeros(0, bool)
        self._is_device = np.zeros(256, bool)
        self._is_device[[int(kind) for kind in DEVICE_KINDS]] = True
        self._memory = [Column(dtype) for dtype in ("<f8", "<i8", "<i8", "<i2")]

    def add_batch(self, batch: Sequence[Any]) -> None:
        """Append the events of one batch."""
        types = set(map(type, batch))
        if Meta in types or Instant in types:
            self._add_meta_and_memory([event for event in batch if type(event) is Meta or type(event) is Instant])
        spans = [event for event in batch if type(event) is Span]
        if spans:
            self._add_spans(spans)
        self.check_size()

    def check_size(self) -> None:
        """Raise TraceError if the table exceeds the limit of rows."""
        if self.rows.num_rows > self._limits.rows:
            raise TraceError(Reason.TOO_LARGE, f"more than {self._limits.rows} events")

    def _add_spans(self, spans: list[Span]) -> None:
        kind_of = self.kind_of
        kind = np.fromiter([kind_of[span.cat] for span in spans], np.uint8, len(spans))
        if not kind.all():
            spans = list(compress(spans, kind))
            kind = kind[kind > 0]
        count = len(spans)
        time = np.fromiter([span.ts for span in spans], np.float64, count)
        duration = np.fromiter([span.dur for span in spans], np.float64, count)
        valid = is_time(time) & is_time(duration) & (duration >= 0)
        if not valid.all():
            self.num_bad += int(count - valid.sum())
            spans = list(compress(spans, valid))
            kind, time, duration, count = kind[valid], time[valid], duration[valid], len(spans)
        if count:
            self._add_valid(spans, kind, time, duration)

    def _add_valid(
        self, spans: list[Span], kind: NDArray[np.uint8], time: NDArray[np.float64], duration: NDArray[np.float64]
    ) -> None:
        count = len(spans)
        if self.reader.time_offset_us:
            time = np.where(time > _LONG_TIME_US, time - self.reader.time_offset_us, time)
        if self.base_us is None:
            self.base_us = int(np.floor(time[0]))
            if self.reader.scanner:
                self.reader.scanner.base_us = self.base_us
        corr = np.full(count, -1, np.int32)
        device = np.full(count, -1, np.int16)
        names = self.rows.names.numbers_of([span.name for span in spans], count)
        stream = self.rows.threads.numbers_of([(span.pid, span.tid) for span in spans], count)
        process = self.process_of_threads()[stream]
        self.process.append(process)
        for column, host_kind in enumerate(HOST_KINDS):
            counts = np.bincount(process[kind == host_kind])
            self.host_rows[: len(counts), column] += counts
        runtime = np.flatnonzero(kind == Kind.RUNTIME)
        if len(runtime):
            calls = decode_args(RuntimeArgs, _args_of(spans, runtime))
            corr[runtime] = to_int32([call.corr for call in calls], len(calls))
        on_device = np.flatnonzero(self._is_device[kind])
        details = decode_args(DeviceArgs, _args_of(spans, on_device)) if len(on_device) else []
        if details:
            corr[on_device] = to_int32([item.corr for item in details], len(details))
            device[on_device] = to_int32([item.device for item in details], len(details)).clip(-1, 32767)
            stream[on_device] = to_int32([item.stream for item in details], len(details))
        first = self.rows.add_rows(
            ts_ns=to_ns(time, self.base_us),
            dur_ns=to_ns(duration, 0),
            kind=kind,
            name_id=names,
            device=device,
            stream=stream,
            corr=corr,
        )
        if details:
            self._add_details(spans, on_device, first, details, names)
        self._add_shapes(spans, names, first)

    def process_of_threads(self) -> NDArray[np.int32]:
        """Return the process of each number of a thread (or of a process and its line on the device)."""
        known = len(self._process_of_thread)
        if len(self.rows.threads) > known:
            new = [min(self.processes[pid], MAX_PROCESSES - 1) for pid, _ in list(self.rows.threads)[known:]]
            self._process_of_thread = np.concatenate([self._process_of_thread, np.array(new, np.int32)])
        return self._process_of_thread

    def _add_details(
        self,
        spans: list[Span],
        on_device: NDArray[np.int64],
        first: int,
        details: list[DeviceArgs],
        names: NDArray[np.int32],
    ) -> None:
        rows, count = on_device + first, len(details)
        blocks = np.fromiter([item.blocks_per_sm for item in details], np.float64, count)
        external = to_int64([max(item.ext, item.old_ext) for item in details], count)
        self.rows.add_sparse("bytes", *_present(rows, to_int64([item.bytes for item in details], count)))
        self.add_blocks(*_present(rows, blocks))
        self.ext_of_device.append(*_present(rows, external))
        with_grid = [n for n, item in enumerate(details) if item.grid]
        keys = [(bytes(d.grid), bytes(d.block), d.registers, d.shared) for d in (details[n] for n in with_grid)]
        self.rows.add_sparse("grid_id", rows[with_grid], self.rows.grids.numbers_of(keys, len(keys)))
        calls = [n for n, item in enumerate(details) if item.collective is not None]
        numbers = [self.number_call(int(names[on_device[n]]), spans[on_device[n]].args) for n in calls]
        self.rows.add_sparse("coll_id", rows[calls], np.array(numbers, np.int32))

    def number_call(self, name: int, raw: msgspec.Raw) -> int:
        """Return the number of the collective with these arguments; `name` is the number of the kernel's name."""
        args = plain_args(raw)
        key = (name, tuple(str(args.get(field)) for field in _COLLECTIVE_FIELDS))
        self.collective_args.setdefault(key, args)
        return self.rows.collectives[key]

    def add_blocks(self, rows: NDArray[Any], blocks: NDArray[np.float64]) -> None:
        """Add the blocks per multiprocessor of device rows."""
        with np.errstate(over="ignore"):
            self.rows.add_sparse("blocks_per_sm", rows, blocks.astype(np.float32))

    def _add_shapes(self, spans: list[Span], names: NDArray[np.int32], first: int) -> None:
        shaped = np.flatnonzero(self.is_shaped(names))
        if not len(shaped):
            return
        details = decode_args(ShapeArgs, _args_of(spans, shaped))
        with_dims = [n for n, item in enumerate(details) if item.dims]
        keys = [(bytes(d.dims), bytes(d.dtypes), bytes(d.scalars)) for d in (details[n] for n in with_dims)]
        external = to_int64([max(details[n].ext, details[n].old_ext) for n in with_dims], len(with_dims))
        self.add_shapes(shaped[with_dims] + first, self.rows.shapes.numbers_of(keys, len(keys)), external)

    def is_shaped(self, names: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return for each number of a name whether it is an operator with kept shapes."""
        known = len(self._is_shaped_op)
        if len(self.rows.names) > known:
            new = list(self.rows.names)[known:]
            wanted = [bool(SHAPED_OPS.match(name)) for name in new]
            self._is_shaped_op = np.concatenate([self._is_shaped_op, np.array(wanted, bool)])
        return self._is_shaped_op[names]

    def add_shapes(self, rows: NDArray[Any], shapes: NDArray[np.int32], external: NDArray[np.int64]) -> None:
        """Add the numbers of shapes and the external ids (negative: missing) of operators."""
        self.rows.add_sparse("shape_id", rows, shapes)
        self.ext_of_op.append(*_present(rows, external))

    def _add_meta_and_memory(self, events: list[Meta | Instant]) -> None:
        points = [event for event in events if isinstance(event, Instant) and event.name == "[memory]"]
        sizes = decode_args(MemoryArgs, [event.args or msgspec.Raw(b"{}") for event in points])
        found: list[tuple[float, int, int, int]] = []
        for point, size in zip(points, sizes, strict=True):
            if 0 <= size.allocated < 2**62:
                reserved = size.reserved if 0 <= size.reserved < 2**62 and size.device_type else -1
                device = size.device_id if size.device_type and 0 <= size.device_id < 32768 else -1
                found.append((point.ts, size.allocated, reserved, device))
        if found:
            times, *rest = zip(*found, strict=True)
            self.add_memory_points(np.array(times, np.float64), *(np.array(values, np.int64) for values in rest))
        self.add_metas([event for event in events if isinstance(event, Meta)])

    def add_metas(self, events: Iterable[Meta]) -> None:
        """Keep the names of threads and processes."""
        for event in events:
            if event.name in ("thread_name", "process_name"):
                name = plain_args(event.args).get("name")
                names = self.thread_names if event.name == "thread_name" else self.process_names
                if isinstance(name, str) and len(names) < 100_000:
                    names[event.tid if event.name == "thread_name" else event.pid] = name

    def add_memory_points(self, *columns: NDArray[Any]) -> None:
        """Append reports of the allocator: time (us), bytes allocated, bytes reserved or -1, device or -1."""
        for column, values in zip(self._memory, columns, strict=True):
            column.append(values)

    def memory_points(self) -> MemoryPoints:
        """Return the allocator's reports, on the same clock as the rows."""
        time, allocated, reserved, devices = (column.finish() for column in self._memory)
        if self.reader.time_offset_us:
            time = np.where(time > _LONG_TIME_US, time - self.reader.time_offset_us, time)
        good = is_time(time)
        return MemoryPoints(
            to_ns(time[good], self.base_us or 0),
            allocated[good],
            reserved[good],
            devices[good],
        )

    @property
    def unsupported(self) -> str:
        """The accelerator of which the trace has events, if it is not supported; else ""."""
        if _ASCEND.intersection(self.process_names.values()):
            return "Ascend NPU, as in torch_npu's trace_view.json"
        return "MTIA" if any(category.startswith(UNSUPPORTED_PREFIX) for category in self.kind_of) else ""


def _present(rows: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows whose value is not missing (negative), and those values."""
    has_value = values >= 0
    return (rows, values) if has_value.all() else (rows[has_value], values[has_value])


def _args_of(spans: list[Span], indices: NDArray[np.int64]) -> list[msgspec.Raw]:
    empty = msgspec.Raw(b"{}")
    return [spans[index].args or empty for index in indices]
