"""Reads PyTorch's execution traces (`torch.profiler.ExecutionTraceObserver`), one rank per file.

An execution trace has the operators, their inputs and which operator called which, but no times. The table's `ts_ns`
and `dur_ns` are therefore places in the order of starts, not nanoseconds (`is_timed` is False): a row contains the rows
that it called. Schemas 1.0.0 to 1.0.3 (flat nodes) and from `1.0.2-chakra` on (`attrs`, `inputs.values`) are read.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import (
    COLUMNS,
    EventTable,
    Kind,
    OpShape,
    ProcessGroup,
    Reason,
    Step,
)
from cclsearch.trace.names.kinds import MarkerSpan, classify_kernel, classify_operator, steps_of_marks
from cclsearch.trace.readers.columns import Interner, positive_int
from cclsearch.trace.readers.json_sections import SectionReader
from cclsearch.trace.readers.kineto.builder import SHAPED_OPS
from cclsearch.trace.readers.pytorch_execution.calls import (
    INIT_NODE,
    MAX_ID,
    ExecutionCalls,
    ExecutionNode,
    dims_of,
    dtype_of,
    read_process_groups,
)
from cclsearch.trace.readers.stream import ByteStream, ReadLimits, TraceError, list_faults
from cclsearch.trace.readers.table_builder import steps_at

_SCHEMA = re.compile(r"1\.[01](\.|$)")
_FRAMES = ("[pytorch|profiler|execution_trace|", "[pytorch|profiler|execution_graph|")
"""Begin the names of the nodes of the process and of its threads; the second until schema 1.0.1."""
_USER_SCOPE = 7
"""`RecordScope::USER_SCOPE` of PyTorch: ranges that a user or a framework names."""
_ON_DEVICE = re.compile(rb'"(cuda|hip|xpu|mps|npu|hpu)(:\d+)?"')


class _Collector:
    """The nodes of a file as growing columns."""

    def __init__(self, limits: ReadLimits) -> None:
        self.limits = limits
        self.ids, self.parents, self.rf_ids = array("q"), array("q"), array("q")
        self.names, self.threads, self.shapes = Interner(), Interner(), Interner()
        self.name_ids, self.thread_ids, self.kinds = array("i"), array("i"), bytearray()
        self.shape_ids: dict[int, int] = {}
        """Number of a node -> number of its shape."""
        self.calls = ExecutionCalls()
        self.groups: dict[str, ProcessGroup] = {}
        self.accelerator = "cpu"
        self.process_id: int | None = None
        self.num_bad = 0

    def add(self, batch: list[ExecutionNode]) -> None:
        """Append the nodes of one batch."""
        for node in batch:
            if not 0 <= node.id < MAX_ID:
                self.num_bad += 1
            elif node.name == INIT_NODE:
                self.groups.update(read_process_groups(node))
            elif not node.name.startswith(_FRAMES):
                self._add_node(node)
        self.limits.check_entries(len(self.ids), "nodes")

    def _add_node(self, node: ExecutionNode) -> None:
        attributes = node.attributes()
        number = len(self.ids)
        parent = node.ctrl_deps if node.ctrl_deps is not None else node.parent
        thread, scope = attributes.get("tid", node.tid), attributes.get("scope", node.scope)
        self.ids.append(node.id)
        self.parents.append(parent if parent is not None and 0 <= parent < node.id else -1)
        self.rf_ids.append(positive_int(attributes.get("rf_id", node.rf_id), MAX_ID) or -1)
        self.name_ids.append(self.names[node.name[:4000] or "unnamed node"])
        self.thread_ids.append(self.threads[thread if isinstance(thread, int) else 0])
        if self.accelerator == "cpu" and _ON_DEVICE.search(node.inputs):
            self.accelerator = "gpu"
        is_kernel = attributes.get("kernel_backend") == "triton"
        self.kinds.append(Kind.COMPUTE if is_kernel else Kind.ANNOTATION if scope == _USER_SCOPE else Kind.CPU_OP)
        self.calls.add(number, node, attributes)
        if SHAPED_OPS.match(node.name) and (shape := _shape_of(node)):
            self.shape_ids[number] = self.shapes[shape]


def _shape_of(node: ExecutionNode) -> OpShape | None:
    """Return the shapes as Kineto records them; None if the node has no inputs."""
    values, shapes, types = node.inputs_as_lists()
    if not shapes:
        return None
    dims = tuple(dims_of(shape) or () for shape in shapes)
    dtypes = tuple(dtype_of(text) for text in types)
    has_scalars = "conv" in node.name and len(values) == len(types)
    scalars = (
        tuple("" if dtype else str(value) for value, dtype in zip(values, dtypes, strict=True)) if has_scalars else ()
    )
    return OpShape(dims, dtypes, scalars)


def read_execution_trace(path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    """Return the table of the file's rank; raises TraceError if it has no nodes."""
    collected, schema = _Collector(limits), ""
    with ByteStream(path, limits) as stream:
        types = {"nodes": ExecutionNode, "schema": str, "pid": int}
        reader = SectionReader(stream, limits, entered=frozenset({""}), types=types)
        for place, batch in reader:
            if place == "nodes":
                collected.add(batch)
            elif place == "pid":
                collected.process_id = batch[0] if 0 < batch[0] < MAX_ID else None
            elif batch and not _SCHEMA.match(schema := batch[0]):
                message = f"an execution trace of schema {schema[:40]!r}; 1.0 and 1.1 are read"
                raise TraceError(Reason.FORMAT_UNSUPPORTED, message)
    if not collected.ids:
        reason = Reason.UNREADABLE if reader.complete else Reason.TRACE_TRUNCATED
        raise TraceError(reason, "an execution trace without nodes")
    table = _build(collected, path.name)
    num_bad = reader.num_bad + collected.num_bad + len(collected.ids) - len(table)
    return (replace(table, reasons=list_faults(is_complete=reader.complete, num_bad=num_bad)),)


def _build(collected: _Collector, source: str) -> EventTable:
    """Return the table, rows in the order in which the operators started; of repeated ids the first counts."""
    ids, order = np.unique(np.frombuffer(collected.ids, np.int64), return_index=True)
    count = len(ids)
    parent_ids = np.frombuffer(collected.parents, np.int64)[order]
    parents = np.searchsorted(ids, parent_ids).clip(0, count - 1)
    parents = np.where(ids[parents] == parent_ids, parents, -1)
    row_of_number = np.full(len(collected.ids), -1, np.int64)
    row_of_number[order] = np.arange(count)
    names = tuple(collected.names)
    name_ids = np.frombuffer(collected.name_ids, np.int32)[order]
    kinds = np.frombuffer(collected.kinds, np.uint8)[order].copy()
    numbers, calls = collected.calls.describe(order, parents, names, name_ids, collected.groups)
    kinds[numbers[0]] = Kind.COMM
    is_device = (kinds == Kind.COMM) | (kinds == Kind.COMPUTE)
    columns: dict[str, Any] = {
        "ts_ns": np.arange(count, dtype=np.int64),
        "dur_ns": _extents(parents),
        "kind": kinds,
        "name_id": name_ids.copy(),
        "device": np.where(is_device, 0, -1).astype(np.int16),
        "stream": np.frombuffer(collected.thread_ids, np.int32)[order].copy(),
        "corr": np.full(count, -1, np.int32),
    }
    source_of_steps, steps = _find_steps(columns, names)
    columns["step_id"] = steps_at(steps, columns["ts_ns"])
    rf_ids = np.frombuffer(collected.rf_ids, np.int64)[order]
    shaped = [(int(row_of_number[n]), shape) for n, shape in collected.shape_ids.items() if row_of_number[n] >= 0]
    shaped_rows, shape_ids = zip(*sorted(shaped), strict=True) if shaped else ((), ())
    with_rf = np.flatnonzero(rf_ids >= 0)
    sparse: dict[str, Any] = {
        "shape_id": (np.array(shaped_rows, np.int32), np.array(shape_ids, np.int32)),
        "coll_id": numbers,
        "rf_id": (with_rf.astype(np.int32), rf_ids[with_rf]),
    }
    kernels = set(name_ids[kinds == Kind.COMPUTE].tolist())
    world = next((group.size for group in collected.groups.values() if group.desc == "default_pg"), None)
    return EventTable(
        **{name: columns[name] for name in COLUMNS},
        names=names,
        name_class=np.array(
            [classify_kernel(n)[1] if i in kernels else classify_operator(n) for i, n in enumerate(names)], np.uint8
        ),
        collectives=calls,
        shapes=tuple(collected.shapes),
        threads=tuple(str(thread) for thread in collected.threads),
        steps=steps,
        step_source=source_of_steps,
        sparse=MappingProxyType({name: column for name, column in sparse.items() if len(column[0])}),
        rank=collected.calls.rank,
        world_size=world,
        format="pytorch-et",
        is_timed=False,
        accelerator=collected.accelerator,
        groups=tuple(collected.groups.values()),
        clock="none",
        process_id=collected.process_id,
        source=source,
    )


def _extents(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each row how many rows start from it until the last that it called, directly or not: at least 1."""
    last = list(range(len(parents)))
    of_row = parents.tolist()
    for row in range(len(last) - 1, -1, -1):  # a parent starts before its children, so one pass is enough
        parent = of_row[row]
        if parent >= 0 and last[parent] < last[row]:
            last[parent] = last[row]
    return np.array(last, np.int64) - np.arange(len(last)) + 1


def _find_steps(columns: dict[str, Any], names: tuple[str, ...]) -> tuple[str, tuple[Step, ...]]:
    starts, extents, name_ids = columns["ts_ns"], columns["dur_ns"], columns["name_id"]

    def marks_named(wanted: frozenset[str]) -> list[MarkerSpan]:
        rows = np.flatnonzero(np.isin(name_ids, [number for number, name in enumerate(names) if name in wanted]))
        return [
            MarkerSpan(names[name_ids[row]], int(starts[row]), int(starts[row] + extents[row])) for row in rows.tolist()
        ]

    return steps_of_marks(names, marks_named)
