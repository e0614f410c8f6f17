"""Reads the traces of one run, in any format, into a `TraceSet`."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cclsearch.core.text import one_line
from cclsearch.plugins import READERS
from cclsearch.trace.cache import cache_path, load_tables, save_tables
from cclsearch.trace.events import EventTable, FileReport, Reason, TraceSet
from cclsearch.trace.find import TraceFile, find_traces
from cclsearch.trace.merge import FileTables, merge_tables
from cclsearch.trace.readers.stream import ReadLimits, TraceError
from cclsearch.trace.run_log import read_run_log
from cclsearch.trace.status import FileStatus, Status

WORKER_TIMEOUT_S = 3600.0
MIN_BYTES_FOR_PROCESS = 4 << 20
"""Reading a smaller file takes less time than starting a process."""


def read_traces(path: Path | str, *, workers: int = 1, use_cache: bool = True) -> TraceSet:
    """Return the tables of every rank found at `path` (one file, or a folder of files).

    The content of a file never raises: status and reasons say what is wrong. `workers` processes share the files.
    Columns come from the cache next to the trace if size and modification time of the trace are unchanged.
    """
    path = Path(path)
    files = find_traces(path)
    if not files:
        message = f"no trace files under {one_line(str(path))!r}"
        return TraceSet({}, Status.NOT_AVAILABLE, (Reason.NO_TRACE_FILES,), message, folder=path)
    cached = {file: load_tables(cache_path(file.path), file.path) if use_cache else None for file in files}
    todo = [file for file in files if not cached[file]]
    large = [file for file in todo if file.path.stat().st_size >= MIN_BYTES_FOR_PROCESS] if workers > 1 else []
    by_file = dict(zip(large, _read_in_processes(large, workers, use_cache), strict=True)) if len(large) > 1 else {}
    by_file.update({file: _read_and_keep(file, use_cache) for file in todo if file not in by_file})
    results = []
    for file in files:
        tables, report = by_file[file] if file in by_file else (cached[file] or (), None)
        named = tuple(replace(table, source=file.relative) for table in tables)
        results.append((named, report or _report(file, named)))
    return replace(merge_tables(files, results, folder=path), run_log=read_run_log(path))


def read_file(file: TraceFile, *, limits: ReadLimits | None = None) -> FileTables:
    """Parse one file: its tables and a report of how that went. The content of the file never raises."""
    try:
        with _garbage_collector_off():
            tables: tuple[EventTable, ...] = READERS.get(file.reader)().read(file.path, limits or ReadLimits())
    except TraceError as error:
        return (), FileReport(file.relative, FileStatus.NOT_AVAILABLE, error.reason, one_line(error.message))
    except OSError as error:
        message = one_line(error.strerror or type(error).__name__)
        return (), FileReport(file.relative, FileStatus.NOT_AVAILABLE, Reason.UNREADABLE, message)
    except MemoryError:
        return (), FileReport(file.relative, FileStatus.NOT_AVAILABLE, Reason.TOO_LARGE, "not enough memory to read it")
    if not tables:
        return (), FileReport(file.relative, FileStatus.NOT_AVAILABLE, Reason.UNREADABLE, "contains no events")
    return tables, _report(file, tables)


def _report(file: TraceFile, tables: Sequence[EventTable]) -> FileReport:
    worst = next((table for table in tables if table.status != FileStatus.COMPLETE), tables[0])
    reason = worst.reasons[0] if worst.reasons else None
    return FileReport(file.relative, worst.status, reason, rank=tables[0].rank if len(tables) == 1 else None)


def _read_and_keep(file: TraceFile, use_cache: bool) -> FileTables:
    tables, report = read_file(file)
    if tables and use_cache:
        save_tables(cache_path(file.path), file.path, tables)
    return tables, report


def _read_in_processes(files: Sequence[TraceFile], workers: int, use_cache: bool) -> list[FileTables]:
    with tempfile.TemporaryDirectory(prefix="ccl-columns-") as scratch:

        def read_one(number: int) -> FileTables:
            return _read_in_process(files[number], Path(scratch) / f"{number}.ccl-columns", use_cache)

        with ThreadPoolExecutor(max_workers=min(workers, len(files))) as pool:
            return list(pool.map(read_one, range(len(files))))


def _read_in_process(file: TraceFile, scratch: Path, use_cache: bool) -> FileTables:
    """Read the file in a separate process, and map the columns that it saved."""
    import msgspec

    kept = cache_path(file.path)
    for target in (kept, scratch) if use_cache else (scratch,):
        command = [sys.executable, "-m", "cclsearch.trace.readers.worker", file.reader, str(file.path), str(target)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=WORKER_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            message = f"reading it took longer than {WORKER_TIMEOUT_S:.0f} s"
            return (), FileReport(file.relative, FileStatus.NOT_AVAILABLE, Reason.TOO_LARGE, message)
        except OSError:
            break
        if done.returncode == 0:
            report = replace(msgspec.json.decode(done.stdout, type=FileReport), path=file.relative)
            tables = load_tables(target, file.path) if report.status != FileStatus.NOT_AVAILABLE else ()
            if tables is not None:
                return tables, report
        elif done.returncode < 0:
            message = f"the process that read it was killed by signal {-done.returncode}"
            return (), FileReport(file.relative, FileStatus.NOT_AVAILABLE, Reason.TOO_LARGE, message)
    return _read_and_keep(file, use_cache=False)


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """Parsing makes millions of short-lived events: the collector would scan them repeatedly and free nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
