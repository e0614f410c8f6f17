"""Traces of many ranks: reading them with several processes, which may die, hang or fail, and the columns in memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trace_writer as write

from cclsearch.plugins import METRICS
from cclsearch.trace import read, view
from cclsearch.trace.events import SPARSE_COLUMNS, FileReport, Reason, TraceSet
from cclsearch.trace.files import pool
from cclsearch.trace.files.cache import cache_path
from cclsearch.trace.files.find import FileTables, TraceFile
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

RANKS = 6


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of traces that are large enough for processes."""
    monkeypatch.setattr("cclsearch.trace.read.BYTES_PER_PROCESS", 1)
    for rank in range(RANKS):
        document = write.kineto_document(write.gpu_events(), rank=rank, world=RANKS)
        write.write_kineto(tmp_path / f"rank{rank}.json", document)
    return tmp_path


def slow_here(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this process read only after the others answered for `count` files."""
    original, waits = read._read_and_keep, []

    def wait(file: TraceFile, use_cache: bool, *, is_one_of_many: bool) -> FileTables:
        waits.append(file)
        end = time.monotonic() + 60
        while len(waits) == 1 and len(answered) < count and time.monotonic() < end:
            time.sleep(0.01)
        return original(file, use_cache, is_one_of_many=is_one_of_many)

    answered: list[object] = []
    ask = pool.ReaderProcess.read

    def read_and_count(self: pool.ReaderProcess, *arguments: Any) -> tuple[FileReport, str]:
        answer = ask(self, *arguments)
        answered.append(answer)
        return answer

    monkeypatch.setattr(read, "_read_and_keep", wait)
    monkeypatch.setattr(pool.ReaderProcess, "read", read_and_count)


def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the processes that are started, which grows."""
    pids: list[int] = []
    start = pool.ReaderProcess.start

    def start_and_note(self: pool.ReaderProcess) -> bool:
        runs = start(self)
        if self._pid is not None and self._pid not in pids:
            pids.append(self._pid)
        return runs

    monkeypatch.setattr(pool.ReaderProcess, "start", start_and_note)
    return pids


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def die(file: TraceFile, targets: Sequence[str]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash(file: TraceFile, targets: Sequence[str]) -> None:
    os.abort()


def hang(file: TraceFile, targets: Sequence[str]) -> None:
    time.sleep(60)


def fail(file: TraceFile, targets: Sequence[str]) -> None:
    raise ValueError("a plugin's reader is wrong")


def exit_at_once() -> None:
    raise SystemExit(3)


def same_tables(one: TraceSet, other: TraceSet) -> bool:
    return one.ranks == other.ranks and all(
        np.array_equal(one.tables[rank].ts_ns, other.tables[rank].ts_ns) for rank in one.ranks
    )


def test_another_process_reads_most_files_and_is_started_once(folder, monkeypatch):
    alone = read_traces(folder, use_cache=False)
    slow_here(monkeypatch, RANKS - 1)
    started = starts(monkeypatch)
    together = read_traces(folder, workers=2, use_cache=False)
    assert together.status == "ok"
    assert same_tables(together, alone)
    assert len(started) == 1
    assert not is_running(started[0])
    assert not any(cache_path(folder / f"rank{rank}.json").exists() for rank in range(RANKS))


def test_other_processes_keep_columns_too(folder, monkeypatch):
    slow_here(monkeypatch, RANKS - 1)
    assert read_traces(folder, workers=3).status == "ok"
    assert all(cache_path(folder / f"rank{rank}.json").exists() for rank in range(RANKS))


@pytest.mark.parametrize(
    ("reading", "timeout_s", "message"), [(die, 60, "killed"), (crash, 60, "crashed"), (hang, 0.2, "longer than")]
)
def test_a_process_that_dies_or_hangs_is_a_status_of_its_files(folder, monkeypatch, reading, timeout_s, message):
    slow_here(monkeypatch, 2)
    monkeypatch.setattr(read, "read_and_save", reading)
    monkeypatch.setattr(pool, "FILE_TIMEOUT_S", timeout_s)
    started = starts(monkeypatch)
    found = read_traces(folder, workers=2)
    refused = [report for report in found.files if report.status == "not_available"]
    assert found.status == "partial"
    assert len(refused) >= 2
    assert {(report.reason, message in report.message) for report in refused} == {(Reason.TOO_LARGE, True)}
    assert len(found.tables) == RANKS - len(refused)
    assert not any(map(is_running, started))


@pytest.mark.parametrize(("where", "name", "broken"), [(read, "read_and_save", fail), (pool, "_silence", exit_at_once)])
def test_files_of_a_process_that_fails_are_read_here(folder, monkeypatch, where, name, broken):
    monkeypatch.setattr(where, name, broken)
    found = read_traces(folder, workers=2)
    assert (found.status, len(found.tables)) == ("ok", RANKS)


def test_an_interrupt_ends_the_processes(folder, monkeypatch):
    started = starts(monkeypatch)
    monkeypatch.setattr(read, "read_and_save", hang)

    def interrupt(file: TraceFile, use_cache: bool, *, is_one_of_many: bool) -> None:
        while not started:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(read, "_read_and_keep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read_traces(folder, workers=2)
    assert not any(map(is_running, started))


def resident_ranks(trace: TraceView) -> int:
    """Return the number of ranks that hold arrays computed from their columns."""
    return sum(
        any(isinstance(value, np.ndarray) for value in one.__dict__.values())
        or any(name in trace.trace_set.tables[rank].__dict__ for name in SPARSE_COLUMNS)
        for rank, one in trace.ranks.items()
    )


@pytest.mark.parametrize("name", ["comm_wait_frac", "trace_quality", "queue_length", "critical_path"])
def test_one_rank_of_a_large_run_is_in_memory(name, folder, monkeypatch):
    wanted = METRICS.get(name)(TraceView(read_traces(folder)))
    monkeypatch.setattr(view, "MAX_RESIDENT_BYTES", 0)
    monkeypatch.setattr(view, "MIN_RELEASED_BYTES", 0)
    trace = TraceView(read_traces(folder))
    assert not trace.matching.is_empty
    assert resident_ranks(trace) <= 1
    assert METRICS.get(name)(trace) == wanted
    assert resident_ranks(trace) <= 1
