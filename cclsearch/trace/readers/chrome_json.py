"""Reads the JSON of Kineto and of XLA, distinguished by the head or by the first events."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cclsearch.trace.events import DEVICE_WORK, EventTable, Reason, rows_of_kinds
from cclsearch.trace.readers.json_events import EventReader
from cclsearch.trace.readers.json_structs import Meta
from cclsearch.trace.readers.kineto.args import plain_args
from cclsearch.trace.readers.kineto.builder import KinetoBuilder
from cclsearch.trace.readers.kineto.parts import ScanParts
from cclsearch.trace.readers.kineto.scanned import ScannedPieces
from cclsearch.trace.readers.kineto.scanner import open_scanner
from cclsearch.trace.readers.kineto.table import build_tables
from cclsearch.trace.readers.stream import ByteStream, ReadLimits, TraceError


def read_chrome_json(path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    """Return one table per process (Kineto) or per device (XLA)."""
    with ByteStream(path, limits) as stream:
        reader = EventReader(stream, limits, scanner=open_scanner())
        builder = KinetoBuilder(reader, limits)
        scanned = ScannedPieces(builder)
        for batch in reader:
            if isinstance(batch, ScanParts):
                batch.scan_all(scanned.add, scanned.classify)
            elif builder.base_us is None and is_xla(reader, batch):
                break
            elif isinstance(batch, list):
                builder.add_batch(batch)
            else:
                scanned.add(batch)
        else:
            return _finish(builder, path)
    from cclsearch.trace.readers.xla.json_planes import read_xla_json

    return read_xla_json(path, limits)


def is_xla(reader: EventReader, batch: Iterable[Any]) -> bool:
    """Whether the names of processes are XLA's (`/host:CPU`, `/device:TPU:0`) and the head is not Kineto's."""
    if "schemaVersion" in reader.metadata or "deviceProperties" in reader.metadata:
        return False
    processes = [event for event in batch if isinstance(event, Meta) and event.name == "process_name"]
    return any(str(plain_args(event.args).get("name", "")).startswith(("/host:", "/device:")) for event in processes)


def _finish(builder: KinetoBuilder, path: Path) -> tuple[EventTable, ...]:
    unsupported = TraceError(Reason.FORMAT_UNSUPPORTED, "events of an accelerator that is not supported (MTIA)")
    if not builder.rows.num_rows:
        if builder.is_unsupported:
            raise unsupported
        reason = Reason.TRACE_TRUNCATED if not builder.reader.complete else Reason.UNREADABLE
        raise TraceError(reason, "contains no event of a known kind")
    tables = build_tables(builder, source=path.name, is_complete=builder.reader.complete)
    table = tables[0]
    if builder.is_unsupported and (table.accelerator == "cpu" or not len(rows_of_kinds(table.kind, DEVICE_WORK))):
        raise unsupported
    return tables
