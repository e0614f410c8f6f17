"""Searches over TPU VM workers on loopback: real sshd processes, real JAX, and a fake gcloud.

    python benchmarks/tpu.py search            tiny-jax over 1, 2 and 4 workers: step time and overhead
    python benchmarks/tpu.py kills --first 0 --last 30 --of 30
                                               kill -9 of the search at moments spread over its run, then resume, clean

No TPU is used. The results are in tpu.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "tpu"))
import slices

from cclsearch.core.trust import trust_project

HERE = Path(__file__).parent
CLI = [sys.executable, "-m", "cclsearch"]
KNOBS = ("tp=1", "dp=4", "ep=1", "micro_batch_size=4", "activation_checkpointing=none")


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *words], cwd=folder, capture_output=True, text=True, timeout=900)


def make_project() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ccl-tpu-"))
    trust_project(folder)
    return folder


def search(counts: list[int]) -> None:
    """Run one configuration of tiny-jax on 4 CPU devices, over 1, 2 and 4 workers of a queued resource."""
    print(f"{'workers':>7}  {'step s':>8}  {'run s':>7}  {'gcloud calls':>12}  {'traced':>6}  verdict")
    for count in counts:
        folder, chips = make_project(), 4 * count
        settings = {"hardware": {"accelerators_per_node": 4 // count}, "environment": {"OMP_NUM_THREADS": 1}}
        with slices.open_cloud(folder / "cloud", accelerator_type=f"v5litepod-{chips}", **settings) as cloud:
            began = time.monotonic()
            words = [word for knob in KNOBS for word in ("--knob", knob)]
            run = f"run -w tiny-jax --launcher {cloud.profile} --budget 1 --name r1".split()
            done = call(folder, *run, *words)
            took_s, calls, left = time.monotonic() - began, len(cloud.calls()), cloud.resources()
        outcome = read_outcome(folder)
        broken = (
            [v["rule"] for v in outcome["admission"]["verdicts"] if v["ok"] is False]
            if outcome.get("admission")
            else []
        )
        traced = next((v["detail"] for v in outcome["admission"]["verdicts"] if v["rule"] == "ranks_traced"), "?")
        verdict = "admitted" if not broken else f"not admitted: {', '.join(broken)}"
        step_s = outcome["metrics"].get("step_time_s", outcome["metrics"].get("step_time"))
        print(
            f"{count:>7}  {step_s:>8.3f}  {took_s:>7.1f}  {calls:>12}  {traced}  {verdict}; left: {left or 'nothing'}"
        )
        if outcome.get("failure"):
            print(done.stderr)
        shutil.rmtree(folder)


def read_outcome(folder: Path) -> dict[str, Any]:
    lines = (folder / "runs" / "r1" / "ledger.jsonl").read_text().splitlines()
    ended = [event for event in map(json.loads, lines) if event["event"] == "trial_finished"]
    return dict(ended[-1]["outcome"])


def kills(first: int, last: int, of: int) -> None:
    """Kill the search at moments `first` to `last` of `of`; its trials only sleep, which keeps it short."""
    life_s = one_kill(None)["ran_s"]
    print(f"without a kill: {life_s:.1f} s")
    wrong = 0
    for number in range(first, last):
        found = one_kill(life_s * (number + 0.5) / of)
        good = found["finished"] == 2 and not found["left"] and found["most_starts"] == 1 and found["clean"]
        wrong += not good
        print(
            f"kill {number + 1:>2} at {found['killed_s']:>5.1f} s{found['missed']}: {found['resources']} made,"
            f" {found['finished']} trials finished, most starts of one process {found['most_starts']},"
            f" left {found['left'] or 'nothing'}"
            f"  {'ok' if good else 'WRONG'}",
            flush=True,
        )
    print(f"{last - first} kills, {wrong} wrong")


def one_kill(at_s: float | None) -> dict[str, Any]:
    """Run one search of two trials, kill it at that second, resume and clean it; return the counts."""
    folder = make_project()
    launchers = folder / "launchers"
    launchers.mkdir()
    for name in ("quick.py", "quick.framework.yaml"):
        shutil.copyfile(HERE.parent / "tests" / "tpu" / name, launchers / name)
    environment = {"QUICK_STARTS": str(folder / "starts"), "QUICK_SECONDS": "0.5"}
    settings = {"framework": "quick", "hardware": {"accelerators_per_node": 2}, "environment": environment}
    with slices.open_cloud(folder / "cloud", **settings) as cloud:
        words = ["run", "-w", "tiny-jax", "--sampler", "random", "--budget", "2", "--name", "r1"]
        words += ["--launcher", str(cloud.profile)]
        began, missed = time.monotonic(), ""
        running = subprocess.Popen([*CLI, *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            running.wait(timeout=at_s if at_s is not None else 300)
            missed = " (it had ended)"
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        ran_s = time.monotonic() - began
        if (folder / "runs" / "r1" / "search.yaml").exists() and (folder / "runs" / "r1" / "ledger.jsonl").exists():
            call(folder, "resume", "r1")
        if not (folder / "runs" / "r1" / "ledger.jsonl").exists():  # killed before the search was recorded
            shutil.rmtree(folder / "runs", ignore_errors=True)
            call(folder, *words)
        clean = "nothing is left" in call(folder, "clean", "r1").stdout
        lines = (folder / "runs" / "r1" / "ledger.jsonl").read_text().splitlines()
        started = Counter(tuple(line.split()[:2]) for line in (folder / "starts").read_text().splitlines())
        found = {
            "ran_s": ran_s,
            "killed_s": at_s or 0.0,
            "missed": missed,
            "resources": cloud.num_created(),
            "finished": sum(json.loads(line)["event"] == "trial_finished" for line in lines),
            "left": [*cloud.resources(), *(pid for machine in cloud.machines() for pid in machine.processes())],
            "most_starts": max(started.values()),
            "clean": clean,
        }
    shutil.rmtree(folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "kills"))
    parser.add_argument("--workers", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=30)
    parser.add_argument("--of", type=int, default=30)
    args = parser.parse_args()
    search(args.workers) if args.what == "search" else kills(args.first, args.last, args.of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
