"""Finds what cannot be in a trace: kernels that overlap on one stream or outlast their step, lost or zero records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.text import count_of, one_line
from cclsearch.trace.events import EventTable, Ints, Kind, Reason
from cclsearch.trace.windows import find_windows

# Kernels of one stream overlap by up to 12.4 us in real traces: clocks of units, and launches before the last one ends.
MAX_OVERLAP_NS = 20_000
MAX_STREAMS = 1000
MAX_CUT_SHARE = 0.001
"""Share of the time of kernels that may be cut off before the figures are partial."""
# A profiler that counts whole microseconds has 7 % of zeros.
MAX_ZERO_SHARE = 0.5
MAX_EARLY_SHARE = 0.01
MIN_CLOCK_NS = 3600 * 10**9
MIN_LAUNCHED_SHARE = 0.95
"""Share of kernel launches with a kernel below which the profiler lost records."""
LAUNCH = re.compile(r"launch_?kernel|launchcooperative|cuLaunch", re.IGNORECASE)
# Their annotations on the host prove that there was a device.
_DEVICE_BACKEND = re.compile(r"^(nccl|rccl|xccl|hccl):")

Problem = tuple[Reason, str]
Dense = dict[str, Any]
Sparse = dict[str, tuple[NDArray[np.int32], NDArray[Any]]]


def take_rows(mask: NDArray[np.bool_], columns: Dense, sparse: Sparse) -> tuple[Dense, Sparse]:
    """Return the columns of the rows in the mask."""
    number = np.cumsum(mask, dtype=np.int32) - np.int32(1)
    taken = {name: (number[rows[mask[rows]]], values[mask[rows]]) for name, (rows, values) in sparse.items()}
    return {name: column[mask] for name, column in columns.items()}, taken


def cut_overlaps(columns: Dense, device_rows: Ints) -> tuple[Problem, ...]:
    """Cut kernels that run on after the next kernel of their stream began, as Perfetto does; say so if it matters.

    Kernels of one launch (a graph) may run at the same time.
    """
    kernels = device_rows[columns["kind"][device_rows] <= np.uint8(Kind.COMM)]
    device, stream = columns["device"][kernels].astype(np.int64), columns["stream"][kernels]
    lane = device << 32 | stream.astype(np.int64) & 0xFFFFFFFF
    num_kernels, total = len(kernels), int(columns["dur_ns"][kernels].sum())
    num_cut = cut = 0
    for _ in range(MAX_STREAMS):  # one after the other: few streams need no sorting
        if not len(lane):
            break
        is_first = lane == lane[0]
        over_ns = _cut_stream(columns, kernels[is_first])
        num_cut, cut = num_cut + len(over_ns), cut + int(over_ns.sum())
        kernels, lane = kernels[~is_first], lane[~is_first]
    if cut <= MAX_CUT_SHARE * total:
        return ()
    text = f"{num_cut} of {num_kernels} kernels overlap the next of their stream: cut there"
    return ((Reason.IMPOSSIBLE_TIMES, f"{text} ({cut / total:.2%} of the kernels' time)"),)


def _cut_stream(columns: Dense, rows: Ints) -> Ints:
    """Cut the kernels of one stream; return the ns of each cut."""
    start = columns["ts_ns"][rows]
    if (start[1:] < start[:-1]).any():
        rows = rows[np.argsort(start, kind="stable")]
        start = columns["ts_ns"][rows]
    corr = columns["corr"][rows]
    firsts = np.flatnonzero(np.append(True, (corr[1:] != corr[:-1]) | (corr[1:] < 0)))
    sizes, never, end = np.diff(np.append(firsts, len(rows))), np.iinfo(np.int64).max, start + columns["dur_ns"][rows]
    over = end - np.repeat(np.append(start[firsts[1:]], never), sizes)
    # with programmatic dependent launch the next one begins early, and waits inside for this one's end
    outlasts = end > np.repeat(np.append(np.maximum.reduceat(end, firsts)[1:], never), sizes)
    at = np.flatnonzero((over > MAX_OVERLAP_NS) & outlasts)
    columns["dur_ns"][rows[at]] -= over[at]
    return np.asarray(over[at])


def drop_zero_times(columns: Dense, sparse: Sparse, zero_ns: int) -> tuple[Dense, Sparse, tuple[Problem, ...]]:
    """Return the columns without rows at time 0 (`zero_ns`), if all others are an hour later (kineto#109)."""
    is_zero = columns["ts_ns"] == zero_ns
    count = int(is_zero.sum())
    if not count or count == len(is_zero) or columns["ts_ns"][~is_zero].min() - zero_ns < MIN_CLOCK_NS:
        return columns, sparse, ()
    problem = (Reason.UNREADABLE, f"{count_of(count, 'event')} with the time 0: left out")
    return (*take_rows(~is_zero, columns, sparse), (problem,))


def with_problems(table: EventTable, device_rows: Ints, *before: Problem) -> EventTable:
    """Return the table with the problems found before and in it, as `reasons` and in words."""
    found = [*before, *_find_problems(table, device_rows)]
    reasons = dict.fromkeys((*table.reasons, *(reason for reason, _ in found)))
    return replace(table, reasons=tuple(reasons), problems=tuple(text for _, text in found)) if found else table


def _find_problems(table: EventTable, rows: Ints) -> Iterator[Problem]:
    if table.accelerator == "cpu":
        return
    yield from _find_lost_records(table, rows)
    if not len(rows):
        return
    duration = table.dur_ns[rows]
    zeros = int((duration == 0).sum())
    if zeros > MAX_ZERO_SHARE * len(rows):
        yield Reason.IMPOSSIBLE_TIMES, f"{zeros} of {len(rows)} device events have the duration 0"
    if "launch" in table.sparse:
        launched, launch = table.sparse["launch"]
        launched, launch = launched[launch >= 0], launch[launch >= 0]
        early = int((table.ts_ns[launched] + MAX_OVERLAP_NS < table.ts_ns[launch]).sum())
        if early > MAX_EARLY_SHARE * len(launched):
            yield Reason.IMPOSSIBLE_TIMES, f"{early} of {len(launched)} device events start before they were launched"
    windows = find_windows(table, np.zeros((0, 2), np.int64), rows)
    if windows.are_steps:
        longest = int((windows.spans_W2[:, 1] - windows.spans_W2[:, 0]).max())
        start = table.ts_ns[rows]
        inside = (start >= windows.spans_W2[0, 0]) & (start < windows.spans_W2[-1, 1])
        is_kernel = table.kind[rows] <= np.uint8(Kind.COMM)  # a copy may go on beside several steps
        too_long = rows[inside & is_kernel & (duration > longest)]
        if len(too_long):
            name = one_line(table.names[table.name_id[too_long[0]]], 60)
            took, step = table.dur_ns[too_long[0]] / 1e6, longest / 1e6
            text = f"{count_of(len(too_long), 'kernel')} longer than every step"
            yield Reason.IMPOSSIBLE_TIMES, f"{text} ({name}: {took:.4g} ms in {step:.4g} ms)"


def _find_lost_records(table: EventTable, rows: Ints) -> Iterator[Problem]:
    if table.format == "kineto" and not any(step.complete for step in table.steps):
        calls = table.rows_named(LAUNCH, Kind.RUNTIME)
        calls = calls[table.corr[calls] >= 0]
        has_kernel = np.isin(table.corr[calls], table.corr[rows])
        lost = int((~has_kernel).sum())
        if lost > (1 - MIN_LAUNCHED_SHARE) * len(calls):
            what = "no kernel" if not len(rows) else f"no kernel for {lost} of them"
            yield (
                Reason.MISSING_KERNELS,
                f"{len(calls)} kernel launches and {what}: records were lost, or a graph captured them",
            )
            return
    if not len(rows):
        backend = table.rows_named(_DEVICE_BACKEND, Kind.ANNOTATION)
        names = [table.names[number] for number in table.name_id[backend].tolist()]
        called = f"{count_of(len(backend), 'call')} of {names[0]!r} and others, but " if names else ""
        yield Reason.NO_GPU_EVENTS, f"{called}no event of a device: its part of the profile is missing"
    elif table.steps and table.format == "kineto" and table.step_id[rows].max() < 0 and table.launch[rows].max() < 0:
        text = f"none of {len(rows)} device events has a launch record, so that no step can be told from another"
        yield Reason.NO_LAUNCH_RECORDS, text


def has_device_backend(columns: Dense, names: tuple[str, ...]) -> bool:
    """Whether the host has annotations of a backend for accelerators."""
    numbers = [number for number, name in enumerate(names) if _DEVICE_BACKEND.match(name)]
    return bool(numbers) and bool(
        (np.isin(columns["name_id"], numbers) & (columns["kind"] == np.uint8(Kind.ANNOTATION))).any()
    )
