"""Searches simulated clusters and prints how close each strategy comes to their best configuration.

    python benchmarks/simulate.py [--clusters 12] [--budget 15] [--workloads wl2 wl4 wl5 wl6]

Every search is `ccl-search run --launcher PROFILE`, with a profile like `launchers/simulate.yaml` but for its seed. The
optimum is the lowest step time without noise of the configurations that succeed on that cluster, computed from its
draws, which no search sees. All figures are simulated: they compare strategies, and say nothing about hardware.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from cclsearch.cli import main as ccl_search
from cclsearch.launch.profile import load_profile
from cclsearch.loop.session import rebuild_space
from cclsearch.run.folder import Run, load_run
from cclsearch.stats.closed_form import predict_space
from cclsearch.stats.simulated import SimulatedCluster, SimulatedSettings

STRATEGIES = ("surrogate", "random", "tpe")
NAMES = {"surrogate": "default (surrogate)", "random": "random", "tpe": "Optuna's TPE", "predicted": "predicted best"}
METRIC = "step_time_s"


@dataclass(frozen=True)
class Ratio:
    """Best found of one search over the optimum of its cluster."""

    workload: str
    strategy: str
    value: float
    """Infinite if no trial succeeded."""
    failed: int
    """Trials that failed."""


def write_clusters(project: Path, count: int) -> list[str]:
    """Write one profile per cluster; returns their names."""
    (project / "launchers").mkdir()
    (project / "ccl-search.yaml").write_text("{}\n", encoding="utf-8")
    shipped = load_profile("simulate").settings
    names = [f"cluster-{seed}" for seed in range(1, count + 1)]
    for seed, name in enumerate(names, start=1):
        fields = {"launcher": "simulate", **shipped, "seed": seed}
        (project / "launchers" / f"{name}.yaml").write_text(yaml.safe_dump(fields), encoding="utf-8")
    return names


def search(workload: str, cluster: str, strategy: str, budget: int) -> Run:
    """Run one search to its end."""
    name = f"{workload}-{cluster}-{strategy}"
    command = ["run", "--workload", workload, "--launcher", cluster, "--sampler", strategy, "--name", name]
    with contextlib.redirect_stdout(io.StringIO()):
        code = ccl_search([*command, "--budget", str(budget), "--quiet"])
    if code:
        raise SystemExit(f"{name} ended with exit code {code}")
    return load_run(Path("runs") / name)


def compare(run: Run, strategy: str) -> list[Ratio]:
    """Return the ratio of the search, and that of the configuration which the closed form alone would choose."""
    space, workload = rebuild_space(run.spec), run.spec.workload
    settings = run.spec.profile.read_settings(SimulatedSettings)
    cluster = SimulatedCluster.of(settings, run.spec.card, space)
    rows = np.arange(len(space))
    times = np.where(cluster.succeeds(rows), cluster.values(METRIC, rows), np.inf)
    optimum = float(times.min())
    best = run.state.best
    row = space.row(best.config) if best is not None else None
    failed = sum(trial.outcome is not None and trial.outcome.failure is not None for trial in run.state.trials.values())
    ratios = [Ratio(workload, strategy, np.inf if row is None else float(times[row]) / optimum, failed)]
    prediction = predict_space(run.spec.card, space)
    if strategy == "surrogate" and prediction is not None:
        likely = np.where(prediction.fits_N > 0.5, prediction.value_N, np.inf)
        chosen = float(times[int(np.argmin(likely))])
        ratios.append(Ratio(workload, "predicted", chosen / optimum, int(np.isinf(chosen))))
    return ratios


def print_table(ratios: Sequence[Ratio], workloads: Sequence[str], budget: int, clusters: int) -> None:
    """Print one line per workload and strategy, and one over all workloads."""
    print(f"Simulated: best found / optimum after {budget} trials, {clusters} clusters per workload\n")
    print("| workload | strategy | median | mean | worst | within 5 % | failed trials per search |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for workload in (*workloads, "all"):
        for strategy in (*STRATEGIES, "predicted"):
            own = [r for r in ratios if r.strategy == strategy and workload in (r.workload, "all")]
            values = np.array([r.value for r in own])
            found = values[np.isfinite(values)]
            shown = [f"{np.median(values):.3f}", f"{found.mean():.3f}", f"{values.max():.3f}"]
            lost = f" ({len(values) - len(found)} without)" if len(found) < len(values) else ""
            within, failed = f"{np.mean(values <= 1.05):.0%}", f"{np.mean([r.failed for r in own]):.1f}"
            print(f"| {workload} | {NAMES[strategy]} | {' | '.join(shown)}{lost} | {within} | {failed} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=12)
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--workloads", nargs="+", default=["wl2", "wl4", "wl5", "wl6"])
    args = parser.parse_args()
    started, ratios = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for cluster in write_clusters(Path(folder), args.clusters):
            for workload in args.workloads:
                for strategy in STRATEGIES:
                    ratios += compare(search(workload, cluster, strategy, args.budget), strategy)
        os.chdir("/")
    print_table(ratios, args.workloads, args.budget, args.clusters)
    print(f"\n{sum(r.strategy in STRATEGIES for r in ratios)} searches in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
