"""Reads XLA's planes into one table per device: TPU, GPU, and CPU (with operations on the host's threads).

Only lines that do not repeat the time of other lines are read: "XLA Ops" of a TPU, the streams of a GPU, `hlo_op`
events of a CPU's threads. Never "XLA Modules", "Steps", "Async XLA Ops" or "TraceMe".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cclsearch.trace.events import EventTable, Kind, Reason
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.names.kinds import classify_kernel, classify_xla
from cclsearch.trace.readers.json_events import EventReader
from cclsearch.trace.readers.json_structs import Meta, Span
from cclsearch.trace.readers.kineto.builder import plain_args
from cclsearch.trace.readers.stream import ByteStream, ReadLimits, TraceError, list_faults
from cclsearch.trace.readers.xla.collectives import join_pairs
from cclsearch.trace.readers.xla.planes import (
    Plane,
    PlaneLine,
    PlaneSpace,
    Stats,
    XEvent,
    XlaOp,
    XlaRow,
    int_or_none,
    op_of,
    read_space,
)
from cclsearch.trace.readers.xla.program import Programs, add_costs
from cclsearch.trace.readers.xla.table import build_xla_table, read_host

_DEVICE_PLANE = re.compile(r"^/device:(?P<type>[A-Za-z_]+):(?P<ordinal>\d+)$")
_MEMORY_NAME = re.compile(r"^mem(cpy|set)", re.IGNORECASE)
_COPY_LINE = re.compile(r"\((?:Mem(?:cpy|set)\w*,?)+\)$")
"""Suffix of a stream on which only copies run: XLA on ROCm names a copy after the kernel that does it."""

Key = tuple[Any, Any]
Rows = dict[tuple[str, int], tuple[Plane | None, list[XlaRow], list[str]]]


def read_xla_json(path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    """Return one table per device of XLA's `trace.json.gz`, in which processes are planes and threads are lines.

    Raises TraceError if nothing can be read.
    """
    processes: dict[Any, str] = {}
    threads: dict[Key, str] = {}
    events: dict[Key, list[Span]] = {}
    count = 0
    with ByteStream(path, limits) as stream:
        reader = EventReader(stream, limits)
        for batch in reader:
            for event in batch if isinstance(batch, list) else []:  # without a scanner it is one
                if isinstance(event, Span):
                    event.args = msgspec.Raw(bytes(event.args))  # the reader reuses its buffer
                    events.setdefault((event.pid, event.tid), []).append(event)
                    count += 1
                elif isinstance(event, Meta) and event.name == "process_name":
                    processes[event.pid] = str(plain_args(event.args).get("name", ""))
                elif isinstance(event, Meta) and event.name == "thread_name":
                    threads[event.pid, event.tid] = str(plain_args(event.args).get("name", ""))
            limits.check_entries(count, "events")
    planes = [
        Plane(
            name,
            tuple(
                PlaneLine(threads.get(key, str(key[1])), partial(_read_events, spans))
                for key, spans in events.items()
                if key[0] == pid
            ),
        )
        for pid, name in processes.items()
    ]
    return build_tables(PlaneSpace(tuple(planes), reader.complete and not reader.num_bad), source=path.name)


def _read_events(spans: list[Span]) -> Iterator[XEvent]:
    for span in spans:
        if abs(span.ts) < 4.5e15 and 0 <= span.dur < 4.5e15:
            start, duration = round(span.ts * 1e6), round(span.dur * 1e6)
            yield XEvent(span.name, span.name, start, duration, partial(plain_args, span.args))


def read_xspace_tables(path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    """Return one table per device of the file; raises TraceError if nothing can be read."""
    return build_tables(read_space(path, limits), source=path.name)


def build_tables(space: PlaneSpace, *, source: str) -> tuple[EventTable, ...]:
    """Return one table per device that has rows, in the order of the ordinals."""
    host = read_host(space.planes)
    devices = _device_rows(space)
    programs = Programs(space.programs)
    accelerator = next((accelerator for (accelerator, _) in devices), "cpu")
    if not devices:
        raise TraceError(Reason.NO_GPU_EVENTS, "contains no operation of any device")
    tables = []
    ordinals = frozenset(ordinal for _, ordinal in devices)
    for (_, ordinal), (plane, rows, lines) in sorted(devices.items(), key=lambda item: item[0]):
        add_costs(rows, programs)
        table = build_xla_table(rows, lines, host, plane, ordinal, ordinals)
        tables.append(
            replace(
                table,
                rank=-1,
                accelerator=accelerator,
                host=space.host,
                base_ns=table.base_ns + space.start_ns,
                clock="unix" if space.start_ns else "trace",
                source=source,
                reasons=list_faults(is_complete=space.is_complete),
            )
        )
    return tuple(tables)


def _device_rows(space: PlaneSpace) -> Rows:
    found: Rows = {}
    for plane in space.planes:
        match = _DEVICE_PLANE.match(plane.name)
        if match:
            accelerator = "gpu" if match["type"].upper() in ("GPU", "CUDA", "ROCM") else "tpu"
            rows, lines = _gpu_rows(plane) if accelerator == "gpu" else _tpu_rows(plane)
            if rows:
                found[(accelerator, int(match["ordinal"]))] = (plane, rows, lines)
    if not found:
        found = {("cpu", ordinal): (None, *value) for ordinal, value in _cpu_rows(space.planes).items()}
    return found


def _tpu_rows(plane: Plane) -> tuple[list[XlaRow], list[str]]:
    rows: list[XlaRow] = []
    known: dict[Any, tuple[Kind, ComputeClass, Stats]] = {}
    for line in plane.lines:
        if line.name != "XLA Ops":
            continue
        for event in line.read_events():
            if event.key not in known:
                stats = event.read_stats()
                kind, _, compute = classify_xla(str(stats.get("hlo_category") or ""), event.name)
                known[event.key] = (kind, compute, stats)
            kind, compute, stats = known[event.key]
            rows.append(XlaRow(*event[:4], kind, 0, compute=compute, stats=stats))
    return join_pairs(_without_containers(rows)), ["XLA Ops"]


def _gpu_rows(plane: Plane) -> tuple[list[XlaRow], list[str]]:
    streams = [line for line in plane.lines if line.name.startswith("Stream #")]
    if not streams:
        return _tpu_rows(plane)
    rows: list[XlaRow] = []
    known: dict[Any, tuple[Kind, ComputeClass, Stats]] = {}
    ops: dict[XlaOp | None, XlaOp | None] = {}
    for number, line in enumerate(streams):
        copies = _COPY_LINE.search(line.name) is not None
        for event in line.read_events():
            if (event.key, copies) not in known:
                stats = event.read_stats()
                known[event.key, copies] = (*_class_gpu(event, stats, copies), stats)
            kind, compute, stats = known[event.key, copies]
            own = event.read_stats()
            if kind in (Kind.MEMCPY, Kind.MEMSET):
                stats = own
            run = int_or_none(own.get("correlation_id"))
            op = None if "flops" in own else ops.setdefault(op_of(own), op_of(own))
            rows.append(XlaRow(*event[:4], kind, number, -1 if run is None else run, compute, stats, op))
    return rows, [line.name for line in streams]


def _class_gpu(event: XEvent, stats: Stats, copies: bool) -> tuple[Kind, ComputeClass]:
    memory = _MEMORY_NAME.match(event.name)
    if memory:
        return (Kind.MEMCPY if memory[1].lower() == "cpy" else Kind.MEMSET), ComputeClass.OTHER
    kind, compute = classify_kernel(event.name)
    if kind == Kind.COMPUTE and (copies or "memcpy_details" in stats):
        return Kind.MEMCPY, ComputeClass.OTHER
    return kind, compute


def _cpu_rows(planes: Sequence[Plane]) -> dict[int, tuple[list[XlaRow], list[str]]]:
    """Return the operations on the host's threads by device; their `end: *` duplicates are left out."""
    found: dict[int, tuple[list[XlaRow], list[str]]] = {}
    lines: list[PlaneLine] = [line for plane in planes if plane.name.startswith("/host:CPU") for line in plane.lines]
    for number, line in enumerate(lines):
        for event in line.read_events():
            if event.name.startswith(("end: ", "$")) or not event.duration_ps:
                continue
            stats = event.read_stats()
            if "hlo_op" not in stats:
                continue
            ordinal = int_or_none(stats.get("device_ordinal")) or 0
            run = int_or_none(stats.get("run_id"))
            kind, _, compute = classify_xla(str(stats.get("hlo_category") or ""), event.name)
            own = None if "flops" in stats else op_of(stats)
            row = XlaRow(event.name, *event[1:4], kind, number, -1 if run is None else run, compute, stats, own)
            found.setdefault(ordinal, ([], []))[0].append(row)
    names = [line.name for line in lines]
    return {ordinal: (join_pairs(_without_containers(rows)), names) for ordinal, (rows, _) in found.items()}


def _without_containers(rows: list[XlaRow]) -> list[XlaRow]:
    """Return the rows sorted, with a compute row that encloses others of its line marked as a container."""
    rows.sort(key=lambda row: (row.line, row.start_ps, -row.duration_ps))
    open_rows: list[XlaRow] = []
    for row in rows:
        while open_rows and (
            open_rows[-1].line != row.line or open_rows[-1].start_ps + open_rows[-1].duration_ps <= row.start_ps
        ):
            open_rows.pop()
        if not row.duration_ps:
            continue
        outer = open_rows[-1] if open_rows else None
        encloses = outer is not None and row.start_ps + row.duration_ps <= outer.start_ps + outer.duration_ps
        if outer is not None and encloses and outer.kind == Kind.COMPUTE:
            outer.kind = Kind.CONTAINER
        open_rows.append(row)
    return rows
