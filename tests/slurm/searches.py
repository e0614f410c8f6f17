"""Searches over quick trials that are killed at random moments, and the books they must balance afterwards."""

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

QUICK = Path(__file__).parent / "quick"
COMMAND = [sys.executable, "-m", "cclsearch"]


@dataclass(frozen=True)
class Books:
    """What a killed and resumed search left."""

    kills: int
    finished: int
    finished_twice: list[int]
    launches: Counter[str]
    """Attempt folder -> jobs that Slurm got for it."""
    lost: list[int]
    """Trials that had finished once, and were run again all the same."""
    alive: list[str]
    """Jobs of the run that the queue still lists."""

    @property
    def doubled(self) -> list[str]:
        return sorted(folder for folder, count in self.launches.items() if count > 1)


def start(*arguments: str, runs: Path) -> subprocess.Popen[bytes]:
    """The command line as a process of its own, its output in a log beside the runs."""
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
) -> Books:
    """A search of `budget` trials, killed with SIGKILL at that many random moments, then left to end."""
    chance = random.Random(seed)
    first = ["run", "-w", "tiny", "-b", str(budget), "-l", "quick", "--strategy", "random", "--name", "killed"]
    again = ["resume", "killed"]
    done = 0
    while done < kills:
        is_new = not (runs / "killed" / "search.yaml").exists()
        process = start(*([*first, "--parallel", str(parallel)] if is_new else again), runs=runs)
        try:
            process.wait(timeout=chance.uniform(0.3, longest_s))
            if not is_new:
                break  # it ended before the moment came
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            done += 1
    if process.returncode == -signal.SIGKILL:
        begun = (runs / "killed" / "search.yaml").exists()
        process = start(*(again if begun else [*first, "--parallel", str(parallel)]), runs=runs)
    code = process.wait(timeout=400)
    # simulated trials are never admitted, so a search that ended well ends with 1: it has no best configuration
    assert code == 1, (runs.parent / "search.log").read_text()[-2000:]
    return read_books(runs / "killed", done, ask)


def read_books(run: Path, kills: int, ask: Callable[..., str]) -> Books:
    """The ledger against what Slurm was given: every job of the run by its working directory."""
    events = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines() if line.strip()]
    finished = Counter(int(event["trial"]) for event in events if event.get("event") == "trial_finished")
    launches: Counter[str] = Counter()
    wait_until_idle(ask)  # a result is there a moment before its job has ended
    rows = ask("squeue", "--states=all", "--array", "--noheader", "--format=%i|%T|%Z").splitlines()
    alive = []
    for job, state, folder in (row.split("|", 2) for row in rows):
        jobs = Path(folder) / "jobs.json"
        if not jobs.is_file() or not jobs.is_relative_to(run):
            continue
        if state in {"PENDING", "RUNNING", "CONFIGURING", "SUSPENDED"}:
            alive.append(job)
        payloads = json.loads(jobs.read_text())["jobs"]
        index = job.partition("_")[2]
        for payload in [payloads[int(index)]] if index else payloads:
            launches[str(Path(payload).parent)] += 1
    lost = [
        trial
        for trial in finished
        if len(list((run / "trials" / f"{trial:04d}").glob("slurm-a*"))) > 1 and not _was_repeated(events, trial)
    ]
    twice = sorted(trial for trial, count in finished.items() if count > 1)
    return Books(kills, len(finished), twice, launches, lost, alive)


def _was_repeated(events: list[dict[str, object]], trial: int) -> bool:
    return any(event.get("event") == "trial_repeated" and event["trial"] == trial for event in events)


def wait_until_idle(ask: Callable[..., str], limit_s: float = 60.0) -> None:
    """Until the queue is empty."""
    deadline = time.monotonic() + limit_s
    while ask("squeue", "--noheader").strip() and time.monotonic() < deadline:
        time.sleep(0.3)
