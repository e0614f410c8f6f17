"""A table under construction: rows come in batches from any reader, and what needs all rows is settled at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import COLUMNS, DEVICE_WORK, SPARSE_COLUMNS, Kind, Step
from cclsearch.trace.readers.columns import Column, Interner, SparseColumn

MIN_MATCHED_SHARE = 0.95
"""A step of which fewer kernel launches than this have their kernel in the trace is cut by its window."""


class TableBuilder:
    """Rows so far; `finish` makes the table."""

    def __init__(self) -> None:
        self.names = Interner()
        self.threads = Interner()
        self.collectives = Interner()
        self.shapes = Interner()
        self.grids = Interner()
        self._columns = {name: Column(dtype) for name, dtype in COLUMNS.items() if name != "step_id"}
        self._sparse = {name: SparseColumn(dtype) for name, dtype in SPARSE_COLUMNS.items()}

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return self._columns["ts_ns"].length

    def add_rows(self, **columns: NDArray[Any]) -> int:
        """Appends rows; every dense column but `step_id` must be given. The number of the first new row."""
        first = self.num_rows
        for name, column in self._columns.items():
            column.append(columns[name])
        return first

    def add_sparse(self, name: str, rows: NDArray[Any], values: NDArray[Any]) -> None:
        """Sets a sparse column for these rows."""
        if len(rows):
            self._sparse[name].append(rows, values)

    def finish_columns(self) -> dict[str, Any]:
        """The dense columns (without `step_id`); the draft's own are let go."""
        columns = {name: column.finish() for name, column in self._columns.items()}
        self._columns = {}
        return columns

    def finish_sparse(self) -> dict[str, tuple[NDArray[np.int32], NDArray[Any]]]:
        """The sparse columns that any row has."""
        finished = {name: column.finish() for name, column in self._sparse.items()}
        return {name: (rows, values) for name, (rows, values) in finished.items() if len(rows)}


def rows_of_kinds(kind: NDArray[np.uint8], kinds: Sequence[Kind]) -> NDArray[np.int64]:
    """Row numbers of these kinds, in the order of the table."""
    wanted = np.zeros(256, bool)
    wanted[[int(k) for k in kinds]] = True
    return np.flatnonzero(wanted[kind])


def match_launches(
    kind: NDArray[np.uint8], corr: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Device rows; for each the runtime row with its correlation id or -1; and the runtime rows that have an id."""
    device_rows = rows_of_kinds(kind, DEVICE_WORK)
    runtime_rows = rows_of_kinds(kind, (Kind.RUNTIME,))
    runtime_rows = runtime_rows[corr[runtime_rows] >= 0]
    launch = np.full(len(device_rows), -1, np.int32)
    ids = corr[device_rows]
    if len(runtime_rows):
        known = corr[runtime_rows]
        largest = int(known.max())
        has_id = (ids >= 0) & (ids <= largest)
        if largest < 8 * len(kind) + 1_000_000:
            row_of_id = np.full(largest + 1, -1, np.int32)
            row_of_id[known] = runtime_rows
            launch[has_id] = row_of_id[ids[has_id]]
        else:
            order = np.argsort(known, kind="stable")
            index = np.searchsorted(known[order], ids[has_id]).clip(0, len(known) - 1)
            found = runtime_rows[order[index]]
            launch[has_id] = np.where(corr[found] == ids[has_id], found, -1)
    return device_rows, launch, runtime_rows


def steps_at(steps: Sequence[Step], time_ns: NDArray[np.int64]) -> NDArray[np.int32]:
    """For each time the number of the step (sorted by start) whose window holds it; -1 where none does."""
    if not steps:
        return np.full(len(time_ns), -1, np.int32)
    starts = np.array([step.start_ns for step in steps], np.int64)
    ends = np.array([step.end_ns for step in steps], np.int64)
    index = np.searchsorted(starts, time_ns, side="right").astype(np.int32) - np.int32(1)
    inside = (index >= 0) & (time_ns <= ends[index])
    index[~inside] = -1
    return index


def attribute_steps(
    columns: dict[str, NDArray[Any]],
    steps: Sequence[Step],
    device_rows: NDArray[np.int64],
    launch: NDArray[np.int32],
) -> NDArray[np.int32]:
    """`step_id` of every row: host rows by their start, device rows by that of their launch (no launch: -1)."""
    step_id = steps_at(steps, columns["ts_ns"])
    if len(device_rows) and steps:
        launched = np.where(launch >= 0, step_id[launch], -1)
        step_id[device_rows] = launched
    return step_id


def mark_incomplete_steps(
    steps: Sequence[Step], step_id: NDArray[np.int32], launch: NDArray[np.int32], launches: NDArray[np.int64]
) -> tuple[Step, ...]:
    """The steps, those marked incomplete of whose kernel launches too many have no kernel in the trace.

    `launch`: launch row of each device row, -1 without. `launches`: rows of calls that launch a kernel.
    """
    if not len(launches) or not steps:
        return tuple(steps)
    matched = np.zeros(len(step_id), bool)
    matched[launch[launch >= 0]] = True
    ids = step_id[launches]
    inside = ids >= 0
    asked = np.bincount(ids[inside], minlength=len(steps))
    got = np.bincount(ids[inside & matched[launches]], minlength=len(steps))
    marked = []
    for step, num_asked, num_got in zip(steps, asked, got, strict=True):
        complete = step.complete and bool(num_got >= MIN_MATCHED_SHARE * num_asked)
        marked.append(Step(step.number, step.name, step.start_ns, step.end_ns, complete))
    return tuple(marked)


def start_at_zero(columns: dict[str, NDArray[Any]]) -> int:
    """Shifts `ts_ns` so that the first row starts at 0; by how much."""
    times = columns["ts_ns"]
    if not len(times):
        return 0
    first = int(times.min())
    times -= first
    return first
