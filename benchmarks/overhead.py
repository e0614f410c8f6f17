"""Overhead of the engine: start-up, a replayed search, one trial, loading a long ledger.

    python benchmarks/overhead.py [--repeats 5]

Prints one line per figure: median and range over the repeats, and the goal. Of a start it prints the minimum: commands
are started in turn, so that the load of other processes falls on all.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cclsearch.core.values import Config, Provenance
from cclsearch.launch.base import Handle
from cclsearch.record.event import SearchStarted, TrialFinished, TrialProposed, TrialSubmitted, TrialSubmitting
from cclsearch.record.ledger import Ledger, fold_ledger
from cclsearch.scoring.outcome import Admission, Outcome, Verdict

STARTED = {
    "empty Python": ["-c", "pass"],
    "ccl-search --help": ["-m", "cclsearch", "--help"],
    "ccl-search --version": ["-m", "cclsearch", "--version"],
    "ccl-search completion bash": ["-m", "cclsearch", "completion", "bash"],
    "TAB: a card": ["-m", "cclsearch", "completion", "--words", "run", "-w", "wl"],
    "TAB: a run": ["-m", "cclsearch", "completion", "--words", "show", ""],
    "import argparse, yaml": ["-c", "import argparse, yaml"],
    "import cclsearch": ["-c", "import cclsearch"],
}
"""What is started -> arguments of the interpreter."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print_starts(repeats)
    with tempfile.TemporaryDirectory() as scratch:
        search = ["run", "--workload", "wl2", "--launcher", "replay", "--quiet", "--runs", scratch]
        report(
            "15-trial replay search", fifteen := measure(lambda: run(*search, "--budget", "15"), repeats), "goal 3 s"
        )
        one = measure(lambda: run(*search, "--budget", "1"), repeats)
        per_trial = (statistics.median(fifteen) - statistics.median(one)) / 14
        print(f"{'engine time per trial ((t_15 - t_1) / 14)':<42} {per_trial * 1e3:8.1f} ms    goal 20 ms")
        ledger = Path(scratch) / "long.jsonl"
        count = write_long_ledger(ledger)
        loaded = measure(lambda: fold_ledger(ledger), repeats)
        report(f"ledger of {count:,} events loaded", loaded, "goal 1 s")


def print_starts(repeats: int) -> None:
    """Print the fastest of several starts of each command, beside an empty Python."""
    fastest = {name: min(seconds) for name, seconds in start_in_turn(repeats).items()}
    for name, seconds in fastest.items():
        print(f"{name:<42} {seconds:8.3f} s  ({1e3 * (seconds - fastest['empty Python']):+.1f} ms)")


def start_in_turn(repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each start, after one round that warms the caches."""
    seconds: dict[str, list[float]] = {name: [] for name in STARTED}
    for number in range(repeats + 1):
        for name, arguments in STARTED.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "cclsearch", *arguments], check=True, stdout=subprocess.DEVNULL)


def measure(action: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each repeat, after one that warms the caches."""
    action()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def report(label: str, seconds: list[float], goal: str) -> None:
    median = statistics.median(seconds)
    print(f"{label:<42} {median:8.3f} s  ({min(seconds):.3f} to {max(seconds):.3f})    {goal}")


def write_long_ledger(path: Path, trials: int = 25_000) -> int:
    """Write a ledger with 4 events per trial and return their number; fsync is off, since only loading is measured."""
    import os

    sync, os.fsync = os.fsync, lambda fd: None
    ledger = Ledger(path)
    ledger.append(SearchStarted(time_s=0, run_id="long", engine_version="0", spec_sha256="0"))
    verdicts = tuple(Verdict(rule=f"rule{n}", ok=True, detail="as it should be") for n in range(8))
    for n in range(1, trials + 1):
        config = Config(tp=2, dp=n, pp=1, micro_batch_size=1)
        handle = Handle(launcher="local", job_name=f"j{n}", job_id=str(n), trial_dir=Path("trials"))
        outcome = Outcome(
            provenance=Provenance.MEASURED,
            admission=Admission(admitted=True, verdicts=verdicts),
            loss=1.0 + n,
            metrics={"step_time_s": 1.0 + n, "tokens_per_s": 1.0, "mfu": 0.4, "peak_memory_gib": 10.0},
        )
        ledger.append(TrialProposed(time_s=n, trial=n, config=config, proposer="default", rationale="because"))
        ledger.append(TrialSubmitting(time_s=n, trial=n, attempt=1))
        ledger.append(TrialSubmitted(time_s=n, trial=n, attempt=1, handle=handle))
        ledger.append(TrialFinished(time_s=n, trial=n, attempt=1, outcome=outcome))
    ledger.close()
    os.fsync = sync
    return 4 * trials + 1


if __name__ == "__main__":
    main()
