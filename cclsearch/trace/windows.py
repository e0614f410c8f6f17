"""Step windows: the spans of time that per-step figures cover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cclsearch.trace.events import EventTable, Kind, Reason, rows_of_kinds
from cclsearch.trace.intervals import Int64s

MIN_STEPS_TO_TRIM = 4
"""With at least this many complete steps, the first and the last are not used."""
NO_STEPS = {
    Reason.NO_STEP_MARKERS: "no step markers",
    Reason.NO_LAUNCH_RECORDS: "steps are marked, but no device event has a launch record",
    Reason.MISSING_KERNELS: "steps are marked, but each lacks kernels that it launched",
    Reason.EMPTY_STEPS: "steps are marked, but launched no work that was recorded",
}
"""Reasons why the window is the whole file, in words."""
_MARKED_ON_HOST = ("step_num", "program")
"""Sources of XLA steps that are host events: the work that they launch runs later."""


@dataclass(frozen=True)
class Windows:
    """Step windows of one rank, sorted by start."""

    spans_W2: Int64s
    """Start and end of each window."""
    step_index_W: Int64s
    """Index into the table's `steps`; -1 if the window is the whole file."""
    numbers: tuple[int, ...]
    """Number of each step, from its marker."""
    reason: Reason | None = None
    """One of `NO_STEPS` (one window: the whole file), `too_few_steps` (one step: its own extent), or None."""

    @property
    def are_steps(self) -> bool:
        """Whether the windows are steps, not the whole file."""
        return self.reason not in NO_STEPS and len(self.spans_W2) > 0

    @property
    def num_steps(self) -> int:
        """Number of steps that figures cover; 0 if the window is the whole file."""
        return len(self.spans_W2) if self.are_steps else 0


def first_reason(windows: Iterable[Windows]) -> Reason | None:
    """Return one of `NO_STEPS`, else `too_few_steps`, if any of these windows has it; None if all are full steps."""
    found = {each.reason for each in windows}
    return next((reason for reason in (*NO_STEPS, Reason.TOO_FEW_STEPS) if reason in found), None)


def find_windows(table: EventTable, busy_M2: Int64s, device_rows: Int64s) -> Windows:
    """Return the windows of a rank's steps.

    On devices with launches a window runs from the first device event that a step launched to the first that the next
    step launched: the host's markers may be ahead of the device by any amount. If marker and work share a clock and a
    thread (CPU, lines of an XLA device), it runs from marker to marker. A step without a next one has no period: if
    there is no other, its window is the device's extent of its launches (with its annotation on the device's timeline),
    or its marker. Without steps the window is the file.
    """
    by_marker = _is_marked_on_the_device(table, device_rows)
    extents_S2 = np.array([(step.start_ns, step.end_ns) for step in table.steps], np.int64).reshape(-1, 2)
    if not by_marker:
        extents_S2 = _device_extents(table, device_rows)
    order = np.argsort(extents_S2[:, 0], kind="stable")
    order = order[extents_S2[order, 1] >= extents_S2[order, 0]]
    complete = np.array([table.steps[i].complete for i in order], dtype=bool)
    if not complete.any():
        return _whole_file(table, busy_M2, device_rows)
    starts, own_ends = extents_S2[order].T
    ends = np.append(starts[1:], own_ends[-1])
    at = np.flatnonzero(complete)
    alone = len(order) == 1
    if len(at) >= MIN_STEPS_TO_TRIM:
        at = at[1:-1]
    elif not alone and not by_marker:
        at = at[at < len(order) - 1]
    if not len(at):  # only the last step is complete
        at, alone = np.flatnonzero(complete)[-1:], True
    if (ends[at] <= starts[at]).any():
        at = at[ends[at] > starts[at]]
    if not len(at):
        return _whole_file(table, busy_M2, device_rows)
    numbers = tuple(table.steps[i].number for i in order[at])
    return Windows(np.stack([starts, ends], axis=1)[at], order[at], numbers, Reason.TOO_FEW_STEPS if alone else None)


def _is_marked_on_the_device(table: EventTable, device_rows: Int64s) -> bool:
    """Whether the markers are on the device's own timeline, so that a step's window is its marker's."""
    if table.accelerator == "cpu" or not table.is_timed:
        return True
    if table.format != "xla":
        return False
    launched = table.step_source in _MARKED_ON_HOST and "launch" in table.sparse
    return not (launched and bool((table.launch[device_rows] >= 0).any()))


def _device_extents(table: EventTable, device_rows: Int64s) -> Int64s:
    """Return the first start and the last end of each step's device events; the end is smaller if it launched none.

    Events without a step have index -1, which is the slot after the last step.
    """
    count = len(table.steps)
    first = np.full(count + 1, np.iinfo(np.int64).max, dtype=np.int64)
    last = np.full(count + 1, -1, dtype=np.int64)
    step_of_row, begin_ns = table.step_id[device_rows], table.ts_ns[device_rows]
    if len(device_rows):  # rows of one step mostly follow each other
        runs = np.flatnonzero(np.concatenate(([True], step_of_row[1:] != step_of_row[:-1])))
        np.minimum.at(first, step_of_row[runs], np.minimum.reduceat(begin_ns, runs))
        np.maximum.at(last, step_of_row[runs], np.maximum.reduceat(begin_ns + table.dur_ns[device_rows], runs))
    extents_S2 = np.stack([first, last], axis=1)[:-1]
    for step, start_ns, end_ns in _annotations(table):
        if extents_S2[step, 1] >= 0:  # the annotation of a step that launched nothing shows only the profiler's work
            extents_S2[step] = min(extents_S2[step, 0], start_ns), max(extents_S2[step, 1], end_ns)
    return extents_S2


def _annotations(table: EventTable) -> list[tuple[int, int, int]]:
    """Return (step, start, end) of the annotations of steps on the device's timeline, of names that occur once."""
    names = [step.name for step in table.steps]
    step_named = {name: i for i, name in enumerate(names) if names.count(name) == 1} if len(names) < 1000 else {}
    rows = rows_of_kinds(table.kind, (Kind.DEVICE_ANNOTATION,))
    if not len(rows) or not step_named:
        return []
    step_of_name = np.array([step_named.get(name, -1) for name in table.names], dtype=np.int64)
    rows = rows[step_of_name[table.name_id[rows]] >= 0]
    return [
        (int(step_of_name[table.name_id[row]]), int(table.ts_ns[row]), int(table.ts_ns[row] + table.dur_ns[row]))
        for row in rows.tolist()
    ]


def _whole_file(table: EventTable, busy_M2: Int64s, device_rows: Int64s) -> Windows:
    reason = Reason.EMPTY_STEPS
    if not table.steps:
        reason = Reason.NO_STEP_MARKERS
    elif not any(step.complete for step in table.steps):
        reason = Reason.MISSING_KERNELS
    elif len(device_rows) and (table.launch[device_rows] < 0).all():
        reason = Reason.NO_LAUNCH_RECORDS
    if not len(busy_M2):
        return Windows(np.zeros((0, 2), np.int64), np.zeros(0, np.int64), (), reason)
    span = np.array([[busy_M2[0, 0], busy_M2[-1, 1]]], dtype=np.int64)
    return Windows(span, np.array([-1], dtype=np.int64), (-1,), reason)
