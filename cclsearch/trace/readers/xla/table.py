"""Builds one device's event table from device rows and host events of an XLA trace, and finds its steps."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.launch.contract import NONCE_MARK
from cclsearch.trace.events import DeviceInfo, EventTable, Kind, OpCost, Step
from cclsearch.trace.names.kinds import XLA_PROGRAM, read_marker
from cclsearch.trace.readers.columns import Interner
from cclsearch.trace.readers.table_builder import match_launches, steps_at
from cclsearch.trace.readers.xla.collectives import describe_collective
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


_DEVICE_NAMES = ("device_type_string", "gpu_device_name", "device_vendor")
"""Statistics of a device's plane that name it, the most exact first."""
_COPY_SIZE = re.compile(r"(?:^|\s)(?:size|num_bytes):(\d{1,18})")


def build_xla_table(
    rows: list[XlaRow], lines: list[str], host: HostEvents, plane: Plane | None, ordinal: int, ordinals: frozenset[int]
) -> EventTable:
    """Return the table of one device (its rows first, then the host's); the caller sets rank, clock and source.

    `ordinals`: the ordinals of all devices of the file.
    """
    both = [*rows, *host.rows(len(lines))]
    base_ns = min(row.start_ps for row in both) // 1000
    names = Interner()
    columns = _read_columns(both, names, base_ns)
    columns["device"] = np.where(np.arange(len(both)) < len(rows), ordinal, -1).astype(np.int16)
    device_rows, launch, _ = match_launches(columns["kind"], columns["corr"])
    source, marks = find_steps(plane, host)
    if not marks:
        matched = zip(device_rows[launch >= 0].tolist(), launch[launch >= 0].tolist(), strict=True)
        launched = [(both[at].start_ps, both[row].duration_ps) for row, at in matched]
        source, marks = "program", find_program_steps(host, launched)
    steps = tuple(
        Step(number, name, round(begin / 1000) - base_ns, round(end / 1000) - base_ns)
        for number, name, begin, end in marks
    )
    step_id = steps_at(steps, columns["ts_ns"])
    if source in ("step_num", "program"):  # marked on the host: the launch decides, if it is recorded
        step_id[device_rows] = np.where(launch >= 0, step_id[launch], step_id[device_rows])
    distinct = Interner()
    sparse = {"launch": (device_rows.astype(np.int32), launch), **_sparse_columns(rows, distinct, ordinal, ordinals)}
    classes, costs = _describe_names(rows, names)
    return EventTable(
        **columns,
        step_id=step_id,
        names=tuple(name for _, name in names),
        name_class=classes,
        collectives=tuple(distinct),
        threads=(*lines, "host"),
        steps=steps,
        step_source=source if steps else "",
        op_costs=MappingProxyType(costs),
        sparse=MappingProxyType({name: column for name, column in sparse.items() if len(column[0])}),
        format="xla",
        devices=(_describe_device(plane, ordinal),),
        base_ns=base_ns,
    )


def _read_columns(rows: Sequence[XlaRow], names: Interner, base_ns: int) -> dict[str, Any]:
    """Return the dense columns except `device` and `step_id`; adds the names to `names`."""
    runs = Interner()
    values = [
        (
            row.start_ps,
            row.duration_ps,
            int(row.kind),
            names[(row.key, row.name)],
            row.line,
            runs[row.run] if row.run != -1 else -1,
        )
        for row in rows
    ]
    start, duration, kinds, name_id, stream, corr = (np.array(column, np.int64) for column in zip(*values, strict=True))
    return {
        "ts_ns": _to_ns(start - base_ns * 1000),
        "dur_ns": _to_ns(duration),
        "kind": kinds.astype(np.uint8),
        "name_id": name_id.astype(np.int32),
        "stream": stream.astype(np.int32),
        "corr": corr.astype(np.int32),
    }


def _to_ns(time_ps: NDArray[np.int64]) -> NDArray[np.int64]:
    return (time_ps + 500) // 1000


def _sparse_columns(
    rows: Sequence[XlaRow], distinct: Interner, ordinal: int, ordinals: frozenset[int]
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    calls = [n for n, row in enumerate(rows) if row.kind == Kind.COMM]
    described = [describe_collective(rows[n].name, rows[n].stats or {}, ordinal, ordinals) for n in calls]
    copies = [(n, size) for n, row in enumerate(rows) if (size := _copy_bytes(row)) is not None]
    return {
        "coll_id": (np.array(calls, np.int32), distinct.numbers_of(described, len(calls))),
        "bytes": (np.array([n for n, _ in copies], np.int32), np.array([size for _, size in copies], np.int64)),
    }


def _describe_names(rows: Sequence[XlaRow], names: Interner) -> tuple[NDArray[np.uint8], dict[int, OpCost]]:
    classes = np.zeros(len(names), np.uint8)
    costs: dict[int, OpCost] = {}
    for row in rows:
        number = names[(row.key, row.name)]
        classes[number] = row.compute
        if number not in costs and (cost := row.cost or (_cost_of(row.stats) if row.stats else None)):
            costs[number] = cost
    return classes, costs


def _describe_device(plane: Plane | None, ordinal: int) -> DeviceInfo:
    if plane is None:
        return DeviceInfo(ordinal, "cpu")
    stats = plane.stats
    peak, bandwidth = stats.get("peak_teraflops_per_second"), stats.get("peak_hbm_bw_gigabytes_per_second")
    return DeviceInfo(
        ordinal,
        next((str(stats[key]) for key in _DEVICE_NAMES if stats.get(key)), ""),
        num_sms=int_or_none(stats.get("core_count")),
        memory_bytes=int_or_none(stats.get("memory_size")),
        peak_flops=float(peak) * 1e12 if isinstance(peak, float) and 0 < peak < 1e9 else None,
        peak_memory_gbps=float(bandwidth) if isinstance(bandwidth, float) and 0 < bandwidth < 1e9 else None,
    )


def _cost_of(stats: Stats) -> OpCost | None:
    flops, accessed = _number(stats.get("flops")), _number(stats.get("bytes_accessed"))
    return OpCost(flops, accessed) if flops is not None or accessed is not None else None


def _copy_bytes(row: XlaRow) -> int | None:
    """Return the bytes of a GPU's copy (`size:1024` in its details). A TPU's copies state traffic, not a size."""
    if row.kind not in (Kind.MEMCPY, Kind.MEMSET) or not row.stats:
        return None
    details = row.stats.get("memcpy_details") or row.stats.get("memset_details") or ""
    found = _COPY_SIZE.search(str(details))
    return int(found[1]) if found else None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < 1e30 else None
