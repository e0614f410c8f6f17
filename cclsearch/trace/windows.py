"""Step windows: the spans of time that per-step figures cover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cclsearch.trace.events import EventTable, Reason
from cclsearch.trace.intervals import Int64s

MIN_STEPS_TO_TRIM = 4
"""With at least this many complete steps, the first and the last are not used."""


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
    """`no_step_markers` (one window: the whole file), `too_few_steps` (one step, as long as its marker), or None."""

    @property
    def are_steps(self) -> bool:
        """Whether the windows are steps, not the whole file."""
        return self.reason is not Reason.NO_STEP_MARKERS and len(self.spans_W2) > 0

    @property
    def num_steps(self) -> int:
        """Number of steps that figures cover; 0 if the window is the whole file."""
        return len(self.spans_W2) if self.are_steps else 0


def find_windows(table: EventTable, busy_M2: Int64s, device_rows: Int64s) -> Windows:
    """Return the windows of a rank's steps.

    On GPUs a window runs from the first device event that a step launched to the first that the next step launched:
    the host's markers may be ahead of the device by any amount. On CPU and XLA, marker and work share a clock and a
    thread, so it runs from marker to marker. A single step is as long as its marker; without steps it is the file.
    """
    by_marker = table.accelerator == "cpu" or table.format == "xla"
    markers = np.array([step.start_ns for step in table.steps], dtype=np.int64)
    starts = markers if by_marker else _device_starts(table, device_rows)
    order = np.argsort(starts, kind="stable")
    order = order[starts[order] < np.iinfo(np.int64).max]
    complete = np.array([table.steps[i].complete for i in order], dtype=bool)
    if not complete.any():
        return _whole_file(busy_M2)
    starts = starts[order]
    lengths = np.array([table.steps[i].end_ns - table.steps[i].start_ns for i in order], dtype=np.int64)
    ends = np.append(starts[1:], starts[-1] + lengths[-1])
    at = np.flatnonzero(complete)
    alone = len(order) == 1
    if len(at) >= MIN_STEPS_TO_TRIM:
        at = at[1:-1]
    elif not alone and not by_marker:
        at = at[at < len(order) - 1]
    if not len(at):
        return _whole_file(busy_M2)
    numbers = tuple(table.steps[i].number for i in order[at])
    return Windows(np.stack([starts, ends], axis=1)[at], order[at], numbers, Reason.TOO_FEW_STEPS if alone else None)


def _device_starts(table: EventTable, device_rows: Int64s) -> Int64s:
    """Return the first start of a device event of each step; the largest integer if a step launched none.

    Events without a step have index -1, which is the slot after the last step.
    """
    first = np.full(len(table.steps) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    step_of_row = table.step_id[device_rows]
    np.minimum.at(first, step_of_row, table.ts_ns[device_rows])
    return first[:-1]


def _whole_file(busy_M2: Int64s) -> Windows:
    if not len(busy_M2):
        return Windows(np.zeros((0, 2), np.int64), np.zeros(0, np.int64), (), Reason.NO_STEP_MARKERS)
    span = np.array([[busy_M2[0, 0], busy_M2[-1, 1]]], dtype=np.int64)
    return Windows(span, np.array([-1], dtype=np.int64), (-1,), Reason.NO_STEP_MARKERS)
