"""The protocol of a trace reader, and the built-in ones: the files that each claims, and what reads them.

The module that reads a file is imported with the first one. The name of a file shows its format; if it does not, its
first bytes do. A package adds a format by registering a reader under `READERS`.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from cclsearch.core.registry import Registry
from cclsearch.trace.events import EventTable, Reason
from cclsearch.trace.readers.stream import ReadLimits, TraceError
from cclsearch.trace.rules import read_table


class Reader(Protocol):
    """Reads one file format."""

    format: str
    """The format's name, as in `EventTable.format`."""

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether this reader handles the file, by its name and its first bytes (unpacked if gzip)."""
        ...

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """Return one table per rank in the file (`rank` -1: unknown); raises TraceError with the reason."""
        ...


READERS: Registry[type[Reader]] = Registry(
    "trace reader",
    dict.fromkeys(
        ("chakra-et", "chrome-json", "nsys-sqlite", "pytorch-et", "rocprofiler-json", "unsupported", "xspace"),
        "cclsearch.trace.readers.base",
    ),
    needs=("format", "claims", "read"),
)
"""name -> reader of one trace format."""


def find_unsupported(name: str) -> str | None:
    """Return what a file with this name is, by `rules/unsupported.yaml`; None if it is not there."""
    table = read_table("unsupported.yaml")
    return next((message for pattern, message in table.items() if re.search(pattern, name, re.IGNORECASE)), None)


OWN_TIMELINE = b'"otherData":{"writer":"ccl-search timeline"}'
"""Text in the head of the JSON that `score --perfetto` writes: files with it are not traces."""
_BOM = b"\xef\xbb\xbf"
_JSON_NAME = re.compile(r"\.(json|trace)(\.gz)?$", re.IGNORECASE)
_TRACE_NAME = re.compile(r"trace|rank[-_]?\d|kineto|profil|worker\d", re.IGNORECASE)
_EVENTS = re.compile(rb'"traceEvents"|^\s*\[\s*\{[^}]{0,2000}"ph"')
_EXECUTION_TRACE = re.compile(rb'\s*\{[^\[\]]{0,500}"schema"\s*:\s*"\d[^"]*"[^\[\]]{0,500}"nodes"\s*:\s*\[')


class BuiltIn:
    """A reader by two patterns and the function `module:name` that reads a file."""

    format: ClassVar[str]
    names: ClassVar[re.Pattern[str]]
    head: ClassVar[re.Pattern[bytes]] = re.compile(b"")
    """Pattern of the first 4 KiB; the default matches everything."""
    reader: ClassVar[str]

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether name and first bytes fit the format."""
        return bool(self.names.search(path.name) and self.head.match(head[:4096].removeprefix(_BOM)))

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """Return one table per rank or device in the file; raises TraceError with the reason."""
        module, _, name = self.reader.partition(":")
        read: Any = getattr(import_module(f"cclsearch.trace.readers.{module}"), name)
        tables: tuple[EventTable, ...] = read(path, limits)
        return tables


@READERS.register("chrome-json")
class ChromeJson(BuiltIn):
    """Reads Kineto's and XLA's JSON."""

    format = "kineto"
    reader = "kineto.read:read_chrome_json"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether it is JSON with a list of events near its beginning, or has the name of a trace."""
        if not _JSON_NAME.search(path.name) or OWN_TIMELINE in head[:4096]:
            return False
        is_json = head.removeprefix(_BOM).lstrip().startswith((b"{", b"["))
        return bool(_EVENTS.search(head)) or (not is_json and bool(_TRACE_NAME.search(path.name)))


@READERS.register("xspace")
class XSpace(BuiltIn):
    """Reads XLA's XSpace, which has no magic bytes."""

    format = "xla"
    names = re.compile(r"\.xplane\.pb(\.gz)?$", re.IGNORECASE)
    reader = "xla.read:read_xspace_tables"


@READERS.register("nsys-sqlite")
class NsysSqlite(BuiltIn):
    """Reads the SQLite file that `nsys export --type sqlite` writes."""

    format = "nsys"
    names = re.compile(r"\.(sqlite3?|nsys-rep|qdrep)$", re.IGNORECASE)
    reader = "nsys:read_nsys"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether it is SQLite by name (an empty or damaged file too), or a `.db` file with SQLite's magic bytes."""
        return super().claims(path, head) or (path.suffix.lower() == ".db" and head.startswith(b"SQLite format 3\0"))


@READERS.register("rocprofiler-json")
class RocprofilerJson(BuiltIn):
    """Reads the JSON that `rocprofv3 --output-format json` writes: its first key is rocprofiler-sdk's."""

    format = "rocprof"
    names = _JSON_NAME
    head = re.compile(rb'\s*\{\s*"rocprofiler-sdk-tool"')
    reader = "rocprof:read_rocprof"


@READERS.register("pytorch-et")
class PytorchExecutionTrace(BuiltIn):
    """Reads the execution traces of PyTorch's `ExecutionTraceObserver`: JSON with a schema and a list of nodes."""

    format = "pytorch-et"
    names = _JSON_NAME
    head = _EXECUTION_TRACE
    reader = "pytorch_execution.trace:read_execution_trace"


@READERS.register("chakra-et")
class ChakraTraces(BuiltIn):
    """Reads Chakra execution traces, which have no magic bytes."""

    format = "chakra"
    names = re.compile(r"\.et(\.gz)?$", re.IGNORECASE)
    reader = "chakra:read_chakra"


@READERS.register("unsupported")
class Unsupported(BuiltIn):
    """Refuses the formats of the table. Its files are left out if a folder has others that can be read."""

    format = "unsupported"

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether the file is of a format in the table."""
        return find_unsupported(path.name) is not None

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """Raise TraceError with the remedy."""
        raise TraceError(Reason.FORMAT_UNSUPPORTED, find_unsupported(path.name) or "the file has changed")
