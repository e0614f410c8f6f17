"""Reads trace files in several processes, each of which reads one file after another."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from cclsearch.trace.events import FileReport, FileStatus, Reason
from cclsearch.trace.files.cache import load_tables
from cclsearch.trace.files.find import FileTables, TraceFile

FILE_TIMEOUT_S = 3600.0

ReadThere = Callable[[TraceFile, Sequence[str]], tuple[FileReport, str]]
"""Reads a file in another process: returns the report, and where the columns were saved ("": nowhere)."""


class ReaderProcess:
    """One process that reads files: an executor of its own, so that a crash belongs to one file."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        self._pid: int | None = None
        self._closed = False

    def start(self) -> bool:
        """Start the process if it does not run; return whether it runs."""
        if self._executor is None and not self._closed:
            self._executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_silence)
            try:
                self._pid = self._executor.submit(os.getpid).result()
            except (OSError, RuntimeError):  # it ended before its first answer, or was closed
                self._executor = None
        return self._executor is not None

    def read(self, file: TraceFile, targets: Sequence[str], read_there: ReadThere) -> tuple[FileReport, str]:
        """Return what `read_there` returns; a report `not_available` if the process dies or takes too long."""
        assert self._executor is not None
        try:
            return self._executor.submit(read_there, file, targets).result(FILE_TIMEOUT_S)
        except TimeoutError:
            message = f"reading it took longer than {FILE_TIMEOUT_S:.0f} s"
            self.end()
        except BrokenExecutor:
            message = "the process that read it was killed, or crashed"
            self._executor = None
        return FileReport(file.relative, FileStatus.NOT_AVAILABLE, Reason.TOO_LARGE, message), ""

    def end(self) -> None:
        """Kill the process, also while another thread waits for its answer."""
        executor, pid, self._executor, self._pid = self._executor, self._pid, None, None
        if executor is not None:
            if pid is not None:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            executor.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Kill the process; it is not started again."""
        self._closed = True
        self.end()


def _silence() -> None:
    """Let nothing that the process prints, such as a plugin's reader, reach the command's output."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def read_in_processes(
    files: Sequence[TraceFile],
    workers: int,
    *,
    targets_of: Callable[[TraceFile], list[str]],
    read_there: ReadThere,
    read_here: Callable[[TraceFile], FileTables],
) -> dict[TraceFile, FileTables]:
    """Return tables and report of each file, read in this order by this process and `workers - 1` others.

    `targets_of`: where another process may save the columns of a file. `read_there` reads it there; `read_here` reads
    in this process, also the files whose columns could not be saved.
    """
    waiting = deque(files)
    results: dict[TraceFile, FileTables] = {}
    processes = [ReaderProcess() for _ in range(workers - 1)]

    def serve(process: ReaderProcess) -> None:
        while process.start() and (file := _next(waiting)) is not None:
            try:
                report, target = process.read(file, targets_of(file), read_there)
            except Exception:  # of a plugin's reader: it raises again when this process reads the file
                continue
            tables = load_tables(Path(target), file.path) if target else None
            if report.status == FileStatus.NOT_AVAILABLE or tables:
                results[file] = (tables or (), report)

    threads = [threading.Thread(target=serve, args=(process,), daemon=True) for process in processes]
    try:
        for thread in threads:
            thread.start()
        while (file := _next(waiting)) is not None:
            results[file] = read_here(file)
        for thread in threads:
            thread.join()
    finally:
        waiting.clear()
        for process in processes:
            process.close()
    return {file: results[file] if file in results else read_here(file) for file in files}


def _next(waiting: deque[TraceFile]) -> TraceFile | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None
