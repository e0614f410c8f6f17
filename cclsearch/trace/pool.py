"""Reads trace files in several processes, each of which is started once and reads one file after another."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from cclsearch.trace.cache import load_tables
from cclsearch.trace.events import FileReport, Reason
from cclsearch.trace.find import TraceFile
from cclsearch.trace.merge import FileTables
from cclsearch.trace.readers.job import ReadAnswer, ReadJob
from cclsearch.trace.status import FileStatus

COMMAND = (sys.executable, "-P", "-m", "cclsearch.trace.readers.worker")
FILE_TIMEOUT_S = 3600.0
EXIT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20


class ReaderProcess:
    """One process that reads files; it starts with the first file, and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def read(self, job: ReadJob) -> ReadAnswer | None:
        """Return its answer; a report `not_available` if it was killed or took too long; None if it failed."""
        try:
            if self._process is None and not self._closed:
                self._process = _start()
            if self._process is None:
                raise EOFError
            return msgspec.json.decode(_exchange(self._process, msgspec.json.encode(job) + b"\n"), type=ReadAnswer)
        except TimeoutError:
            message = f"reading it took longer than {FILE_TIMEOUT_S:.0f} s"
            self._end(0.0)
        except (OSError, EOFError, msgspec.MsgspecError):
            code = self._end(EXIT_TIMEOUT_S)
            if code >= 0:
                return None
            message = f"the process that read it was killed by signal {-code}"
        return ReadAnswer(FileReport(job.trace, FileStatus.NOT_AVAILABLE, Reason.TOO_LARGE, message))

    def close(self) -> None:
        """Kill the process, also while another thread waits for its answer; it is not started again."""
        self._closed = True
        self._end(0.0)

    def _end(self, timeout_s: float) -> int:
        """Return the exit code of the process (negative for a signal), after killing it if it does not end itself."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        process.kill()
        return process.wait()


def _start() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)


def _exchange(process: subprocess.Popen[bytes], question: bytes) -> bytes:
    """Return the line that answers the question; raises TimeoutError, EOFError or OSError."""
    if process.stdin is None or process.stdout is None:
        raise EOFError
    process.stdin.write(question)
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    end, answer = time.monotonic() + FILE_TIMEOUT_S, b""
    while not answer.endswith(b"\n"):
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError
        piece = process.stdout.read(1 << 16)
        if not piece or len(answer) > MAX_ANSWER_BYTES:
            raise EOFError
        answer += piece
    return answer


def read_in_processes(
    files: Sequence[TraceFile],
    workers: int,
    *,
    targets_of: Callable[[TraceFile], list[str]],
    read_here: Callable[[TraceFile], FileTables],
) -> dict[TraceFile, FileTables]:
    """Return tables and report of each file, read in this order by this process and `workers - 1` others.

    `targets_of`: where another process may save the columns of a file; `read_here` reads in this process, also the
    files whose columns could not be saved.
    """
    waiting = deque(files)
    results: dict[TraceFile, FileTables] = {}
    processes = [ReaderProcess() for _ in range(workers - 1)]

    def serve(process: ReaderProcess) -> None:
        while (file := _next(waiting)) is not None:
            answer = process.read(ReadJob(file.reader, str(file.path), targets_of(file)))
            if answer is None:
                continue
            report = replace(answer.report, path=file.relative)
            tables = load_tables(Path(answer.target), file.path) if answer.target else None
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
