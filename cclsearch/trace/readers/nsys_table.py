"""Builds the event table of one device and its process from the rows of an Nsight Systems export."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from cclsearch.trace.events import Collective, DeviceInfo, EventTable, Kind, LaunchShape, Step
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.names.kinds import classify_kernel
from cclsearch.trace.names.step_markers import MarkerSpan, steps_of_marks
from cclsearch.trace.readers.collectives import collective_from_name, name_bare_collectives
from cclsearch.trace.readers.columns import Interner, to_int32
from cclsearch.trace.readers.table_builder import attribute_steps, mark_incomplete_steps, match_launches

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
    return name_bare_collectives(table)


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
