"""Reads XLA's `trace.json.gz` as planes: processes are planes, threads are lines, arguments are statistics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cclsearch.trace.events import EventTable, Reason
from cclsearch.trace.readers.json_events import EventReader
from cclsearch.trace.readers.json_structs import Meta, Span
from cclsearch.trace.readers.kineto.args import plain_args
from cclsearch.trace.readers.stream import ByteStream, ReadLimits, TraceError
from cclsearch.trace.readers.xla.planes import Plane, PlaneLine, PlaneSpace, XEvent

Key = tuple[Any, Any]


def read_xla_json(path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    """Return one table per device; raises TraceError if nothing can be read."""
    from cclsearch.trace.readers.xla.read import build_tables

    return build_tables(read_json_space(path, limits), source=path.name)


def read_json_space(path: Path, limits: ReadLimits) -> PlaneSpace:
    """Return the planes of the file."""
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
                elif isinstance(event, Meta):
                    _add_name(event, processes, threads)
            if count > limits.rows // 20:
                raise TraceError(Reason.TOO_LARGE, f"more than {limits.rows // 20} events")
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
    return PlaneSpace(tuple(planes), reader.complete and not reader.num_bad)


def _add_name(event: Meta, processes: dict[Any, str], threads: dict[Key, str]) -> None:
    if event.name == "process_name":
        processes[event.pid] = str(plain_args(event.args).get("name", ""))
    elif event.name == "thread_name":
        threads[(event.pid, event.tid)] = str(plain_args(event.args).get("name", ""))


def _read_events(spans: list[Span]) -> Iterator[XEvent]:
    for span in spans:
        if abs(span.ts) < 4.5e15 and 0 <= span.dur < 4.5e15:
            start, duration = round(span.ts * 1e6), round(span.dur * 1e6)
            yield XEvent(span.name, span.name, start, duration, partial(plain_args, span.args))
