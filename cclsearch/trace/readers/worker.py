"""Reads one trace file in a separate process: `python -m cclsearch.trace.readers.worker READER TRACE TARGET`.

Saves the columns at TARGET and prints one line of JSON: the report of `cclsearch.trace.read.read_file`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec


def main(arguments: list[str]) -> int:
    """Read, save and report; the exit code is 0 also for a trace that cannot be read (see the report)."""
    from cclsearch.trace.cache import save_tables
    from cclsearch.trace.find import TraceFile
    from cclsearch.trace.read import read_file

    reader, trace, target = arguments
    path = Path(trace)
    tables, report = read_file(TraceFile(path, path.name, reader, ""))
    if tables and not save_tables(Path(target), path, tables):
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
