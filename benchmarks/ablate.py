"""Replays the surrogate with one of its rules changed at a time: the table "Each rule alone" of `search.md`.

    python benchmarks/ablate.py FOLDER [FOLDER ...] [--seeds 2]

Every search has 15 trials and the shipped constants. `slow`: share of the trials that take more than twice as long as
the best trial before them, among the trials after the first success that did not fail.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

from cclsearch.loop.bench import RecordedTable, replay_search, summarize
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes import acquisition, ensemble, feasibility, proposer, surrogate
from cclsearch.propose.bayes.acquisition import choose_batch
from cclsearch.propose.bayes.surrogate import CandidatePosterior
from cclsearch.propose.observations import count_failures
from cclsearch.recording.load import find_recordings, load_recording
from cclsearch.stats.calibration import CalibrationData
from cclsearch.stats.kernel import Array

Change = Callable[[], object]
FAILURE_TRIALS, MAX_FAILURE_TRIALS = 1.0, 50.0
"""Trials that a failure costs beyond its own under `gain per cost`, and their limit; tenfold per failure too many."""


def cost_of_failure(view: SearchView) -> float:
    """Return the trials that one more failure costs, by the rule of `failure_penalty`."""
    own, failed = count_failures(view.observations, view.llm_rows)
    excess = failed + 1 - acquisition.FAILED_SHARE * (own + view.budget_left)
    return float(min(FAILURE_TRIALS * 10 ** max(0.0, excess), MAX_FAILURE_TRIALS))


def gain_per_cost(
    posterior: CandidatePosterior, gain_m: Array, cost: float, largest: float | None = None, *, is_won: bool = False
) -> Array:
    """(m,) expected improvement over the expected cost in trials."""
    return gain_m * posterior.p_valid_m / (1 + cost * (1 - posterior.p_success_m)) - posterior.shortfall_m


@contextmanager
def _per_cost() -> Iterator[None]:
    with (
        patch.object(CandidatePosterior, "utility_m", gain_per_cost),
        patch.object(proposer, "failure_penalty", cost_of_failure),
    ):
        yield


class _OneSided(CalibrationData):
    """Data in which only slow values can be outliers."""

    measured = partial(CalibrationData.measured, one_sided=True)  # type: ignore[assignment]


CHANGES: dict[str, Change] = {
    "as shipped": lambda: patch.object(surrogate, "WORTHWHILE", surrogate.WORTHWHILE),
    "safe rows without a chance kept": lambda: patch.object(surrogate, "WORTHWHILE", 0.0),
    "risky rows run if nothing is left to win": lambda: patch.object(
        proposer, "choose_batch", lambda posterior, count, penalty, is_won: choose_batch(posterior, count, penalty)
    ),
    "gain per cost instead": _per_cost,
    "only slow outliers": lambda: patch.object(ensemble, "CalibrationData", _OneSided),
    "no broken values": lambda: patch.object(
        feasibility, "_blame_values", lambda predictor, seen: (None, feasibility.NOT_BLAMED)
    ),
}


def count_slow(trials: list[Observation]) -> tuple[int, int]:
    """Return how many trials took over twice the best before them, and how many had one before them."""
    slow = compared = 0
    best = np.inf
    for trial in trials:
        if trial.loss is not None:
            compared += bool(np.isfinite(best))
            slow += trial.loss > 2 * best
            best = min(best, trial.loss)
    return slow, compared


def measure(change: Change, folder: Path, seeds: int) -> str:
    """Return the figures of one changed surrogate on the tables of a folder, as a row of a Markdown table."""
    searches, slow, compared = [], 0, 0
    ask = RecordedTable.ask
    for path in find_recordings(folder):
        recording = load_recording(path)
        for seed in range(seeds):
            trials: list[Observation] = []

            def keep(table: RecordedTable, *asked: object, kept: list[Observation] = trials) -> Observation:
                kept.append(ask(table, *asked))  # type: ignore[arg-type]
                return kept[-1]

            with change(), patch.object(RecordedTable, "ask", keep):  # type: ignore[attr-defined]
                searches.append(replay_search(recording, proposer.DefaultProposer(), seed=seed, budget=15))
            found = count_slow(trials)
            slow, compared = slow + found[0], compared + found[1]
    figures = summarize(searches)
    means = " | ".join(f"{figures['best_over_optimum']['gmean'][k]:.3f}" for k in ("3", "5", "10", "15"))
    return f"{means} | {figures['failed_share']:.1%} | {slow / max(1, compared):.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    print("| tables | rule | after 3 | after 5 | after 10 | after 15 | failed | slow |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for folder in args.folders:
        for name, change in CHANGES.items():
            print(f"| {folder.name} | {name} | {measure(change, folder, args.seeds)}", flush=True)


if __name__ == "__main__":
    main()
