"""The timeline of all ranks with the diagnosis' causes, for Perfetto's UI (`score --perfetto FILE`).

A rank is a process with a track per stream and host thread, arrows from launches to what they launched, and tracks of
what ccl-search found: step windows with their time by cause, idle gaps with their cause, waiting for other ranks, and
the critical path of the median step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from cclsearch.core.errors import UserError, writing_to
from cclsearch.core.text import one_line
from cclsearch.trace.collectives import group_label
from cclsearch.trace.compute_class import ComputeClass
from cclsearch.trace.diagnosis.causes import split_windows
from cclsearch.trace.diagnosis.critical_path import PathSegment, find_critical_path, require_launches
from cclsearch.trace.diagnosis.gaps import CAUSES, find_idle_gaps
from cclsearch.trace.events import Collective, EventTable, Kind
from cclsearch.trace.export.perfetto_writer import PacketSequence, Slice, Unit
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.metrics.launches import find_queue_length
from cclsearch.trace.result import NotAvailable
from cclsearch.trace.view import RankView, TraceView

_NOTES = ("class", "step", "bytes", "collective", "group", "transfer_ns", "wait_ns")
_FLOW_BITS = 32
"""Bits of the row number in the id of an arrow; the rank's sequence is above them."""


def export_perfetto(trace: TraceView, path: Path) -> None:
    """Write all ranks' rows and their causes. Raises UserError if no rank has work, or if `path` cannot be written."""
    ranks = [rank for rank, view in trace.ranks.items() if len(view.device_rows)]
    if not ranks:
        raise UserError("no device event to export: choose a trace that `ccl-search score` can read")
    origins = find_origins(trace, ranks)
    is_aligned = trace.matching.offset_ns is not None or len(ranks) == 1
    tracks = count(1)
    segments = _find_path(trace)
    scratch = path.with_name(path.name + ".part")
    with writing_to(path):
        try:
            with scratch.open("wb", buffering=1 << 20) as file:
                for number, rank in enumerate(ranks, start=1):
                    view = trace.ranks[rank]
                    name = _process_name(view.table, is_aligned)
                    sequence = PacketSequence(file, number, name, tracks=tracks)
                    writer = _RankWriter(trace, view, sequence, number, origins[rank])
                    writer.write([segment for segment in segments if segment.rank == rank])
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
    """Return what to add to each rank's `ts_ns` so that ranks share a clock and the first row is at 0.

    Without aligned clocks, ranks are placed by Unix time; without that, each rank starts at 0.
    """
    tables = {rank: trace.ranks[rank].table for rank in ranks}
    offsets = trace.matching.offset_ns
    if offsets is None and any(table.clock != "unix" for table in tables.values()):
        return {rank: -int(table.ts_ns.min()) for rank, table in tables.items()}
    starts = {rank: table.base_ns + (offsets or {}).get(rank, 0) for rank, table in tables.items()}
    first = min(starts[rank] + int(table.ts_ns.min()) for rank, table in tables.items())
    return {rank: start - first for rank, start in starts.items()}


def _process_name(table: EventTable, is_aligned: bool) -> str:
    places = [table.host, *dict.fromkeys(device.name for device in table.devices)]
    known = ", ".join(filter(None, places))
    name = f"rank {table.rank}" + (f" ({known})" if known else "")
    return one_line(name if is_aligned else f"{name}, clock not aligned", 200)


class _RankWriter:
    """Writes one rank."""

    def __init__(self, trace: TraceView, view: RankView, sequence: PacketSequence, number: int, origin_ns: int) -> None:
        self._trace, self._view, self._table, self._sequence = trace, view, view.table, sequence
        self._origin_ns = origin_ns
        self._first_flow = number << _FLOW_BITS
        self._notes = dict(zip(_NOTES, sequence.number_note_names(_NOTES), strict=True))
        self._transfer_ns = trace.matching.transfer_ns_of(view.rank, np.arange(len(view.table)))

    def write(self, path: Sequence[PathSegment]) -> None:
        """Write what was found first (`path`: what passes this rank), then the rows and the counters."""
        self._write_steps()
        self._write_idle_gaps()
        self._write_waits()
        self._write_path(path)
        self._write_rows()
        self._write_counters()

    def _spans(self, track: str, spans: Iterable[tuple[int, int, str, Mapping[str, int]]]) -> None:
        """Write slices (start, end, name, notes) on the rank's clock."""
        listed = list(spans)
        names = self._sequence.number_names(name for _, _, name, _ in listed)
        note_names = list(dict.fromkeys(key for *_, notes in listed for key in notes))
        keys = dict(zip(note_names, self._sequence.number_note_names(note_names), strict=True))
        self._sequence.add_slices(
            track,
            (
                Slice(
                    start + self._origin_ns,
                    end + self._origin_ns,
                    number,
                    notes=tuple((keys[key], value) for key, value in notes.items()),
                )
                for (start, end, _, notes), number in zip(listed, names, strict=True)
            ),
        )

    def _write_steps(self) -> None:
        windows = self._view.windows
        at = np.arange(len(windows.spans_W2))
        if not len(at):
            return
        causes = split_windows(self._trace, self._view, at)
        self._spans(
            "steps",
            (
                (start, end, f"step {step}" if windows.are_steps else "whole file", notes)
                for (start, end), step, notes in zip(
                    windows.spans_W2.tolist(),
                    windows.numbers,
                    [{f"{cause}_ns": int(ns[i]) for cause, ns in causes.items()} for i in at],
                    strict=True,
                )
            ),
        )

    def _write_idle_gaps(self) -> None:
        gaps = find_idle_gaps(self._view)
        ends_G = gaps.start_ns_G + gaps.length_ns_G
        columns = zip(gaps.start_ns_G.tolist(), ends_G.tolist(), gaps.cause_G.tolist(), strict=True)
        self._spans("idle, by cause", ((start, end, CAUSES[cause], {}) for start, end, cause in columns))

    def _write_waits(self) -> None:
        """Write the part of each matched collective in which this rank waits for others."""
        table, rows = self._table, self._view.comm_rows
        wait_ns = table.dur_ns[rows] - self._transfer_ns[rows]
        rows, wait_ns = (part[(self._transfer_ns[rows] >= 0) & (wait_ns > 0)] for part in (rows, wait_ns))
        calls = [table.collectives[number] for number in table.coll_id[rows].tolist()]
        columns = zip(table.ts_ns[rows].tolist(), wait_ns.tolist(), calls, strict=True)
        self._spans(
            "waiting for other ranks", ((start, start + wait, str(call.kind), {}) for start, wait, call in columns)
        )

    def _write_path(self, path: Sequence[PathSegment]) -> None:
        """Write the critical path of the median step, where it passes this rank."""
        if path:
            move = self._table.base_ns + (self._trace.matching.offset_ns or {}).get(self._view.rank, 0)
            none: Mapping[str, int] = {}
            spans = ((part.start_ns - move, part.end_ns - move, part.part, none) for part in reversed(path))
            self._spans("critical path", spans)

    def _write_rows(self) -> None:
        table = self._table
        names = np.array(self._sequence.number_names(one_line(name, 1000) for name in table.names), np.int64)
        flows = self._flows_by_launch()
        keys = np.stack([table.device.astype(np.int64), table.stream, table.kind == Kind.DEVICE_ANNOTATION], axis=1)
        tracks, which = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(which.ravel(), kind="stable")
        bounds = np.searchsorted(which.ravel()[order], np.arange(len(tracks) + 1))
        for i, (device, stream, is_annotation) in enumerate(tracks.tolist()):
            rows = order[bounds[i] : bounds[i + 1]]
            track = f"stream {stream}" if device >= 0 or is_annotation else self._thread_name(stream)
            if is_annotation:
                track += " annotations"
            self._sequence.add_slices(track, self._slices(rows, names, flows))

    def _thread_name(self, number: int) -> str:
        threads = self._table.threads
        name = one_line(threads[number], 100) if 0 <= number < len(threads) else "host"
        return f"thread {name}" if name.lstrip("-").isdigit() else name

    def _flows_by_launch(self) -> dict[int, list[int]]:
        """Return launch row -> the device rows that it launched."""
        found: dict[int, list[int]] = {}
        rows = self._view.device_rows
        launch = self._table.launch[rows]
        for row, call in zip(rows[launch >= 0].tolist(), launch[launch >= 0].tolist(), strict=True):
            found.setdefault(call, []).append(row)
        return found

    def _slices(self, rows: Int64s, names: Int64s, flows: Mapping[int, list[int]]) -> Iterator[Slice]:
        table = self._table
        starts = (table.ts_ns[rows] + self._origin_ns).tolist()
        ends = (table.ts_ns[rows] + table.dur_ns[rows] + self._origin_ns).tolist()
        is_launched = table.launch[rows] >= 0
        columns = zip(rows.tolist(), starts, ends, names[table.name_id[rows]].tolist(), is_launched, strict=True)
        for row, start, end, name, launched in columns:
            out = tuple(self._first_flow + device_row for device_row in flows.get(row, ()))
            flow_in = self._first_flow + row if launched else 0
            yield Slice(start, end, name, out, flow_in, self._notes_of(row) if table.device[row] >= 0 else ())

    def _notes_of(self, row: int) -> tuple[tuple[int, int | str], ...]:
        table, notes = self._table, self._notes
        found: list[tuple[int, int | str]] = []
        step = int(table.step_id[row])
        if step >= 0:
            found.append((notes["step"], table.steps[step].number))
        if table.kind[row] == Kind.COMPUTE:
            found.append((notes["class"], ComputeClass(table.name_class[table.name_id[row]]).name.lower()))
        elif table.kind[row] == Kind.COMM:
            found += self._notes_of_call(row, table.collectives[table.coll_id[row]])
        elif table.bytes[row] >= 0:
            found.append((notes["bytes"], int(table.bytes[row])))
        return tuple(found)

    def _notes_of_call(self, row: int, call: Collective) -> Iterator[tuple[int, int | str]]:
        notes, transfer = self._notes, int(self._transfer_ns[row])
        yield notes["collective"], str(call.kind)
        yield notes["group"], one_line(call.group or group_label(call), 200)
        if call.message_bytes is not None:
            yield notes["bytes"], call.message_bytes
        if transfer >= 0:
            yield notes["transfer_ns"], transfer
            yield notes["wait_ns"], max(int(self._table.dur_ns[row]) - transfer, 0)

    def _write_counters(self) -> None:
        memory = self._table.memory
        for device in np.unique(memory.device).tolist():
            at = memory.device == device
            times = (memory.ts_ns[at] + self._origin_ns).tolist()
            name = f"allocated memory, device {device}" if device >= 0 else "allocated memory, host"
            points = zip(times, memory.allocated_bytes[at].tolist(), strict=True)
            self._sequence.add_counter(name, Unit.BYTES, points)
        try:
            queue = find_queue_length(self._view)
        except NotAvailable:
            return
        times = (queue.at_ns + self._origin_ns).tolist()
        self._sequence.add_counter("launched, not started", Unit.COUNT, zip(times, queue.length.tolist(), strict=True))
