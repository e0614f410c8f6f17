"""Add shapes and sizes of collectives from the execution trace of the same process to a Kineto trace.

Both profilers number the recorded functions alike: `rf_id` of the execution trace is `Record function id` in Kineto's
arguments. The pair is checked by process id, by the names of all functions in common, and by the shapes that both have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.answers.operators import enclosing_operators
from cclsearch.trace.events import EventTable, Kind
from cclsearch.trace.readers.columns import Interner
from cclsearch.trace.readers.json_events import EventReader
from cclsearch.trace.readers.json_structs import Meta, Span
from cclsearch.trace.readers.kineto.builder import SHAPED_OPS, KinetoBuilder
from cclsearch.trace.readers.kineto.cpu import describe_calls, match_calls_to_ops
from cclsearch.trace.readers.pytorch_execution.calls import PARAM_COMMS
from cclsearch.trace.readers.stream import ByteStream, ReadLimits
from cclsearch.trace.view import RankView

# The ids of one process agree in all of them.
MIN_EQUAL = 0.99
"""Share of the functions in common whose name and shapes must be equal."""
_RECORD_ID = re.compile(rb'"Record function id":\s*"?(\d{1,18})\b')
_MAX_CLIMB = 64


@dataclass(frozen=True)
class RecordIds:
    """Record function ids of the operators that can be joined."""

    rows: NDArray[np.int64]
    """Rows of the Kineto table."""
    ids: NDArray[np.int64]
    process_ids: frozenset[int]
    """Processes that the trace names."""


class _IdBuilder(KinetoBuilder):
    """Builds the same rows as the reader, and keeps the ids of the operators that can be joined."""

    def __init__(self, reader: EventReader, limits: ReadLimits) -> None:
        super().__init__(reader, limits)
        self.found: list[tuple[int, int]] = []
        self.process_ids: set[int] = set()

    def _add_shapes(self, spans: list[Span], names: NDArray[np.int32], first: int) -> None:
        for at, span in enumerate(spans):
            if (SHAPED_OPS.match(span.name) or span.name == PARAM_COMMS) and (found := _RECORD_ID.search(span.args)):
                self.found.append((first + at, int(found[1])))

    def add_metas(self, events: Any) -> None:
        self.process_ids.update(event.pid for event in events if isinstance(event, Meta) and isinstance(event.pid, int))


def read_record_ids(path: Path) -> RecordIds:
    """Read a Kineto trace a second time, for the ids that its table does not keep; raises TraceError or OSError."""
    limits = ReadLimits()
    with ByteStream(path, limits) as stream:
        reader = EventReader(stream, limits)
        builder = _IdBuilder(reader, limits)
        for batch in reader:
            if isinstance(batch, list):
                builder.add_batch(batch)
    found = np.array([pair for pair in builder.found if pair[1] > 0], dtype=np.int64).reshape(-1, 2)
    return RecordIds(found[:, 0], found[:, 1], frozenset(builder.process_ids))


def join_execution_trace(table: EventTable, execution: EventTable, record: RecordIds) -> tuple[EventTable, str]:
    """Return the Kineto table with shapes and calls of the execution trace, and one line on additions or faults.

    The line is "" if nothing was missing. The table is unchanged if the two are of different processes.
    """
    if execution.process_id is not None and record.process_ids and execution.process_id not in record.process_ids:
        return table, f"{execution.source} is of another process than {table.source}: not joined"
    at_rows, values = execution.sparse.get("rf_id", (np.zeros(0, np.int32), np.zeros(0, np.int64)))
    ids, first = np.unique(values, return_index=True)
    if not len(ids) or not len(record.ids):
        return table, f"{execution.source} has no record function id in common with {table.source}: not joined"
    at = np.searchsorted(ids, record.ids).clip(0, len(ids) - 1)
    common = ids[at] == record.ids
    rows, sources = record.rows[common], at_rows[first[at[common]]].astype(np.int64)
    equal = [
        _is_same(table, row, execution, source) for row, source in zip(rows.tolist(), sources.tolist(), strict=True)
    ]
    if not equal or sum(equal) < MIN_EQUAL * len(equal):
        what = f"{len(equal) - sum(equal)} of {len(equal)} functions with the same id differ"
        return table, f"{execution.source} is of another run than {table.source} ({what}): not joined"
    pairs = {row: source for row, source, same in zip(rows.tolist(), sources.tolist(), equal, strict=True) if same}
    joined, num_shapes = _add_shapes(table, execution, pairs)
    joined, num_calls = _add_calls(joined, execution, pairs)
    if not num_shapes and not num_calls:
        return table, ""
    added = f"the shapes of {num_shapes} operators and the sizes of {num_calls} collectives"
    return joined, f"{added} of {table.source} are from {execution.source}"


def _is_same(table: EventTable, row: int, execution: EventTable, source: int) -> bool:
    if table.names[table.name_id[row]] != execution.names[execution.name_id[source]]:
        return False
    one, other = int(table.shape_id[row]), int(execution.shape_id[source])
    return one < 0 or other < 0 or table.shapes[one].dims == execution.shapes[other].dims


def _add_shapes(table: EventTable, execution: EventTable, pairs: Mapping[int, int]) -> tuple[EventTable, int]:
    """Return the table with shapes where it had none, and their number; kernels get the operator that they ran for."""
    new = {row: int(execution.shape_id[source]) for row, source in pairs.items() if table.shape_id[row] < 0}
    new = {row: number for row, number in new.items() if number >= 0}
    if not new:
        return table, 0
    shape_id = table.shape_id.copy()
    shape_id[list(new)] = np.array(list(new.values()), np.int32) + np.int32(len(table.shapes))
    sparse = {**table.sparse, "shape_id": _sparse(shape_id)}
    joined = replace(table, shapes=table.shapes + execution.shapes, sparse=MappingProxyType(sparse))
    if table.accelerator == "cpu":
        return joined, len(new)
    view = RankView(joined)
    op = table.op.copy()
    without = view.compute_kernels[op[view.compute_kernels] < 0]
    parent, innermost = enclosing_operators(view, without)
    op[without] = [_climb(parent, start, new) for start in innermost.tolist()]
    return replace(joined, sparse=MappingProxyType({**sparse, "op": _sparse(op)})), len(new)


def _climb(parent: Mapping[int, int], row: int, wanted: Mapping[int, Any]) -> int:
    """Return the first wanted row from this one outwards; -1 without one."""
    for _ in range(_MAX_CLIMB):
        if row < 0 or row in wanted:
            return row
        row = parent.get(row, -1)
    return -1


def _sparse(dense: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[Any]]:
    rows = np.flatnonzero(dense >= 0)
    return rows.astype(np.int32), dense[rows]


def _add_calls(table: EventTable, execution: EventTable, pairs: Mapping[int, int]) -> tuple[EventTable, int]:
    """Return the table with group and sizes of calls that had none, and their number."""
    calls = table.rows_of(Kind.COMM)
    calls = np.array([row for row in calls.tolist() if not table.collectives[table.coll_id[row]].has_args], np.int64)
    if not len(calls):
        return table, 0
    distinct = Interner({call: number for number, call in enumerate(table.collectives)})
    numbers = table.coll_id.copy()
    if table.accelerator == "cpu":
        every = table.rows_of(Kind.COMM)
        described, collectives = describe_calls(table, every, match_calls_to_ops(table, every))
        found = {int(row): collectives[number] for row, number in zip(every, described, strict=True)}
    else:
        stated = {row: source for row, source in pairs.items() if execution.coll_id[source] >= 0}
        parent, innermost = enclosing_operators(RankView(table), calls)
        around = {
            row: _climb(parent, start, stated) for row, start in zip(calls.tolist(), innermost.tolist(), strict=True)
        }
        found = {row: execution.collectives[execution.coll_id[stated[op]]] for row, op in around.items() if op >= 0}
    found = {row: found[row] for row in calls.tolist() if row in found and found[row].has_args}
    for row, call in found.items():
        numbers[row] = distinct[call]
    sparse = MappingProxyType({**table.sparse, "coll_id": _sparse(numbers)})
    return replace(table, collectives=tuple(distinct), sparse=sparse), len(found)
