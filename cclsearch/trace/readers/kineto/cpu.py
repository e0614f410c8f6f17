"""Add communication and compute rows to CPU traces, in which the host is the device.

Communication: the annotations of the backend (`gloo:all_reduce`). The `c10d` operator that caused them gives their
collective, since gloo runs a reduce-scatter as an all-reduce of full size. Compute: the outermost operators of every
thread, without the `c10d` operators inside and the waiting for their calls; these pieces become separate rows, so that
metrics need no rules for CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import COLUMNS, Collective, CollectiveKind, EventTable, Kind, OpShape, ProcessGroup
from cclsearch.trace.names.kinds import classify_collective, classify_operator
from cclsearch.trace.readers.collectives import collective_of_backend
from cclsearch.trace.readers.columns import Interner
from cclsearch.trace.readers.table_builder import steps_at

BACKEND_CALL = re.compile(r"^(gloo|mpi|ucc):")
COLLECTIVE_OP = re.compile(r"^(c10d::|_c10d_functional(_autograd)?::)(?!wait_tensor|monitored|broadcast_coalesced$)")
COMM_OP = re.compile(r"^(c10d::|_c10d_functional(_autograd)?::)")
"""Operators that do not compute: those that cause a call, and those that wait for one."""
AXIS = re.compile(r"^comm::(?P<axis>[^:]+)::")

Ints = NDArray[np.int64]


def apply_cpu_rules(table: EventTable) -> EventTable:
    """Return the table with COMM and COMPUTE rows; without operators and calls it has the same rows as before."""
    calls = table.rows_named(BACKEND_CALL, Kind.ANNOTATION)
    kind = table.kind.copy()
    kind[calls] = Kind.COMM
    device = table.device.copy()
    device[calls] = 0
    op_of_call = match_calls_to_ops(table, calls)
    numbers, collectives = describe_calls(table, calls, op_of_call)
    sparse = dict(table.sparse)
    sparse["coll_id"] = (calls.astype(np.int32), numbers)
    marked = replace(table, kind=kind, device=device, collectives=collectives, sparse=MappingProxyType(sparse))
    end_ns = table.end_ns
    return _append_compute_rows(marked, {op: int(end_ns[call]) for call, op in op_of_call.items()})


def _append_compute_rows(table: EventTable, call_end_ns: Mapping[int, int]) -> EventTable:
    rows, starts, ends = compute_pieces(table, call_end_ns)
    if not len(rows):
        return table
    values = {
        "ts_ns": starts,
        "dur_ns": ends - starts,
        "kind": np.full(len(rows), Kind.COMPUTE),
        "name_id": table.name_id[rows],
        "device": np.zeros(len(rows)),
        "stream": table.stream[rows],
        "corr": np.full(len(rows), -1),
        "step_id": steps_at(table.steps, starts),
    }
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(table, name), values[name].astype(dtype)]) for name, dtype in COLUMNS.items()
    }
    classes = table.name_class.copy()
    for number in np.unique(table.name_id[rows]):
        classes[number] = classify_operator(table.names[number])
    return replace(table, name_class=classes, **columns)


def compute_pieces(table: EventTable, call_end_ns: Mapping[int, int]) -> tuple[Ints, Ints, Ints]:
    """Return row, start and end of each piece of an outermost operator that neither communicates nor waits.

    `call_end_ns`: `c10d` operator -> end of the call it caused. If the thread begins no other operator until then, it
    waited for the call: a blocking call inside an autograd function, as in tensor parallelism.
    """
    outermost = _outermost(table)
    operators = table.rows_named(COMM_OP, Kind.CPU_OP)
    busy_until = _comm_op_ends(table, operators, call_end_ns)
    by_thread: dict[int, list[int]] = {}
    for row in operators:
        by_thread.setdefault(int(table.stream[row]), []).append(int(row))
    starts, ends = table.ts_ns[outermost], table.end_ns[outermost]
    whole = np.ones(len(outermost), bool)
    pieces: list[tuple[int, int, int]] = []
    for thread, rows in by_thread.items():
        rows.sort(key=lambda row: int(table.ts_ns[row]))
        row_starts = table.ts_ns[rows]
        on_thread = np.flatnonzero(table.stream[outermost] == thread)
        first, last = (np.searchsorted(row_starts, edges[on_thread]) for edges in (starts, ends))
        for at in np.flatnonzero(last > first).tolist():
            inside = [(int(table.ts_ns[row]), busy_until[row]) for row in rows[first[at] : last[at]]]
            whole[on_thread[at]] = False
            pieces += _split_around(table, int(outermost[on_thread[at]]), inside)
    cut = np.array(pieces, np.int64).reshape(-1, 3)
    return (
        np.concatenate([outermost[whole], cut[:, 0]]),
        np.concatenate([starts[whole], cut[:, 1]]),
        np.concatenate([ends[whole], cut[:, 2]]),
    )


def _comm_op_ends(table: EventTable, operators: Ints, call_end_ns: Mapping[int, int]) -> dict[int, int]:
    """Return row of a `c10d` operator -> end of its blocking: its own end, or the end of waiting for its call."""
    every = table.rows_of(Kind.CPU_OP)
    threads = table.stream[every]
    starts_of = {int(thread): table.ts_ns[every[threads == thread]] for thread in np.unique(table.stream[operators])}
    ends = {}
    for row, end in zip(operators.tolist(), table.end_ns[operators].tolist(), strict=True):
        later = starts_of[int(table.stream[row])]
        at = int(np.searchsorted(later, end, side="left"))
        following = int(later[at]) if at < len(later) else np.iinfo(np.int64).max
        called_until = call_end_ns.get(row, end)
        ends[row] = max(end, called_until) if following >= called_until else end
    return ends


def _split_around(table: EventTable, row: int, inside: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return the pieces of the row's span around the spans inside (sorted by start)."""
    start, stop = int(table.ts_ns[row]), int(table.ts_ns[row] + table.dur_ns[row])
    pieces = []
    for other_start, other_end in inside:
        if other_start > start:
            pieces.append((row, start, min(other_start, stop)))
        start = max(start, other_end)
    if start < stop:
        pieces.append((row, start, stop))
    return pieces


def _outermost(table: EventTable) -> Ints:
    """Return the operators that no operator and no collective call of their thread encloses."""
    rows = table.rows_of(Kind.CPU_OP, Kind.COMM)
    if not len(rows):
        return rows
    order = np.lexsort((-table.dur_ns[rows], table.ts_ns[rows], table.stream[rows]))
    rows = rows[order]
    span = int(table.end_ns[rows].max()) + 1
    offset = table.stream[rows].astype(np.int64) * span
    ends = np.maximum.accumulate(table.end_ns[rows] + offset)
    before = np.concatenate([[-1], ends[:-1]])
    is_outer = (table.ts_ns[rows] + offset >= before) | (offset > np.concatenate([[-1], offset[:-1]]))
    outer: Ints = rows[is_outer & (table.kind[rows] == Kind.CPU_OP)]
    return outer


def describe_calls(
    table: EventTable, calls: Ints, op_of_call: Mapping[int, int]
) -> tuple[NDArray[np.int32], tuple[Collective, ...]]:
    """Return for each backend call the number of its collective, and the distinct collectives."""
    axes = table.rows_named(AXIS, Kind.ANNOTATION)
    distinct = Interner()
    numbers = np.zeros(len(calls), np.int32)
    for index, row in enumerate(calls):
        operator = op_of_call.get(int(row))
        axis = _axis_around(table, axes, operator if operator is not None else int(row))
        numbers[index] = distinct[_describe(table, int(row), operator, axis)]
    return numbers, tuple(distinct)


def match_calls_to_ops(table: EventTable, calls: Ints) -> dict[int, int]:
    """Return call row -> row of its `c10d` operator: the first unused one before it, of equal size if there is one."""
    operators = table.rows_named(COLLECTIVE_OP, Kind.CPU_OP)
    free: dict[CollectiveKind, list[int]] = {}
    for row in operators:
        free.setdefault(_runs_as(table.names[table.name_id[row]]), []).append(int(row))
    op_of_call = {}
    for row in calls:
        waiting = free.get(classify_collective(table.names[table.name_id[row]]), [])
        started = [op for op in waiting if table.ts_ns[op] <= table.ts_ns[row]][:64]
        size = _nelems(table, int(row))
        best = next((op for op in started if size is not None and _nelems(table, op) == size), None)
        if best is None and started:
            best = started[0]
        if best is not None:
            waiting.remove(best)
            op_of_call[int(row)] = best
    return op_of_call


def _runs_as(operator: str) -> CollectiveKind:
    kind = classify_collective(operator)
    return CollectiveKind.ALL_REDUCE if kind == CollectiveKind.REDUCE_SCATTER else kind


def _describe(table: EventTable, call: int, operator: int | None, axis: str | None) -> Collective:
    kind = classify_collective(table.names[table.name_id[call if operator is None else operator]])
    group = _group_of(table.groups, axis)
    shape = _shape(table, call) or (_shape(table, operator) if operator is not None else None)
    dtype = next((name for name in shape.dtypes if name), None) if shape else None
    return collective_of_backend(kind, _total(shape) if shape else None, dtype, group, axis)


def _group_of(groups: Sequence[ProcessGroup], axis: str | None) -> ProcessGroup | None:
    """Return the only group, or the one whose description names the axis; the trace has no other information."""
    if axis:
        named = [g for g in groups if g.desc.removeprefix("mesh_") == axis or g.name == axis]
        if len(named) == 1:
            return named[0]
    return groups[0] if len(groups) == 1 else None


def _axis_around(table: EventTable, axes: Ints, row: int) -> str | None:
    start = table.ts_ns[row]
    for axis in axes:
        same_thread = table.stream[axis] == table.stream[row]
        if same_thread and table.ts_ns[axis] <= start <= table.ts_ns[axis] + table.dur_ns[axis]:
            found = AXIS.match(table.names[table.name_id[axis]])
            return found["axis"] if found else None
    return None


def _shape(table: EventTable, row: int) -> OpShape | None:
    number = int(table.shape_id[row])
    return table.shapes[number] if number >= 0 else None


def _nelems(table: EventTable, row: int) -> int | None:
    shape = _shape(table, row)
    return _total(shape) if shape else None


def _total(shape: OpShape) -> int | None:
    """Return the elements of the first tensor (list) with a shape; scalars and empty entries are skipped."""
    sizes = [math.prod(dims) for dims in shape.dims if dims]
    return sizes[0] if sizes else None
