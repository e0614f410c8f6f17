"""Builds tables: from batches of columns, or from the rows of a report (Nsight Systems, rocprofiler, Chakra)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import (
    COLUMNS,
    DEVICE_WORK,
    SPARSE_COLUMNS,
    Collective,
    DeviceInfo,
    EventTable,
    Kind,
    LaunchShape,
    Step,
    rows_of_kinds,
)
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.names.kinds import MarkerSpan, classify_kernel, steps_of_marks
from cclsearch.trace.readers.collectives import collective_from_name, name_bare_collectives
from cclsearch.trace.readers.columns import Column, Interner, SparseColumn, to_int32
from cclsearch.trace.readers.kineto.scanner import look_up
from cclsearch.trace.readers.plausibility import cut_overlaps, with_problems

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


_STEP = re.compile(r"^(?:train_?|training_?)?(?:step|iteration|iter)(?:[ _:#-]*(?P<number>\d{1,12}))?$", re.IGNORECASE)
_LAUNCH = re.compile(r"launch", re.IGNORECASE)


@dataclass(slots=True)
class NsysRow:
    """One row of the export (or of rocprofiler's records), for the table."""

    kind: Kind
    start_ns: int
    end_ns: int
    name: str
    stream_or_thread: int
    """Stream of a device row, thread of a host row."""
    compute: ComputeClass = ComputeClass.OTHER
    corr: int = -1
    bytes: int = -1
    grid: tuple[int, int, int, int] | None = None
    call: Collective | None = None
    """The collective of a communication row; None if only its name is known."""


def build_nsys_table(
    rows: Sequence[NsysRow], host: Sequence[NsysRow], device: DeviceInfo, *, base_ns: int, source: str
) -> EventTable:
    """Return the table of one device (its rows first, then the host rows of its process)."""
    both = [*rows, *host]
    names, threads, grids, calls = Interner(), Interner(), Interner(), Interner()
    first = min(row.start_ns for row in both)
    for row in rows:
        if row.kind == Kind.COMPUTE:
            row.kind, row.compute = classify_kernel(row.name)
    count, on_device = len(both), len(rows)
    start = np.fromiter((row.start_ns - first for row in both), np.int64, count)
    columns: dict[str, Any] = {
        "ts_ns": start,
        "dur_ns": np.fromiter((row.end_ns - row.start_ns for row in both), np.int64, count),
        "kind": np.fromiter((int(row.kind) for row in both), np.uint8, count),
        "name_id": names.numbers_of([row.name for row in both], count),
        "device": np.where(np.arange(count) < on_device, device.ordinal, -1).astype(np.int16),
        "stream": np.concatenate(
            [
                to_int32([row.stream_or_thread for row in rows], on_device),
                threads.numbers_of([row.stream_or_thread for row in host], count - on_device),
            ]
        ),
        "corr": to_int32([row.corr for row in both], count),
    }
    classes = np.zeros(len(names), np.uint8)
    for row in rows:
        classes[names[row.name]] = row.compute
    steps = find_nvtx_steps(host, first)
    device_rows, launch, runtime = match_launches(columns["kind"], columns["corr"])
    columns["step_id"] = attribute_steps(columns, steps, device_rows, launch)
    problems = cut_overlaps(columns, device_rows)
    launches = np.array([row for row in runtime if _LAUNCH.search(both[row].name)], np.int64)
    comm = np.array([n for n, row in enumerate(rows) if row.kind == Kind.COMM], np.int32)
    with_grid = np.array([n for n, row in enumerate(rows) if row.grid], np.int32)
    shapes = [row.grid for row in rows if row.grid]
    sized = np.array([n for n, row in enumerate(rows) if row.bytes >= 0], np.int32)
    sparse: dict[str, Any] = {
        "launch": (device_rows.astype(np.int32), launch),
        "coll_id": (comm, calls.numbers_of([rows[n].call or rows[n].name for n in comm], len(comm))),
        "grid_id": (with_grid, grids.numbers_of(shapes, len(shapes))),
        "bytes": (sized, np.array([rows[n].bytes for n in sized], np.int64)),
    }
    if device.num_sms:
        blocks = np.array([shape[0] / device.num_sms for shape in shapes], np.float32)
        sparse["blocks_per_sm"] = (with_grid, blocks)
    table = EventTable(
        **columns,
        names=tuple(names),
        name_class=classes,
        collectives=tuple(collective_from_name(call) if isinstance(call, str) else call for call in calls),
        grids=tuple(LaunchShape(*shape) for shape in grids),
        threads=tuple(str(thread) for thread in threads),
        steps=mark_incomplete_steps(steps, columns["step_id"], launch, launches),
        step_source="nvtx" if steps else "",
        sparse=MappingProxyType({name: column for name, column in sparse.items() if len(column[0])}),
        rank=-1,
        format="nsys",
        devices=(device,),
        base_ns=base_ns + first,
        clock="unix" if base_ns else "trace",
        source=source,
    )
    return with_problems(name_bare_collectives(table), device_rows, *problems)


def find_nvtx_steps(host: Sequence[NsysRow], base_ns: int) -> tuple[Step, ...]:
    """Return the steps by start: from ranges of a known framework, else from ranges that a run script named as steps.

    Such names are `step 3` and `iteration_12`; of nested ranges, the outermost counts.
    """
    ranges = sorted(
        (row for row in host if row.kind in (Kind.ANNOTATION, Kind.CPU_OP)),
        key=lambda row: (row.start_ns, -row.end_ns),
    )

    def marks_named(wanted: frozenset[str]) -> list[MarkerSpan]:
        return [
            MarkerSpan(row.name, row.start_ns - base_ns, row.end_ns - base_ns) for row in ranges if row.name in wanted
        ]

    _, marked = steps_of_marks({row.name for row in ranges}, marks_named)
    if marked:
        return marked
    steps: list[Step] = []
    for mark in marks_named(frozenset(row.name for row in ranges if _STEP.match(row.name))):
        if steps and mark.start_ns < steps[-1].end_ns:
            continue
        named = _STEP.match(mark.name)
        number = int(named["number"]) if named and named["number"] else len(steps)
        steps.append(Step(number, mark.name, mark.start_ns, mark.end_ns))
    return tuple(steps)
