"""Measures searches with a memory constraint on recorded landscapes: the figures of `constraints.md`.

    python benchmarks/constraints.py LANDSCAPES [--seeds 20] [--budget 15] [--share 0.33]

The objective is the primary metric with `peak_memory_gib` at most X; X is such that `--share` of the rows that ran
satisfy it. Landscapes without recorded memory, or with fewer than `MIN_ROWS` such rows, are left out. Prints the
geometric mean of best/optimum among those rows after 1 to 15 trials (of the worst such row until one is found), the
worst search, and the share of searches within 5 %. `tpe` is Optuna's constrained TPE over the same rows.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.loop.bench import ReplayedSearch, replay_search
from cclsearch.propose.study.choose import make_sampler
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.recording.table import RowStatus
from cclsearch.scoring.objective import Constraint, Objective, single_metric

STRATEGIES = ("default", "random", "heuristic", "tpe")
MIN_ROWS = 4


def make_objective(recording: Recording, share: float) -> Objective | None:
    """Return the constrained objective of a landscape; None if too few rows satisfy it."""
    peaks = [
        row.metrics[PEAK_MEMORY] for row in recording.rows if row.status is RowStatus.OK and PEAK_MEMORY in row.metrics
    ]
    if share * len(peaks) < MIN_ROWS:
        return None
    constraint = Constraint(metric=PEAK_MEMORY, at_most=float(np.quantile(peaks, share)), unit="GiB")
    return single_metric(recording.primary).model_copy(update={"constraints": (constraint,)})


def search_one(task: tuple[Path, str, int, int, float]) -> list[ReplayedSearch]:
    """Return the searches of all seeds on one landscape with one strategy; none if it is left out."""
    path, strategy, seeds, budget, share = task
    recording = load_recording(path)
    objective = make_objective(recording, share)
    if objective is None:
        return []
    return [
        replay_search(recording, make_sampler(strategy), seed=n, budget=budget, objective=objective)
        for n in range(seeds)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--share", type=float, default=1 / 3, help="share of the rows that satisfy the constraint")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    args = parser.parse_args()
    after = [trial for trial in (1, 3, 5, 10, 15) if trial <= args.budget]
    print(f"{'strategy':<18}" + "".join(f"{f'after {n}':>10}" for n in after) + "     worst    within 5 %")
    with ProcessPoolExecutor(2) as pool:
        for strategy in args.strategies:
            paths = find_recordings(args.landscapes)
            tasks = [(path, strategy, args.seeds, args.budget, args.share) for path in paths]
            searches = [search for found in pool.map(search_one, tasks) for search in found]
            ratios = np.array([search.best_over_optimum for search in searches])
            means = np.exp(np.log(ratios).mean(axis=0))
            print(
                f"{strategy:<18}"
                + "".join(f"{means[n - 1]:>10.3f}" for n in after)
                + f"{ratios[:, -1].max():>10.3f}{np.mean(ratios[:, -1] <= 1.05):>13.1%}"
                f"   ({len({s.landscape for s in searches})} landscapes x {args.seeds} seeds)",
                flush=True,
            )


if __name__ == "__main__":
    main()
