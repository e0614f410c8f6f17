"""Finds the steps of a Kineto trace: by markers on the host, else by markers on the device's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import Kind, Step, rows_of_kinds
from cclsearch.trace.names.step_markers import MarkerSpan, read_marker, steps_of_marks
from cclsearch.trace.readers.table_builder import step_of_launches, steps_at

DEVICE_SOURCE = "gpu_annotation"
"""`step_source` if only the device's timeline has markers."""
_HOST_KINDS = (Kind.CPU_OP, Kind.ANNOTATION)


def find_steps(columns: dict[str, Any], names: Sequence[str]) -> tuple[str, tuple[Step, ...], NDArray[np.int32]]:
    """Return the source of the step markers, the steps by start, and the step in which each row starts (-1: none).

    Host rows mark the steps; if none does, their copies on the device's timeline (`gpu_user_annotation`).
    """
    numbers = {name: number for number, name in enumerate(names) if read_marker(name) is not None}
    if not numbers:
        return "", (), steps_at((), columns["ts_ns"])

    def marks_on(kinds: tuple[Kind, ...], wanted: frozenset[str]) -> list[MarkerSpan]:
        is_marker = np.zeros(len(names), bool)
        is_marker[[numbers[name] for name in wanted]] = True
        rows = np.flatnonzero(is_marker.take(columns["name_id"]))
        rows = rows[rows_of_kinds(columns["kind"][rows], kinds)]
        order = np.lexsort((-columns["dur_ns"][rows], columns["ts_ns"][rows]))
        starts, ends = columns["ts_ns"][rows], columns["ts_ns"][rows] + columns["dur_ns"][rows]
        return [
            MarkerSpan(names[int(columns["name_id"][rows[i]])], int(starts[i]), int(ends[i])) for i in order.tolist()
        ]

    source, steps = steps_of_marks(numbers, lambda wanted: marks_on(_HOST_KINDS, wanted))
    if not steps:
        _, steps = steps_of_marks(numbers, lambda wanted: marks_on((Kind.DEVICE_ANNOTATION,), wanted))
        source = DEVICE_SOURCE if steps else ""
    return source, steps, steps_at(steps, columns["ts_ns"])


def attribute_rows(
    columns: dict[str, Any],
    names: Sequence[str],
    steps: Sequence[Step],
    source: str,
    step_id: NDArray[np.int32],
    device_rows: NDArray[np.int64],
    launch: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Return `step_id` of every row: host rows by their start (as given), device rows by their launch.

    A device row without a launch record belongs to the step whose annotation covers it on its own stream. If only the
    device's timeline has markers, the row's own start decides.
    """
    if source == DEVICE_SOURCE:
        step_id[rows_of_kinds(columns["kind"], (Kind.RUNTIME, *_HOST_KINDS))] = -1
        return step_id
    step_of_launches(step_id, steps, device_rows, launch)
    bare = device_rows[launch < 0]
    numbers = {name: number for number, name in enumerate(names)}
    shown = {numbers[step.name]: i for i, step in enumerate(steps) if step.name in numbers}
    annotations = rows_of_kinds(columns["kind"], (Kind.DEVICE_ANNOTATION,))
    if not len(bare) or not len(annotations) or len(shown) < len(steps):  # a name that repeats names no step
        return step_id
    for row in annotations[np.isin(columns["name_id"][annotations], list(shown))].tolist():
        start = columns["ts_ns"][row]
        covered = (columns["ts_ns"][bare] >= start) & (columns["ts_ns"][bare] <= start + columns["dur_ns"][row])
        covered &= (columns["stream"][bare] == columns["stream"][row]) & (
            columns["device"][bare] == columns["device"][row]
        )
        step_id[bare[covered]] = shown[int(columns["name_id"][row])]
    return step_id
