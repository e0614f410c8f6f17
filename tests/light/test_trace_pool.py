"""Traces of many ranks: reading them with several processes, which may die, hang or fail, and the columns in memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import trace_writer as write

from cclsearch.plugins import METRICS
from cclsearch.trace import pool, view
from cclsearch.trace.cache import cache_path
from cclsearch.trace.events import SPARSE_COLUMNS, Reason, TraceSet
from cclsearch.trace.find import TraceFile
from cclsearch.trace.merge import FileTables
from cclsearch.trace.read import read_traces
from cclsearch.trace.readers.job import ReadAnswer, ReadJob
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
    from cclsearch.trace import read

    original, waits = read._read_and_keep, []

    def wait(file: TraceFile, use_cache: bool, *, is_one_of_many: bool) -> FileTables:
        waits.append(file)
        end = time.monotonic() + 20
        while len(waits) == 1 and len(answered) < count and time.monotonic() < end:
            time.sleep(0.01)
        return original(file, use_cache, is_one_of_many=is_one_of_many)

    answered: list[object] = []
    ask = pool.ReaderProcess.read

    def read_and_count(self: pool.ReaderProcess, job: ReadJob) -> ReadAnswer | None:
        answer = ask(self, job)
        answered.append(answer)
        return answer

    monkeypatch.setattr(read, "_read_and_keep", wait)
    monkeypatch.setattr(pool.ReaderProcess, "read", read_and_count)


def same_tables(one: TraceSet, other: TraceSet) -> bool:
    return one.ranks == other.ranks and all(
        np.array_equal(one.tables[rank].ts_ns, other.tables[rank].ts_ns) for rank in one.ranks
    )


def test_another_process_reads_most_files_and_is_started_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = read_traces(folder, use_cache=False)
    slow_here(monkeypatch, RANKS - 1)
    started = []
    start = pool._start
    monkeypatch.setattr(pool, "_start", lambda: started.append(1) or start())
    together = read_traces(folder, workers=2, use_cache=False)
    assert together.status == "ok"
    assert same_tables(together, alone)
    assert len(started) == 1
    assert not list(folder.glob(".*columns"))


def test_columns_are_kept_next_to_the_traces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_here(monkeypatch, RANKS - 1)
    assert read_traces(folder, workers=3).status == "ok"
    assert all(cache_path(folder / f"rank{rank}.json").exists() for rank in range(RANKS))


@pytest.mark.parametrize(
    ("program", "timeout_s", "message"),
    [
        ("import os; input(); os.kill(os.getpid(), 9)", 60.0, "killed by signal 9"),
        ("import time; time.sleep(60)", 0.2, "longer than"),
        ("import time; input(); print('{}', flush=True); time.sleep(60)", 60.0, "killed by signal 9"),
    ],
)
def test_a_process_that_dies_or_hangs_is_a_status_of_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, timeout_s: float, message: str
) -> None:
    slow_here(monkeypatch, 2)
    monkeypatch.setattr(pool, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(pool, "FILE_TIMEOUT_S", timeout_s)
    monkeypatch.setattr(pool, "EXIT_TIMEOUT_S", 0.2 if "sleep" in program else 60.0)
    found = read_traces(folder, workers=2)
    refused = [report for report in found.files if report.status == "not_available"]
    assert found.status == "partial"
    assert len(refused) >= 2
    assert {(report.reason, message in report.message) for report in refused} == {(Reason.TOO_LARGE, True)}
    assert len(found.tables) == RANKS - len(refused)


def test_files_of_a_process_that_fails_are_read_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_here(monkeypatch, 2)
    monkeypatch.setattr(pool, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    found = read_traces(folder, workers=2)
    assert (found.status, len(found.tables)) == ("ok", RANKS)


def test_an_interrupt_ends_the_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    start = pool._start
    monkeypatch.setattr(pool, "_start", lambda: processes.append(start()) or processes[-1])
    monkeypatch.setattr(pool, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))

    def interrupt(file: TraceFile, use_cache: bool, *, is_one_of_many: bool) -> None:
        while not processes:
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr("cclsearch.trace.read._read_and_keep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read_traces(folder, workers=2)
    assert all(process.poll() is not None for process in processes)


def resident_ranks(trace: TraceView) -> int:
    """Return the number of ranks that hold arrays computed from their columns."""
    return sum(
        any(isinstance(value, np.ndarray) for value in one.__dict__.values())
        or any(name in trace.trace_set.tables[rank].__dict__ for name in SPARSE_COLUMNS)
        for rank, one in trace.ranks.items()
    )


@pytest.mark.parametrize("name", ["comm_wait_frac", "trace_quality", "queue_length", "critical_path"])
def test_one_rank_of_a_large_run_is_in_memory(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = METRICS.get(name)(TraceView(read_traces(folder)))
    monkeypatch.setattr(view, "MAX_RESIDENT_BYTES", 0)
    monkeypatch.setattr(view, "MIN_RELEASED_BYTES", 0)
    trace = TraceView(read_traces(folder))
    assert not trace.matching.is_empty
    assert resident_ranks(trace) <= 1
    assert METRICS.get(name)(trace) == wanted
    assert resident_ranks(trace) <= 1
