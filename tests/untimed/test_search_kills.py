"""Searches in processes of their own: killed and resumed, and two on one run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from waiting import wait_until

from cclsearch.record.event import TrialFinished, TrialProposed
from cclsearch.record.ledger import LEDGER_FILE, read_events

SEARCH = ["run", "--workload", "wl2", "--launcher", "replay", "--name", "r"]


def start_search(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cclsearch", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_repeated_kills_lose_no_finished_trial_and_run_none_twice(project, signal_number):
    """Kill the search five times while it runs; every trial must finish once, and its result must not change."""
    ledger = project / "runs" / "r" / LEDGER_FILE
    process = start_search(project, *SEARCH, "--budget", "40", "--quiet")
    finished: dict[int, TrialFinished] = {}
    for moment in range(1, 6):
        wait_for_lines(ledger, len(finished) * 4 + 3 * moment, process)
        os.kill(process.pid, signal_number)
        process.wait(timeout=120)
        now = {e.trial: e for e in read_events(ledger) if isinstance(e, TrialFinished)}
        assert {trial: now.get(trial) for trial in finished} == finished
        finished = now
        process = start_search(project, "resume", "r", "--quiet")
    assert process.wait(timeout=300) == 0
    events = list(read_events(ledger))
    ended = [event.trial for event in events if isinstance(event, TrialFinished)]
    proposed = [event.config for event in events if isinstance(event, TrialProposed)]
    assert sorted(ended) == list(range(1, 41))
    assert len(set(proposed)) == 40


def wait_for_lines(ledger: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    def is_so() -> bool:
        return process.poll() is not None or (ledger.exists() and ledger.read_bytes().count(b"\n") >= count)

    wait_until(is_so, pause_s=0.01)


def test_a_second_search_on_the_same_run_folder_is_refused(project, cli):
    process = start_search(project, *SEARCH, "--budget", "60", "--quiet")
    try:
        ledger = project / "runs" / "r" / LEDGER_FILE
        wait_for_lines(ledger, 5, process)
        assert f"in use by process {process.pid}" in cli.err(["resume", "r"])
    finally:
        process.kill()
        process.wait(timeout=60)


LIVE = ("stepping clock, real jobs", "second PID namespace, real jobs")
INTERRUPTIONS = {"kill -9", "SIGTERM", "full disk", "read-only disk", "clock jumps", "lost file system"}


def test_searches_interrupted_at_random_lose_and_repeat_no_trial():
    amounts = ["--moments", "16", "--live-moments", "1", "--together", "3"]
    command = [sys.executable, str(ROOT / "benchmarks" / "reliability.py"), *amounts, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    together = figures.pop("together")
    live = {kind: figures.pop(kind) for kind in LIVE if kind in figures}
    assert len(live) in (0, len(LIVE)), "without gcc or PID namespaces, none"
    for kind, tally in live.items():
        defects = ("wrong", "lost", "run_twice", "rivals_admitted", "unreadable", "tracebacks", "left_running")
        assert {defect: tally[defect] for defect in defects} == dict.fromkeys(defects, 0), (kind, done.stderr[-3000:])
        assert tally["finished"] > 0
    assert set(figures) == INTERRUPTIONS
    for interruption, tally in figures.items():
        assert tally["moments"] == 2, interruption
        for defect in ("lost", "run_twice", "unreadable", "tracebacks"):
            assert tally[defect] == 0, (interruption, defect, tally, done.stderr[-3000:])
    assert together["ended"] == together["whole"] == together["searches"] == 3
    assert together["rivals_broken"] == together["trials_twice"] == 0
    assert together["trials"] == 100


def test_memory_of_a_trial_is_some_kib():
    """One entry and one observation a trial: 25,000 trials need 150 MB at the most."""
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--trials", "600", "--every", "300", "--traced"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    growth_kib = float(done.stdout.splitlines()[-1].split()[1])
    assert growth_kib < 6, done.stdout
