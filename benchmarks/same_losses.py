"""Trains many layouts of small cards and prints how far their losses differ: the data behind `same_losses`.

Each layout trains the same weights on the same data, so its losses should differ by rounding only. The deviation of a
layout at a step is |loss - median| / median over the layouts of one card and precision.

    python benchmarks/same_losses.py tiny tiny-moe tiny-jax --layouts 12 --precisions fp32 bf16
    python benchmarks/same_losses.py tiny tiny-moe --framework hf-trainer --layouts 8
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import CONFIG_FILE, trial_environment
from cclsearch.space.build import build_space
from cclsearch.space.framework import Framework, load_framework
from cclsearch.tasks.base import task_of
from cclsearch.tasks.training.contract import TrainingResult


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--layouts", type=int, default=12)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each layout")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--framework", help="in place of the card's")
    args = parser.parse_args()
    for workload in args.workloads:
        for precision in args.precisions:
            card = load_card(workload).model_copy(update={"precision": precision})
            card = card.model_copy(update={"framework": args.framework or card.framework})
            configs = choose_layouts(card, args.layouts, args.seed)
            print_deviations(card, [train(card, config, args.steps) for config in configs], configs)


def choose_layouts(card: Card, count: int, seed: int) -> list[Config]:
    """Return `count` configurations of the card's space: random ones, preferring values that are not yet in."""
    space = build_space(card, load_framework(card.framework))
    rows = [space.config(row) for row in random.Random(seed).sample(range(len(space)), len(space))]
    chosen: list[Config] = []
    while rows and len(chosen) < count:
        seen = {item for config in chosen for item in config.items()}
        best = max(rows, key=lambda config: len(set(config.items()) - seen))
        rows.remove(best)
        chosen.append(best)
    return chosen


def train(card: Card, config: Config, steps: int) -> tuple[float, ...]:
    """Return the loss of each step of one layout."""
    framework: Framework = load_framework(card.framework)
    payload = task_of(card).make_input(card, config, is_measured=False, run_id="losses", trial=1)
    payload = payload.model_copy(update={"timed_steps": steps - 2})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / CONFIG_FILE).write_text(payload.model_dump_json())
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **trial_environment(folder, payload)}
        done = subprocess.run(
            [sys.executable, str(framework.script_path)], env={**os.environ, **own}, capture_output=True, text=True
        )
        result = collect_result(folder, TrainingResult, exit_code=done.returncode)
    if not isinstance(result, TrainingResult):
        raise SystemExit(f"{config}: {result.message}\n{done.stderr[-2000:]}")
    return result.losses


def print_deviations(card: Card, losses: list[tuple[float, ...]], configs: list[Config]) -> None:
    """Print the largest deviation at each step, and the configuration with the largest of all."""
    by_step = list(zip(*losses, strict=True))
    deviations = [[abs(loss / statistics.median(step) - 1) for loss in step] for step in by_step]
    worst = max(range(len(losses)), key=lambda index: max(step[index] for step in deviations))
    print(f"{card.name} {card.precision}: {len(losses)} layouts, {len(by_step)} steps")
    print("  loss     ", " ".join(f"{statistics.median(step):9.5f}" for step in by_step))
    print("  largest  ", " ".join(f"{max(step):9.1e}" for step in deviations))
    print(f"  largest of all {max(map(max, deviations)):.2e}, of {configs[worst]}", flush=True)


if __name__ == "__main__":
    main()
