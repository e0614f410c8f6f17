"""The built-in readers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cclsearch.trace.events import DEVICE_WORK, EventTable, Reason, rows_of_kinds
from cclsearch.trace.readers.base import READERS
from cclsearch.trace.readers.json_events import EventReader
from cclsearch.trace.readers.json_structs import Meta
from cclsearch.trace.readers.kineto import KinetoBuilder
from cclsearch.trace.readers.kineto_ahead import ScanParts
from cclsearch.trace.readers.kineto_args import plain_args
from cclsearch.trace.readers.kineto_native import open_scanner
from cclsearch.trace.readers.kineto_scanned import ScannedPieces
from cclsearch.trace.readers.kineto_table import build_tables
from cclsearch.trace.readers.stream import ByteStream, ReadLimits, TraceError
from cclsearch.trace.readers.unsupported import find_unsupported

_JSON_NAME = re.compile(r"\.(json|trace)(\.gz)?$", re.IGNORECASE)
_TRACE_NAME = re.compile(r"trace|rank[-_]?\d|kineto|profil|worker\d", re.IGNORECASE)
_EVENTS = re.compile(rb'"traceEvents"|^\s*\[\s*\{[^}]{0,2000}"ph"')
_ROCPROFILER = re.compile(rb'(\xef\xbb\xbf)?\s*\{\s*"rocprofiler-sdk-tool"')
_EXECUTION_TRACE = re.compile(
    rb'(\xef\xbb\xbf)?\s*\{[^\[\]]{0,500}"schema"\s*:\s*"\d[^"]*"[^\[\]]{0,500}"nodes"\s*:\s*\['
)


@READERS.register("chrome-json")
class ChromeJson:
    """Reads Kineto's and XLA's JSON, distinguished by the head or the first events."""

    format = "kineto"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether it is JSON with a list of events near its beginning, or has the name of a trace."""
        if not _JSON_NAME.search(path.name):
            return False
        is_json = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"["))
        return bool(_EVENTS.search(head)) or (not is_json and bool(_TRACE_NAME.search(path.name)))

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
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
                return self._finish(builder, path)
        from cclsearch.trace.readers.xla_json import read_xla_json

        return read_xla_json(path, limits)

    def _finish(self, builder: KinetoBuilder, path: Path) -> tuple[EventTable, ...]:
        if not builder.rows.num_rows:
            if builder.is_unsupported:
                raise TraceError(Reason.FORMAT_UNSUPPORTED, "events of an accelerator that is not supported (MTIA)")
            reason = Reason.TRACE_TRUNCATED if not builder.reader.complete else Reason.UNREADABLE
            raise TraceError(reason, "contains no event of a known kind")
        tables = build_tables(builder, source=path.name, is_complete=builder.reader.complete)
        table = tables[0]
        if builder.is_unsupported and (table.accelerator == "cpu" or not len(rows_of_kinds(table.kind, DEVICE_WORK))):
            raise TraceError(Reason.FORMAT_UNSUPPORTED, "events of an accelerator that is not supported (MTIA)")
        return tables


def is_xla(reader: EventReader, batch: Iterable[Any]) -> bool:
    """Whether the names of processes are XLA's (`/host:CPU`, `/device:TPU:0`) and the head is not Kineto's."""
    if "schemaVersion" in reader.metadata or "deviceProperties" in reader.metadata:
        return False
    processes = [event for event in batch if isinstance(event, Meta) and event.name == "process_name"]
    return any(str(plain_args(event.args).get("name", "")).startswith(("/host:", "/device:")) for event in processes)


@READERS.register("xspace")
class XSpace:
    """Reads XLA's XSpace (`*.xplane.pb`)."""

    format = "xla"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether the name is an XSpace's: the format has no magic bytes."""
        return path.name.lower().endswith((".xplane.pb", ".xplane.pb.gz"))

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """Return one table per device."""
        from cclsearch.trace.readers.xla import read_xspace_tables

        return read_xspace_tables(path, limits)


@READERS.register("nsys-sqlite")
class NsysSqlite:
    """Reads the SQLite file that `nsys export --type sqlite` writes."""

    format = "nsys"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether it is SQLite by name (an empty or damaged file too), or a `.db` file with SQLite's magic bytes."""
        by_name = path.suffix.lower() in (".sqlite", ".sqlite3", ".nsys-rep", ".qdrep")
        return by_name or (path.suffix.lower() == ".db" and head.startswith(b"SQLite format 3\0"))

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """Return one table per device of each process."""
        if path.suffix.lower() in (".nsys-rep", ".qdrep"):
            raise TraceError(Reason.FORMAT_UNSUPPORTED, "export it first: nsys export --type sqlite FILE")
        from cclsearch.trace.readers.nsys import read_nsys

        return read_nsys(path, limits)


@READERS.register("rocprofiler-json")
class RocprofilerJson:
    """Reads the JSON that `rocprofv3 --output-format json` writes."""

    format = "rocprof"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether it is JSON whose first key is rocprofiler-sdk's."""
        return bool(_JSON_NAME.search(path.name) and _ROCPROFILER.match(head))

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """Return one table per device of each process."""
        from cclsearch.trace.readers.rocprof import read_rocprof

        return read_rocprof(path, limits)


@READERS.register("pytorch-et")
class PytorchExecutionTrace:
    """Reads the execution traces of PyTorch's `ExecutionTraceObserver`."""

    format = "pytorch-et"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether it is JSON that begins with a schema and a list of nodes."""
        return bool(_JSON_NAME.search(path.name) and _EXECUTION_TRACE.match(head[:4096]))

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """Return the table of the file's rank, without times."""
        from cclsearch.trace.readers.execution_trace import read_execution_trace

        return read_execution_trace(path, limits)


@READERS.register("chakra-et")
class ChakraTraces:
    """Reads Chakra execution traces (`*.et`) whose nodes have times."""

    format = "chakra"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether the name is a Chakra trace's: the format has no magic bytes."""
        return path.name.lower().endswith((".et", ".et.gz"))

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """Return the table of the file's rank."""
        from cclsearch.trace.readers.chakra import read_chakra

        return read_chakra(path, limits)


@READERS.register("unsupported")
class Unsupported:
    """Refuses the formats of the table. Its files are left out if a folder has others that can be read."""

    format = "unsupported"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether the file is of a format in the table."""
        return find_unsupported(path.name) is not None

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """Raise TraceError with what to do."""
        known = find_unsupported(path.name)
        raise TraceError(Reason.FORMAT_UNSUPPORTED, known.message if known else "the file has changed")
