"""Searches over quick trials that are killed at random moments, and a count of what was lost or repeated."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.trust import confirm

QUICK = Path(__file__).parent / "quick"
COMMAND = [sys.executable, "-m", "cclsearch"]


@dataclass(frozen=True)
class KillTally:
    """Counts of a killed and resumed search."""

    kills: int
    finished: int
    finished_twice: list[int]
    launches: Counter[str]
    """Attempt folder -> jobs that were submitted for it."""
    lost: list[int]
    """Trials that were run again although they had finished."""
    alive: list[str]
    """Unfinished jobs of the run in the queue."""

    @property
    def doubled(self) -> list[str]:
        return sorted(folder for folder, count in self.launches.items() if count > 1)


def start(*arguments: str, runs: Path) -> subprocess.Popen[bytes]:
    """Start the command line in its own process, with its output in a log next to the runs folder."""
    confirm(QUICK)
    environment = {**os.environ, "CCL_SEARCH_PATH": str(QUICK)}
    with (runs.parent / "search.log").open("ab") as log:
        return subprocess.Popen(
            [*COMMAND, *arguments, "--runs", str(runs)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=runs.parent,
        )


def kill_and_resume(
    runs: Path, *, kills: int, budget: int, parallel: int, seed: int, ask: Callable[..., str], longest_s: float = 4.0
) -> KillTally:
    """Run a search of `budget` trials, kill it with SIGKILL at that many random moments, then let it finish."""
    chance = random.Random(seed)
    first = ["run", "-w", "tiny", "-b", str(budget), "-l", "quick", "--sampler", "random", "--name", "killed"]
    first.append("--keep-going")  # no trial of these is admitted
    again = ["resume", "killed", "--keep-going"]
    done = 0
    while done < kills:
        is_new = not (runs / "killed" / "search.yaml").exists()
        process = start(*([*first, "--parallel", str(parallel)] if is_new else again), runs=runs)
        try:
            process.wait(timeout=chance.uniform(0.3, longest_s))
            if not is_new:
                break  # it ended before the kill
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            done += 1
    if process.returncode == -signal.SIGKILL:
        exists = (runs / "killed" / "search.yaml").exists()
        process = start(*(again if exists else [*first, "--parallel", str(parallel)]), runs=runs)
    code = process.wait(timeout=400)
    # simulated trials are never admitted, so a successful search exits with 1: it has no best configuration
    assert code == 1, (runs.parent / "search.log").read_text()[-2000:]
    return count_outcomes(runs / "killed", done, ask)


def count_outcomes(run: Path, kills: int, ask: Callable[..., str]) -> KillTally:
    """Compare the ledger with Slurm's jobs of the run, found by their working directory."""
    events = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines() if line.strip()]
    finished = Counter(int(event["trial"]) for event in events if event.get("event") == "trial_finished")
    launches: Counter[str] = Counter()
    wait_until_idle(ask)  # a result is written a moment before its job ends
    rows = ask("squeue", "--states=all", "--array", "--noheader", "--format=%i|%T|%Z").splitlines()
    alive = []
    for job, state, folder in (row.split("|", 2) for row in rows):
        jobs = Path(folder) / "jobs.json"
        if not jobs.is_file() or not jobs.is_relative_to(run):
            continue
        if state in {"PENDING", "RUNNING", "CONFIGURING", "SUSPENDED"}:
            alive.append(job)
        specs = json.loads(jobs.read_text())["jobs"]
        index = job.partition("_")[2]
        for spec in [specs[int(index)]] if index else specs:
            launches[str(Path(spec).parent)] += 1
    lost = [
        trial
        for trial in finished
        if len(list((run / "trials" / f"{trial:04d}").glob("attempts/*/slurm-a*"))) > 1
        and not _was_retried(events, trial)
    ]
    twice = sorted(trial for trial, count in finished.items() if count > 1)
    return KillTally(kills, len(finished), twice, launches, lost, alive)


def _was_retried(events: list[dict[str, object]], trial: int) -> bool:
    return any(event.get("event") == "trial_retried" and event["trial"] == trial for event in events)


def wait_until_idle(ask: Callable[..., str], limit_s: float = 60.0) -> None:
    """Wait until the queue is empty."""
    deadline = time.monotonic() + limit_s
    while ask("squeue", "--noheader").strip() and time.monotonic() < deadline:
        time.sleep(0.3)
