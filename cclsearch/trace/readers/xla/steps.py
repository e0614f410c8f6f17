"""Finds the steps of an XLA trace, and the host's step markers, launches and program calls."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cclsearch.launch.contract import NONCE_MARK
from cclsearch.trace.events import Kind
from cclsearch.trace.names.step_markers import XLA_PROGRAM, read_marker
from cclsearch.trace.readers.xla.planes import Plane, Stats, XEvent, XlaRow, int_or_none

MAX_HOST_ROWS = 2_000_000
MAX_MARKS = 1000
MAIN_PROGRAM_SHARE = 0.9
"""Share of the device's time from which a program is the step; small programs may run between its calls."""
Mark = tuple[int, str, int, int]
"""Number, name, start and end in picoseconds."""

_LAUNCH = re.compile(r"Execute|Launch|RunId|Enqueue", re.IGNORECASE)
_DRIVER_CALL = re.compile(r"^(hip|cuda|cu)[A-Z]")


@dataclass
class HostEvents:
    """The host's step markers (with number), launches (with run id or correlation id) and program calls."""

    markers: list[tuple[int, XEvent]] = field(default_factory=list)
    launches: list[tuple[int, XEvent]] = field(default_factory=list)
    programs: list[tuple[str, XEvent]] = field(default_factory=list)
    """Name of a program, and the host's call that runs it."""
    marks: list[XEvent] = field(default_factory=list)
    """Annotations of ccl-search, which name the attempt."""

    def rows(self, line: int) -> list[XlaRow]:
        """Return the host rows, on that line: markers, marks, then launches."""
        events = [*(event for _, event in self.markers), *self.marks]
        markers = [XlaRow(None, *event[1:4], Kind.ANNOTATION, line) for event in events]
        return markers + [XlaRow(None, *event[1:4], Kind.RUNTIME, line, run) for run, event in self.launches]


def read_host(planes: Sequence[Plane]) -> HostEvents:
    """Return the host's step markers and the earliest launch of each run."""
    found = HostEvents()
    launches: dict[int, XEvent] = {}
    for plane in planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        for line in plane.lines:
            for event in line.read_events():
                if event.name.startswith(("$", "end: ")) or len(launches) > MAX_HOST_ROWS:
                    continue
                call = read_marker(event.name)
                if call is not None and call.family == XLA_PROGRAM and len(found.programs) < MAX_HOST_ROWS:
                    found.programs.append((call.program, event))
                if event.name.startswith(NONCE_MARK) and len(found.marks) < MAX_MARKS:
                    found.marks.append(event)
                    continue
                stats = event.read_stats()
                step = int_or_none(stats.get("step_num"))
                run = int_or_none(stats.get("run_id", stats.get("correlation_id")))
                if step is not None:
                    found.markers.append((step, event))
                elif run is not None and _is_launch(event.name, stats):
                    known = launches.get(run)
                    if known is None or event.start_ps < known.start_ps:
                        launches[run] = event
    found.markers.sort(key=lambda pair: pair[1].start_ps)
    found.programs.sort(key=lambda pair: (pair[1].start_ps, -pair[1].duration_ps))
    found.launches = sorted(launches.items(), key=lambda pair: pair[1].start_ps)
    return found


def _is_launch(name: str, stats: Stats) -> bool:
    """Return whether the event of a run or correlation id launches it: a call of the driver (ROCm names its `hlo_op`
    too), or one of the runtime that is not an operation itself."""
    return bool(_DRIVER_CALL.match(name)) or ("hlo_op" not in stats and bool(_LAUNCH.search(name)))


def find_steps(plane: Plane | None, host: HostEvents) -> tuple[str, list[Mark]]:
    """Return source and marks of the steps: `step_num`, "Steps" line, StepMarker, or the repeated main module."""
    if host.markers:
        return "step_num", _without_overlap([(n, e.name, e.start_ps, e.end_ps) for n, e in host.markers])
    lines = {line.name: line for line in plane.lines} if plane is not None else {}
    if "Steps" in lines:
        marks = _numbered(list(lines["Steps"].read_events()))
        if marks:
            return "steps_line", _without_overlap(marks)
    for name, line in lines.items():
        if name in ("XLA TraceMe", "Framework Ops", "Steps"):
            events = [event for event in line.read_events() if event.name.startswith("StepMarker")]
            if len(events) > 1:
                return "step_marker", _between(events)
    if "XLA Modules" in lines:
        return "module", _main_module(list(lines["XLA Modules"].read_events()))
    return "", []


def find_program_steps(host: HostEvents, launched: Sequence[tuple[int, int]]) -> list[Mark]:
    """Return one step for each call of the program that launched most of the device's time; none if it ran once.

    `launched`: launch time and duration of each device row, in picoseconds. Operations that are called one by one mark
    no steps: the program must have nearly all of that time, or the same calls must follow each of its runs.
    """
    calls: list[tuple[str, int, int]] = []
    for program, event in host.programs:
        if not calls or event.start_ps >= calls[-1][2]:  # else inside the call before
            calls.append((program, event.start_ps, event.end_ps))
    starts = [start for _, start, _ in calls]
    total: dict[str, int] = {}
    for time_ps, duration_ps in launched:
        at = bisect_right(starts, time_ps) - 1
        if at >= 0 and time_ps <= calls[at][2]:
            total[calls[at][0]] = total.get(calls[at][0], 0) + duration_ps
    main = max(total, key=lambda name: total[name], default="")
    runs = [at for at, call in enumerate(calls) if call[0] == main]
    share = total.get(main, 0) / max(sum(duration for _, duration in launched), 1)
    between = {tuple(name for name, _, _ in calls[begin:end]) for begin, end in pairwise(runs)}
    if len(runs) < 2 or (share < MAIN_PROGRAM_SHARE and len(between) > 1):
        return []
    return [(n, *calls[at]) for n, at in enumerate(runs)]


def _main_module(events: list[XEvent]) -> list[Mark]:
    """Return the runs of the module with the largest total time; none if it ran once."""
    total: dict[Any, int] = {}
    for event in events:
        total[event.key] = total.get(event.key, 0) + event.duration_ps
    if not total:
        return []
    main = max(total, key=lambda key: total[key])
    runs = sorted((event for event in events if event.key == main), key=lambda event: event.start_ps)
    if len(runs) < 2:
        return []
    return _without_overlap([(n, event.name, event.start_ps, event.end_ps) for n, event in enumerate(runs)])


def _numbered(events: list[XEvent]) -> list[Mark]:
    events.sort(key=lambda event: event.start_ps)
    numbers = [int(e.name) if re.fullmatch(r"[0-9]{1,15}", e.name) else number for number, e in enumerate(events)]
    pairs = zip(numbers, events, strict=True)
    return [(n, event.name, event.start_ps, event.end_ps) for n, event in pairs if event.duration_ps > 0]


def _between(events: list[XEvent]) -> list[Mark]:
    """Return one step from each marker to the next."""
    events.sort(key=lambda event: event.start_ps)
    pairs = pairwise(events)
    return [(n, event.name, event.start_ps, following.start_ps) for n, (event, following) in enumerate(pairs)]


def _without_overlap(marks: list[Mark]) -> list[Mark]:
    kept: list[Mark] = []
    for mark in marks:
        if not kept or mark[2] >= kept[-1][3]:
            kept.append(mark)
    return kept
