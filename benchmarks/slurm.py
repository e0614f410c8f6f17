"""The Slurm launcher on a real Slurm on this machine: limits, a stopped controller, kills, cost of polling.

    python benchmarks/slurm.py [--only NAME ...] [--kills 50] [--out benchmarks/slurm.md]

Needs root and Debian's Slurm packages (it installs them).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent)]
os.environ.setdefault("CCL_REQUIRE_SLURM", "1")

from slurm.cluster import start_cluster  # noqa: E402
from slurm.searches import kill_and_resume  # noqa: E402
from slurm.trials import make_job  # noqa: E402

from cclsearch.launch.base import Handle, JobState, JobStatus  # noqa: E402
from cclsearch.launch.slurm.job_files import RunScript, classify_trial  # noqa: E402
from cclsearch.launch.slurm.launcher import SlurmLauncher  # noqa: E402
from cclsearch.launch.slurm.settings import SlurmSettings  # noqa: E402

SCRIPT = HERE.parent / "tests" / "slurm" / "trial_script.py"
Part = Callable[[Path, argparse.Namespace], list[str]]


def make_launcher(run_dir: Path, **settings: Any) -> SlurmLauncher:
    fields = {"poll_s": 1.0, "grace_s": 5, "cpu_only": True, "python": sys.executable, **settings}
    script = RunScript(SCRIPT, "process", {})
    return SlurmLauncher(SlurmSettings.model_validate(fields), script, classify=classify_trial, run_dir=run_dir)


def follow(
    launcher: SlurmLauncher, handles: Sequence[Handle], limit_s: float = 240
) -> dict[str, tuple[float, JobStatus]]:
    """Poll until all jobs are done; return job name -> (Unix time of that poll, status)."""
    ends: dict[str, tuple[float, JobStatus]] = {}
    deadline = time.monotonic() + limit_s
    while len(ends) < len(handles) and time.monotonic() < deadline:
        for handle, status in zip(handles, launcher.poll(handles), strict=True):
            if status.state is JobState.DONE and handle.job_name not in ends:
                ends[handle.job_name] = (time.time(), status)
        time.sleep(0.1)
    return ends


def wait_for(path: Path, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def name_end(status: JobStatus | None) -> str:
    if status is None:
        return "no end in time"
    return f"`{status.failure.kind.value}`: {status.failure.message}" if status.failure else "valid result"


def read_ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines() if line.strip()]


# ---- limits ----------------------------------------------------------------------------------------------------------


def part_limits(folder: Path, _: argparse.Namespace) -> list[str]:
    """Array and submit limits, with enforcement on."""
    lines = []
    with start_cluster("--enforce", "--max-array", "9"):
        launcher = make_launcher(folder / "array", account="ccl")
        handles = launcher.submit([make_job(folder / "array", n, ranks=1, behaviour="ok") for n in range(1, 31)])
        arrays = Counter(handle.job_id.split("_")[0] for handle in handles)
        ends = follow(launcher, handles)
        valid = sum(status.failure is None for _, status in ends.values())
        lines.append(
            f"- MaxArraySize 9, 30 trials at once: submitted as {sorted(arrays.values())}; "
            f"{valid} of 30 had a valid result"
        )
        launcher = make_launcher(folder / "submit", account="ccl", qos="small")
        handles = launcher.submit([make_job(folder / "submit", n, ranks=1, behaviour="ok") for n in range(1, 21)])
        at_once = sum(bool(handle.job_id) for handle in handles)
        ends = follow(launcher, handles)
        valid = sum(status.failure is None for _, status in ends.values())
        lines.append(
            f"- QOS of 4 jobs per user (so `max_parallel` is {launcher.max_parallel}), 20 trials at once: "
            f"{at_once} submitted, the others later; {valid} of 20 had a valid result, none failed because of the limit"
        )
    return lines


# ---- no controller ---------------------------------------------------------------------------------------------------


def part_away(folder: Path, args: argparse.Namespace) -> list[str]:
    """slurmctld stopped for a minute: 2 of 4 running jobs end in that time, and one more is submitted."""
    with start_cluster() as cluster:
        launcher = make_launcher(folder / "away")
        jobs = [
            make_job(folder / "away", n, ranks=1, behaviour="ok", seconds=s) for n, s in enumerate((5, 20, 80, 85), 1)
        ]
        handles = launcher.submit(jobs)
        for handle in handles:
            wait_for(handle.trial_dir / "seen-0.json")
        os.kill(cluster.pid("slurmctld"), signal.SIGTERM)
        gone = time.monotonic()
        late = launcher.submit([make_job(folder / "away", 5, ranks=1, behaviour="ok")])
        seen: Counter[str] = Counter()
        while time.monotonic() - gone < args.away_s:
            for status in launcher.poll([*handles, *late]):
                seen[f"{status.state.value}{'' if status.failure is None else ' with a failure'}"] += 1
            time.sleep(1)
        states = [status.state.value for status in launcher.poll(handles)]
        cluster.up()
        ends = follow(launcher, [*handles, *late])
        valid = sum(status.failure is None for _, status in ends.values())
        failures = "; ".join(sorted({name_end(status) for _, status in ends.values() if status.failure})) or "none"
        again = cluster.ask("squeue", "--states=all", "-h", "-o", "%Z").splitlines()
    return [
        f"- {args.away_s} s without a controller: states polled in that time: {dict(seen)}; at its end {states}",
        f"- after its restart {valid} of {len(ends)} trials had a valid result "
        f"(one was submitted while it was stopped), failures: {failures}; "
        f"{len(set(again))} job folders for {len(again)} listed tasks",
    ]


# ---- kills, polls ----------------------------------------------------------------------------------------------------


def part_kills(folder: Path, args: argparse.Namespace) -> list[str]:
    """kill -9 of the search at random moments, each time followed by `resume`."""
    tallies = []
    with start_cluster("--no-db") as cluster:
        while (left := args.kills - sum(tally.kills for tally in tallies)) > 0:
            number = len(tallies)
            runs = folder / f"kills-{number}" / "runs"
            runs.mkdir(parents=True)
            tallies.append(
                kill_and_resume(
                    runs, kills=min(left, 10), budget=40, parallel=4, seed=number, ask=cluster.ask, longest_s=2.5
                )
            )
            print(f"kills so far: {sum(tally.kills for tally in tallies)}", flush=True)
    kills, jobs = sum(tally.kills for tally in tallies), sum(sum(tally.launches.values()) for tally in tallies)
    finished = sum(tally.finished for tally in tallies)
    return [
        f"- {kills} kills over {len(tallies)} searches of a space of 26 (4 trials at a time that sleep 0.8 s): "
        f"{finished} trials finished, {jobs} jobs submitted",
        f"- submitted twice: {sum(len(tally.doubled) for tally in tallies)}; finished twice: "
        f"{sum(len(tally.finished_twice) for tally in tallies)}; run again after finishing: "
        f"{sum(len(tally.lost) for tally in tallies)}; left unfinished: {sum(len(tally.alive) for tally in tallies)}",
    ]


def part_poll(folder: Path, args: argparse.Namespace) -> list[str]:
    """256 jobs: the cost of one poll, with and without a query of Slurm."""
    with start_cluster("--no-db") as cluster:
        launcher = make_launcher(folder / "many", poll_s=0.001)
        began = time.perf_counter()
        handles = launcher.submit(
            [make_job(folder / "many", n, ranks=1, behaviour="hang", timeout_s=900) for n in range(1, args.jobs + 1)]
        )
        submit_s = time.perf_counter() - began
        with_query = [_time_poll(launcher, handles) for _ in range(20)]
        launcher._watcher.queue.poll_s = 3600.0
        without = [_time_poll(launcher, handles) for _ in range(20)]
        began = time.perf_counter()
        launcher.cancel(handles)
        cancel_s = time.perf_counter() - began
        left = cluster.ask("squeue", "-h").strip()
    calls = len({handle.job_id.split("_")[0] for handle in handles})
    return [
        f"- {args.jobs} jobs submitted in {submit_s:.2f} s ({calls} calls of sbatch)",
        f"- a poll that queries Slurm (one squeue for all): median {median(w for w, _ in with_query) * 1e3:.1f} ms, "
        f"of which {median(c for _, c in with_query) * 1e3:.1f} ms CPU of the search and its squeue",
        f"- a poll between two queries (result files only): median {median(w for w, _ in without) * 1e3:.1f} ms",
        f"- all cancelled and ended in {cancel_s:.1f} s; left in the queue: {left or 'none'}",
    ]


def _time_poll(launcher: SlurmLauncher, handles: Sequence[Handle]) -> tuple[float, float]:
    """Wall and CPU seconds of one poll, children included."""
    time.sleep(0.01)
    began, used = time.perf_counter(), _cpu_s()
    launcher.poll(handles)
    return time.perf_counter() - began, _cpu_s() - used


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


PARTS: dict[str, Part] = {
    "limits": part_limits,
    "away": part_away,
    "kills": part_kills,
    "poll": part_poll,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=256)
    parser.add_argument("--away-s", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sections = {}
    for name in args.only:
        part = PARTS[name]
        with tempfile.TemporaryDirectory(prefix="ccl-bench-slurm-") as folder:
            began = time.monotonic()
            lines = part(Path(folder), args)
        intro = " ".join((part.__doc__ or "").split())
        sections[name] = f"\n{intro}\n\n" + "\n".join(lines) + f"\n\n(took {time.monotonic() - began:.0f} s)\n"
        print(f"## {name}\n{sections[name]}", flush=True)
    if args.out:
        args.out.write_text("".join(f"## {name}\n{text}\n" for name, text in sections.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
