"""A short, fixed version of `benchmarks/reliability.py` and `benchmarks/soak.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from paths import ROOT

LIVE = ("stepping clock, real jobs", "second PID namespace, real jobs")
INTERRUPTIONS = {"kill -9", "SIGTERM", "full disk", "read-only disk", "clock jumps", "lost file system"}


def test_searches_interrupted_at_random_lose_and_repeat_no_trial() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "reliability.py"),
        "--moments",
        "24",
        "--live-moments",
        "1",
        "--together",
        "4",
        "--json",
    ]
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
        assert tally["moments"] == 3, interruption
        for defect in ("lost", "run_twice", "unreadable", "tracebacks"):
            assert tally[defect] == 0, (interruption, defect, tally, done.stderr[-3000:])
    assert together["ended"] == together["whole"] == together["searches"] == 4
    assert together["rivals_broken"] == together["trials_twice"] == 0
    assert together["trials"] == 100


def test_memory_does_not_grow_over_many_trials() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--trials", "600", "--every", "300", "--traced"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    growth_kib = float(done.stdout.splitlines()[-1].split()[1])
    assert growth_kib < 0.7, done.stdout
