"""What a trace reader must offer; a package brings its own by registering it under `READERS`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from cclsearch.trace.events import EventTable
from cclsearch.trace.readers.stream import ReadLimits


class Reader(Protocol):
    """Reads one file format."""

    format: str
    """The format's name, as in `EventTable.format`."""

    def claims(self, path: Path, head: bytes) -> bool:
        """Whether this reader is for the file, by its name and its first bytes (unpacked if it is gzip)."""
        ...

    def read(self, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
        """One table for each rank in the file (`rank` -1: the file does not say); raises TraceError with the reason."""
        ...
