"""The protocol of a trace reader. A package adds a format by registering a reader under `READERS`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from cclsearch.core.registry import Registry
from cclsearch.trace.events import EventTable
from cclsearch.trace.readers.stream import ReadLimits


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
        "cclsearch.trace.readers.builtin",
    ),
    needs=("format", "claims", "read"),
)
"""name -> reader of one trace format."""
