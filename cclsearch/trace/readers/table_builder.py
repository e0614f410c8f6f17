"""Builds a table from batches of rows of any reader; then matches launches and assigns rows to steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import COLUMNS, DEVICE_WORK, SPARSE_COLUMNS, Kind, Step, rows_of_kinds
from cclsearch.trace.readers.columns import Column, Interner, SparseColumn
from cclsearch.trace.readers.kineto.scanner import look_up

MIN_MATCHED_SHARE = 0.95
"""Share of a step's kernel launches with a kernel in the trace below which the window cuts the step."""


class TableBuilder:
    """Collects rows; `finish_columns` and `finish_sparse` return the columns."""

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
        """Number of rows so far."""
        return self._columns["ts_ns"].length

    def expect_rows(self, count: int) -> None:
        """Make room for that many rows as soon as one is added; the number may be wrong."""
        for column in self._columns.values():
            column.expected = count

    def add_rows(self, **columns: NDArray[Any]) -> int:
        """Append rows (every dense column except `step_id`) and return the number of the first."""
        first = self.num_rows
        for name, column in self._columns.items():
            column.append(columns[name])
        return first

    def extend(self, count: int) -> dict[str, NDArray[Any]]:
        """Append rows, and return the place of their columns for the caller to fill."""
        return {name: column.extend(count) for name, column in self._columns.items()}

    def add_sparse(self, name: str, rows: NDArray[Any], values: NDArray[Any]) -> None:
        """Set a sparse column for these rows."""
        if len(rows):
            self._sparse[name].append(rows, values)

    def finish_columns(self) -> dict[str, Any]:
        """Return the dense columns (without `step_id`) and release the builder's own."""
        columns = {name: column.finish() for name, column in self._columns.items()}
        self._columns = {}
        return columns

    def finish_sparse(self) -> dict[str, tuple[NDArray[np.int32], NDArray[Any]]]:
        """Return the sparse columns that at least one row has."""
        finished = {name: column.finish() for name, column in self._sparse.items()}
        return {name: (rows, values) for name, (rows, values) in finished.items() if len(rows)}


def match_launches(
    kind: NDArray[np.uint8], corr: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Return the device rows; for each the runtime row with its correlation id or -1; the runtime rows with an id."""
    device_rows = rows_of_kinds(kind, DEVICE_WORK)
    runtime_rows = rows_of_kinds(kind, (Kind.RUNTIME,))
    known = corr[runtime_rows]
    has_id = known >= 0
    if not has_id.all():
        runtime_rows, known = runtime_rows[has_id], known[has_id]
    launch = np.full(len(device_rows), -1, np.int32)
    ids = corr[device_rows]
    if len(runtime_rows):
        largest = int(known.max())
        if largest < 8 * len(kind) + 1_000_000:
            row_of_id = np.full(largest + 2, -1, np.int32)
            row_of_id[known] = runtime_rows
            launch = row_of_id[np.minimum(ids.view(np.uint32), np.uint32(largest + 1))]  # negative ids are large ones
        else:
            has_id = (ids >= 0) & (ids <= largest)
            order = np.argsort(known, kind="stable")
            index = np.searchsorted(known[order], ids[has_id]).clip(0, len(known) - 1)
            found = runtime_rows[order[index]]
            launch[has_id] = np.where(corr[found] == ids[has_id], found, -1)
    return device_rows, launch, runtime_rows


def steps_at(steps: Sequence[Step], time_ns: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return for each time the index of the step (sorted by start) whose window contains it; -1 without one."""
    if not steps:
        return np.full(len(time_ns), -1, np.int32)
    edges = np.empty(2 * len(steps), np.int64)
    edges[::2] = [step.start_ns for step in steps]
    edges[1::2] = [step.end_ns + 1 for step in steps]
    edges[1:-1:2] = np.minimum(edges[1:-1:2], edges[2::2])  # of steps that overlap, the one that began last
    edges[1::2] = np.maximum(edges[1::2], edges[::2])
    step_of_place = np.full(len(edges) + 1, -1, np.int32)
    step_of_place[1::2] = np.arange(len(steps))
    return look_up(edges, step_of_place, time_ns)


def attribute_steps(
    columns: dict[str, NDArray[Any]], steps: Sequence[Step], device_rows: NDArray[np.int64], launch: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return `step_id` of every row: host rows by their start, device rows by their launch (-1 without launch)."""
    step_id = steps_at(steps, columns["ts_ns"])
    step_of_launches(step_id, steps, device_rows, launch)
    return step_id


def step_of_launches(
    step_id: NDArray[np.int32], steps: Sequence[Step], device_rows: NDArray[np.int64], launch: NDArray[np.int32]
) -> None:
    """Give each device row the step of its launch, -1 without one."""
    if len(device_rows) and steps:
        step_id[device_rows] = np.where(launch >= 0, step_id[launch], -1)


def mark_incomplete_steps(
    steps: Sequence[Step], step_id: NDArray[np.int32], launch: NDArray[np.int32], launches: NDArray[np.int64]
) -> tuple[Step, ...]:
    """Return the steps; a step is incomplete if too many of its kernel launches have no kernel in the trace.

    `launch`: launch row of each device row, or -1. `launches`: rows of calls that launch a kernel.
    """
    if not len(launches) or not steps:
        return tuple(steps)
    matched = np.zeros(len(step_id), bool)
    matched[launch[launch >= 0]] = True
    ids = step_id[launches]
    inside = ids >= 0
    num_launches = np.bincount(ids[inside], minlength=len(steps))
    num_matched = np.bincount(ids[inside & matched[launches]], minlength=len(steps))
    is_whole = (num_matched >= MIN_MATCHED_SHARE * num_launches).tolist()
    return tuple(replace(s, complete=s.complete and whole) for s, whole in zip(steps, is_whole, strict=True))


def start_at_zero(columns: dict[str, NDArray[Any]]) -> int:
    """Shift `ts_ns` so that the first row starts at 0, and return the shift."""
    times = columns["ts_ns"]
    first = int(times.min()) if len(times) else 0
    times -= first
    return first
