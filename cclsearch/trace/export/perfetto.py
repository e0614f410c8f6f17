"""The timeline of all ranks with the diagnosis' causes, for Perfetto's UI (`score --perfetto FILE`).

The file has Chrome's trace event format (JSON). A rank is a process with a track per stream and host thread, arrows
from launches to what they launched, and tracks of what ccl-search found: step windows with their time by cause, idle
gaps with their cause, waiting for other ranks, and the critical path of the median step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from cclsearch.charts.parts import Track
from cclsearch.core.errors import UserError, writing_to
from cclsearch.core.text import one_line
from cclsearch.trace.collectives import group_label
from cclsearch.trace.diagnosis.causes import CAUSES, find_idle_gaps, split_windows
from cclsearch.trace.diagnosis.critical_path import PathSegment, find_critical_path, require_launches
from cclsearch.trace.events import Collective, Kind
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.metrics.launches import find_queue_length
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.readers.base import OWN_TIMELINE
from cclsearch.trace.result import NotAvailable
from cclsearch.trace.view import RankView, TraceView

Event = dict[str, Any]
_FLOW_BITS = 32
"""Bits of the row number in the id of an arrow; the rank's number is above them."""


class Slice(NamedTuple):
    """One span on a track, in ns on the rank's clock."""

    start_ns: int
    end_ns: int
    name: str
    notes: dict[str, int | str] = {}
    flows_out: Sequence[int] = ()
    """Ids of the arrows that begin here, unique in the file."""
    flow_in: int = 0


def export_perfetto(trace: TraceView, path: Path) -> None:
    """Write all ranks' rows and their causes. Raises UserError if no rank has work, or if `path` cannot be written."""
    ranks = [rank for rank, view in trace.ranks.items() if len(view.device_rows)]
    if not ranks:
        raise UserError("no device event to export: choose a trace that `ccl-search score` can read")
    origins = find_origins(trace, ranks)
    segments = _find_path(trace)
    scratch = path.with_name(path.name + ".part")
    with writing_to(path):
        try:
            with scratch.open("wb", buffering=1 << 20) as file:
                file.write(b'{"displayTimeUnit":"ns",%s,"traceEvents":[' % OWN_TIMELINE)
                separator = b"\n"
                for number, rank in enumerate(ranks, start=1):
                    own = [segment for segment in segments if segment.rank == rank]
                    for event in _Rank(trace, trace.ranks[rank], number, origins[rank]).events(own):
                        file.write(separator + orjson.dumps(event))
                        separator = b",\n"
                file.write(b"\n]}\n")
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def _find_path(trace: TraceView) -> list[PathSegment]:
    """Return the critical path; empty if the trace does not allow finding it."""
    try:
        require_launches(trace)
        return find_critical_path(trace)
    except NotAvailable:
        return []


def find_origins(trace: TraceView, ranks: Iterable[int]) -> dict[int, int]:
    """Return the offset of each rank's `ts_ns` with which ranks share a clock and the first row is at 0.

    Without aligned clocks, Unix time places the ranks; without that, each rank starts at 0.
    """
    tables = {rank: trace.ranks[rank].table for rank in ranks}
    offsets = trace.matching.offset_ns
    if offsets is None and any(table.clock != "unix" for table in tables.values()):
        return {rank: -int(table.ts_ns.min()) for rank, table in tables.items()}
    starts = {rank: table.base_ns + (offsets or {}).get(rank, 0) for rank, table in tables.items()}
    first = min(starts[rank] + int(table.ts_ns.min()) for rank, table in tables.items())
    return {rank: start - first for rank, start in starts.items()}


def split_lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Return the slices on as few tracks as possible: slices of one track nest, as Perfetto requires."""
    lanes: list[list[Slice]] = []
    ends: list[list[int]] = []
    """Ends of the slices of each lane that enclose the present start."""
    for item in sorted(slices, key=lambda item: (item.start_ns, -item.end_ns)):
        for open_ends in ends:
            while open_ends and open_ends[-1] <= item.start_ns:
                open_ends.pop()
        fitting = (at for at, open_ends in enumerate(ends) if not open_ends or open_ends[-1] >= item.end_ns)
        at = next(fitting, len(lanes))
        if at == len(lanes):
            lanes.append([])
            ends.append([])
        lanes[at].append(item)
        ends[at].append(item.end_ns)
    return lanes


class _Rank:
    """The events of one rank."""

    def __init__(self, trace: TraceView, view: RankView, number: int, origin_ns: int) -> None:
        self._trace, self._view, self._table, self._number = trace, view, view.table, number
        self._origin_ns = origin_ns
        self._tracks = count(1)
        self._transfer_ns = trace.matching.transfer_ns_of(view.rank, np.arange(len(view.table)))

    def events(self, path: Sequence[PathSegment]) -> Iterator[Event]:
        """Yield the findings first (`path`: the part through this rank), then the rows and the counters."""
        yield from self._on_track("steps", self._steps())
        yield from self._on_track("idle, by cause", self._idle_gaps())
        yield from self._on_track("waiting for other ranks", self._waits())
        move = self._table.base_ns + (self._trace.matching.offset_ns or {}).get(self._view.rank, 0)
        segments = (Slice(part.start_ns - move, part.end_ns - move, part.part) for part in reversed(path))
        yield from self._on_track("critical path", segments)
        yield from self._rows()
        yield from self._counters()

    def _us(self, time_ns: int) -> float:
        return (time_ns + self._origin_ns) / 1000

    def _on_track(self, name: str, slices: Iterable[Slice]) -> Iterator[Event]:
        """Yield a track, and further ones of the same name for slices that overlap without nesting."""
        for lane in split_lanes(slices):
            track = Track(self._number, next(self._tracks))
            yield from track.name(self._name, name)
            for start_ns, end_ns, text, notes, flows_out, flow_in in lane:
                start_us = self._us(start_ns)
                yield track.span(one_line(text, 1000) or "(no name)", start_us, self._us(end_ns), args=notes)
                at = {**vars(track), "ts": start_us, "name": "launch", "cat": "launch"}
                yield from ({"ph": "s", "id": flow, **at} for flow in flows_out)
                if flow_in:
                    yield {"ph": "f", "bp": "e", "id": flow_in, **at}

    @property
    def _name(self) -> str:
        places = [self._table.host, *dict.fromkeys(device.name for device in self._table.devices)]
        known = ", ".join(filter(None, places))
        is_aligned = self._trace.matching.offset_ns is not None or len(self._trace.ranks) == 1
        name = f"rank {self._table.rank}" + (f" ({known})" if known else "")
        return one_line(name if is_aligned else f"{name}, clock not aligned", 200)

    def _steps(self) -> Iterator[Slice]:
        windows = self._view.windows
        at = np.arange(len(windows.spans_W2))
        causes = split_windows(self._trace, self._view, at) if len(at) else {}
        for i, ((start, end), step) in enumerate(zip(windows.spans_W2.tolist(), windows.numbers, strict=True)):
            notes: dict[str, int | str] = {f"{cause}_ns": int(ns[i]) for cause, ns in causes.items()}
            yield Slice(start, end, f"step {step}" if windows.are_steps else "whole file", notes)

    def _idle_gaps(self) -> Iterator[Slice]:
        gaps = find_idle_gaps(self._view)
        ends_G = gaps.start_ns_G + gaps.length_ns_G
        for start, end, cause in zip(gaps.start_ns_G.tolist(), ends_G.tolist(), gaps.cause_G.tolist(), strict=True):
            yield Slice(start, end, CAUSES[cause])

    def _waits(self) -> Iterator[Slice]:
        """Yield the part of each matched collective in which this rank waits for others."""
        table = self._table
        for row in self._view.comm_rows.tolist():
            wait_ns = int(table.dur_ns[row] - self._transfer_ns[row])
            if self._transfer_ns[row] >= 0 and wait_ns > 0:
                start = int(table.ts_ns[row])
                yield Slice(start, start + wait_ns, str(table.collectives[table.coll_id[row]].kind))

    def _rows(self) -> Iterator[Event]:
        table, flows = self._table, self._flows_by_launch()
        keys = np.stack([table.device.astype(np.int64), table.stream, table.kind == Kind.DEVICE_ANNOTATION], axis=1)
        tracks, which = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(which.ravel(), kind="stable")
        bounds = np.searchsorted(which.ravel()[order], np.arange(len(tracks) + 1))
        for i, (device, stream, is_annotation) in enumerate(tracks.tolist()):
            track = f"stream {stream}" if device >= 0 or is_annotation else self._thread_name(stream)
            if is_annotation:
                track += " annotations"
            yield from self._on_track(track, self._slices(order[bounds[i] : bounds[i + 1]], flows))

    def _thread_name(self, number: int) -> str:
        threads = self._table.threads
        name = one_line(threads[number], 100) if 0 <= number < len(threads) else "host"
        return f"thread {name}" if name.lstrip("-").isdigit() else name

    def _flows_by_launch(self) -> dict[int, list[int]]:
        """Return launch row -> the arrows to the device rows that it launched."""
        found: dict[int, list[int]] = {}
        rows = self._view.device_rows
        launch = self._table.launch[rows]
        for row, call in zip(rows[launch >= 0].tolist(), launch[launch >= 0].tolist(), strict=True):
            found.setdefault(call, []).append(self._flow_to(row))
        return found

    def _flow_to(self, row: int) -> int:
        return (self._number << _FLOW_BITS) + row

    def _slices(self, rows: Int64s, flows: dict[int, list[int]]) -> Iterator[Slice]:
        table = self._table
        columns = (table.ts_ns[rows], table.end_ns[rows], table.name_id[rows], table.device[rows], table.launch[rows])
        for row, start, end, name, device, launch in zip(rows.tolist(), *(c.tolist() for c in columns), strict=True):
            notes = dict(self._notes_of(row)) if device >= 0 else {}
            flow_in = self._flow_to(row) if launch >= 0 else 0
            yield Slice(start, end, table.names[name], notes, flows.get(row, ()), flow_in)

    def _notes_of(self, row: int) -> Iterator[tuple[str, int | str]]:
        table = self._table
        if table.step_id[row] >= 0:
            yield "step", table.steps[table.step_id[row]].number
        if table.kind[row] == Kind.COMPUTE:
            yield "class", ComputeClass(table.name_class[table.name_id[row]]).name.lower()
        elif table.kind[row] == Kind.COMM:
            yield from self._notes_of_call(row, table.collectives[table.coll_id[row]])
        elif table.bytes[row] >= 0:
            yield "bytes", int(table.bytes[row])

    def _notes_of_call(self, row: int, call: Collective) -> Iterator[tuple[str, int | str]]:
        transfer = int(self._transfer_ns[row])
        yield "collective", str(call.kind)
        yield "group", one_line(call.group or group_label(call), 200)
        if call.message_bytes is not None:
            yield "bytes", call.message_bytes
        if transfer >= 0:
            yield "transfer_ns", transfer
            yield "wait_ns", max(int(self._table.dur_ns[row]) - transfer, 0)

    def _counters(self) -> Iterator[Event]:
        memory = self._table.memory
        for device in np.unique(memory.device).tolist():
            at = memory.device == device
            name = f"allocated memory, device {device}" if device >= 0 else "allocated memory, host"
            yield from self._counter(name, memory.ts_ns[at], memory.allocated_bytes[at])
        try:
            queue = find_queue_length(self._view)
        except NotAvailable:
            return
        yield from self._counter("launched, not started", queue.at_ns, queue.length)

    def _counter(self, name: str, times_ns: Int64s, values: Int64s) -> Iterator[Event]:
        for time, value in zip(times_ns.tolist(), values.tolist(), strict=True):
            yield {"ph": "C", "name": name, "pid": self._number, "ts": self._us(time), "args": {"value": value}}
