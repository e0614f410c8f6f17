"""Reads the traces of one run, in any format: a file, a folder, or a trial's folder with its configuration."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.trace.events import EventTable, FileReport, FileStatus, Reason, Status, TraceSet
from cclsearch.trace.files.cache import cache_path, load_tables, save_tables
from cclsearch.trace.files.find import FileTables, TraceFile, find_traces, merge_tables
from cclsearch.trace.files.run_log import TRACE_FOLDER, read_run_log
from cclsearch.trace.readers.base import READERS
from cclsearch.trace.readers.stream import ReadLimits, TraceError
from cclsearch.trace.view import TraceView

if TYPE_CHECKING:
    from cclsearch.card.model import Card

# The start of a process takes 0.35 s of CPU time; C reads 0.4 to 0.8 GB/s.
BYTES_PER_PROCESS = 256 << 20
"""Bytes of plain JSON that repay a process."""
BYTES_FOR_THREADS = 64 << 20
"""Plain JSON that repays the threads of one file."""


def read_traces(path: Path | str, *, workers: int = 1, use_cache: bool = True) -> TraceSet:
    """Return the tables of every rank found at `path` (one file, or a folder of files).

    The content of a file never raises: status and reasons name the faults. `workers` processes share the files, or as
    many threads scan each large file; the tables do not depend on it. Columns come from the user's cache if
    size and modification time of the trace are unchanged.
    """
    path = Path(path)
    files = find_traces(path)
    if not files:
        message = f"no trace files under {one_line(str(path))!r}"
        return TraceSet({}, Status.NOT_AVAILABLE, (Reason.NO_TRACE_FILES,), message, folder=path)
    cached = {file: load_tables(cache_path(file.path), file.path) if use_cache else None for file in files}
    todo = [file for file in files if not cached[file]]
    by_file = _read_all(todo, workers, use_cache)
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


def _read_and_keep(file: TraceFile, use_cache: bool, *, is_one_of_many: bool, threads: int = 1) -> FileTables:
    """Read the file and save its columns; of many files they are then mapped, so that all fit into memory."""
    tables, report = read_file(file, limits=ReadLimits(threads=threads))
    target = cache_path(file.path)
    if tables and use_cache and save_tables(target, file.path, tables) and is_one_of_many:
        tables = load_tables(target, file.path) or tables
    return tables, report


def read_and_save(file: TraceFile, targets: Sequence[str]) -> tuple[FileReport, str]:
    """Read the file and save its columns at the first target that can be written; return the report and that target."""
    tables, report = read_file(file)
    saved = (target for target in targets if tables and save_tables(Path(target), file.path, tables))
    return report, next(saved, "")


def _read_all(files: Sequence[TraceFile], workers: int, use_cache: bool) -> dict[TraceFile, FileTables]:
    """Return tables and report of each file; several processes share them if they repay their start."""
    sizes = {file: _expected_bytes(file) for file in files}
    files = sorted(files, key=lambda file: -sizes[file])  # the largest first, so that the processes end together
    processes = min(workers, len(files), sum(sizes.values()) // BYTES_PER_PROCESS)
    if processes < 2:
        threads = {file: workers if sizes[file] >= BYTES_FOR_THREADS else 1 for file in files}
        is_one_of_many = len(files) > 1
        return {f: _read_and_keep(f, use_cache, is_one_of_many=is_one_of_many, threads=threads[f]) for f in files}
    from cclsearch.trace.files.pool import read_in_processes

    with tempfile.TemporaryDirectory(prefix="ccl-columns-") as scratch:
        places = {file: str(Path(scratch) / f"{number}.ccl-columns") for number, file in enumerate(files)}
        return read_in_processes(
            files,
            processes,
            targets_of=lambda file: [*([str(cache_path(file.path))] if use_cache else []), places[file]],
            read_there=read_and_save,
            read_here=lambda file: _read_and_keep(file, use_cache, is_one_of_many=True),
        )


def _expected_bytes(file: TraceFile) -> int:
    """Return the size of plain JSON that takes about as long to read: packed traces are ten times smaller."""
    is_plain = file.reader == "chrome-json" and file.path.suffix != ".gz"
    try:
        return file.path.stat().st_size * (1 if is_plain else 10)
    except OSError:
        return 0


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


CONFIG_FILE = "config.json"
RUN_FILE = "search.yaml"
"""A folder with this file is a run folder, whose trials have traces of their own."""


def open_trace(
    path: Path,
    *,
    card: Card | None = None,
    config: Config | None = None,
    baseline: TraceView | None = None,
    workers: int = 1,
) -> TraceView:
    """Return the view of the traces at `path`; a trial's folder provides the configuration unless one is passed.

    Raises UserError if the path does not exist or may not be read. The content of the files never raises: the trace set
    names the faults.
    """
    if not os.path.exists(path):
        raise UserError(f"{str(path)!r} does not exist: give a trace file, a folder of traces or a trial's folder")
    if os.path.isfile(path / RUN_FILE):
        raise UserError(
            f"{str(path)!r} is a run folder: give one of its trials, for example {path / 'trials' / '0001'}"
        )
    try:
        with os.scandir(path) if os.path.isdir(path) else path.open("rb"):
            pass
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    folder = path / TRACE_FOLDER if os.path.isdir(path / TRACE_FOLDER) else path
    config_file = path / CONFIG_FILE
    if config is None and folder != path and os.path.isfile(config_file):
        config = read_config(config_file)
    return TraceView(read_traces(folder, workers=workers), card=card, config=config, baseline=baseline, workers=workers)


def read_config(path: Path) -> Config:
    """Return the knobs of a `config.json`: a trial's input (its `config` field) or a plain object of knobs."""
    if not os.path.isfile(path):
        raise UserError(f"the configuration file {str(path)!r} does not exist")
    try:
        data = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({one_line(str(error))})") from error
    knobs = data.get("config", data) if isinstance(data, dict) else None
    if not isinstance(knobs, dict) or not all(isinstance(v, bool | int | float | str) for v in knobs.values()):
        raise UserError(f"{path}: must be a JSON object that maps knobs to plain values")
    return Config(knobs)
