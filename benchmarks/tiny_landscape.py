"""Trains every layout of a small card three times: how much layouts differ, and how much repeats do.

Then runs a search with its usual budget over the same space and reports the rank of its choice among all layouts. If
interrupted, it continues where it stopped: each finished trial has a folder in `--runs` with its `result.json`.

    python benchmarks/tiny_landscape.py --runs runs/tiny-landscape --out benchmarks/tiny_landscape.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.launch.base import Job, JobState
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import CONFIG_FILE
from cclsearch.launch.profile import load_profile, make_launcher
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult

TIMEOUT_S = 300.0
DISTURBED_CORES = 0.3
"""A repeat with more CPU load from other processes than this is run once more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="tiny")
    parser.add_argument("--runs", type=Path, default=Path("runs/tiny-landscape"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/tiny_landscape.md"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1, help="number of searches, with seeds 0, 1, ...")
    args = parser.parse_args()
    runs = args.runs.absolute()
    times_s = measure_landscape(args.workload, runs, args.repeats)
    searches = [run_search(args.workload, runs, args.budget, seed) for seed in range(args.seeds)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(render(args.workload, times_s, searches, args.repeats), encoding="utf-8")
    print(args.out)


def measure_landscape(workload: str, runs: Path, repeats: int) -> dict[Config, list[float] | str]:
    """Return configuration -> median step time of each repeat, or the kind of its failure."""
    card = load_card(workload)
    framework = load_framework(card.framework)
    space = build_space(card, framework)
    launcher = make_launcher(load_profile("local"), framework=card.framework, run_dir=runs)
    found: dict[Config, list[float] | str] = {}
    for repeat in range(repeats):
        for row in range(len(space)):
            config = space.config(row)
            if isinstance(found.get(config), str):
                continue
            folder = runs / f"{config.digest}-{repeat}"
            result = read_or_run(launcher, card, config, folder, row * repeats + repeat)
            if isinstance(result, str):
                found[config] = result
            else:
                found.setdefault(config, []).append(result)  # type: ignore[union-attr]
            print(f"{repeat + 1}/{repeats} {row + 1}/{len(space)} {config}: {result}", flush=True)
    return found


def read_or_run(launcher: object, card: Card, config: Config, folder: Path, number: int) -> float | str:
    """Return the median step time of one trial, read from its folder if it ran before; retry once under load."""
    for _ in range(2):
        kept = folder / "outcome.json"
        if kept.is_file():
            outcome = json.loads(kept.read_text())
            return outcome if isinstance(outcome, str) else float(outcome)
        payload = make_input(card, config, number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(payload.model_dump_json())
        job = Job(run_id="landscape", trial=number, attempt=1, trial_dir=folder, payload=payload, timeout_s=TIMEOUT_S)
        [handle] = launcher.submit([job])  # type: ignore[attr-defined]
        status = launcher.poll([handle])[0]  # type: ignore[attr-defined]
        while status.state is not JobState.DONE:
            time.sleep(0.1)
            status = launcher.poll([handle])[0]  # type: ignore[attr-defined]
        result = collect_result(folder, TrainingResult) if status.failure is None else status.failure
        if not isinstance(result, TrainingResult):
            kept.write_text(json.dumps(str(result.kind)))
            return str(result.kind)
        if (result.foreign_cpu_cores or 0.0) > DISTURBED_CORES:
            continue
        break
    median = statistics.median(result.step_times_s)
    kept.write_text(json.dumps(median))
    return median


def make_input(card: Card, config: Config, number: int) -> TrainingInput:
    """Return the trial's input as a search would write it, without a profiled window."""
    ranks = config.as_int("tp") * config.as_int("dp") * config.as_int("pp")
    rows = config.as_int("dp") * config.as_int("micro_batch_size")
    return TrainingInput(
        run_id="landscape",
        trial=number,
        config=config,
        arch=card.arch,
        global_batch_size=card.number("global_batch_size"),
        seq_len=card.number("seq_len"),
        precision=card.precision,
        gradient_accumulation=card.number("global_batch_size") // rows,
        num_ranks=ranks,
        ranks_per_node=ranks,
        profiled_steps=0,
    )


def run_search(workload: str, runs: Path, budget: int, seed: int) -> dict[str, object]:
    """Return the answer of `ccl-search best` for one search; resumes the search's run folder if it exists."""
    folder = runs / f"search-{seed}"
    kept = runs / f"search-{seed}.json"
    if not kept.is_file():
        base = [sys.executable, "-m", "cclsearch"]
        go = ["resume", str(folder)] if folder.is_dir() else ["run", "--workload", workload, "--launcher", "local"]
        if go[0] == "run":
            go += ["--budget", str(budget), "--seed", str(seed), "--runs", str(runs), "--name", folder.name]
        subprocess.run([*base, *go], check=True)
        best = subprocess.run([*base, "best", str(folder), "--json"], check=True, capture_output=True, text=True)
        kept.write_text(best.stdout)
    answer: dict[str, object] = json.loads(kept.read_text())
    return answer


def render(
    workload: str, times_s: dict[Config, list[float] | str], searches: Sequence[dict[str, object]], repeats: int
) -> str:
    """Return the report: range and spread, all layouts by step time, and the rank of each search's choice."""
    timed = {config: times for config, times in times_s.items() if isinstance(times, list) and times}
    failed = {config: kind for config, kind in times_s.items() if isinstance(kind, str)}
    ranked = sorted(timed, key=lambda config: statistics.median(timed[config]))
    median = {config: statistics.median(timed[config]) for config in ranked}
    spreads = sorted((max(times) - min(times)) / statistics.median(times) for times in timed.values())
    best = median[ranked[0]]
    lines = [
        f"# The landscape of `{workload}`, measured in full",
        "",
        f"{len(times_s)} layouts, {repeats} repeats each, one at a time on this machine"
        f" ({len(failed)} failed). Step time is the median of the unprofiled window.",
        "",
        f"- Layouts: {best:.3f} s to {median[ranked[-1]]:.3f} s, a range of {median[ranked[-1]] / best:.2f}x.",
        f"- Repeats of one layout: spread ((max - min) / median) {statistics.median(spreads):.1%} in the median,"
        f" {spreads[-1]:.1%} at worst.",
        "",
        "| rank | layout | step time (s) | above the best | repeats (s) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rank, config in enumerate(ranked, start=1):
        repeats_s = " ".join(f"{time_s:.3f}" for time_s in timed[config])
        lines.append(f"| {rank} | {config} | {median[config]:.3f} | {median[config] / best - 1:.1%} | {repeats_s} |")
    lines += [f"| - | {config} | {kind} | | |" for config, kind in failed.items()]
    lines += [
        "",
        "## What the search chose",
        "",
        "| seed | choice | rank | above the best |",
        "| --- | --- | --- | --- |",
    ]
    for seed, answer in enumerate(searches):
        chosen = Config(answer["config"])  # type: ignore[arg-type]
        if chosen in median:
            lines.append(
                f"| {seed} | {chosen} | {ranked.index(chosen) + 1} of {len(ranked)} | {median[chosen] / best - 1:.1%} |"
            )
        else:
            lines.append(f"| {seed} | {chosen} | not among the layouts that ran | |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
