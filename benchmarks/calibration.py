"""Measures whether the surrogate's chances come true: the figures of `calibration.md`.

    python benchmarks/calibration.py LANDSCAPES [LANDSCAPES ...] [--seeds 1] [--trials 15] [--clusters 10]

Each landscape is searched with constants fitted only on the landscapes of the other frameworks in the first folder (15
trials of the default strategy). Before each trial, from the first ranked one on, the surrogate
states of every open configuration the chance that it runs and beats the best by over 1 %, and the chance that any does.
Landscapes have equal weight.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import count, pairwise, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fit_prior import fit_prior
from numpy.typing import NDArray
from search import load_all

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.values import Config, Failure, FailureKind, Stage
from cclsearch.launch.profile import load_profile
from cclsearch.loop.bench import RecordedTable
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.outlook import MIN_TRIALS, NO_CHANCE
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.propose.bayes.snapshot import NEGLIGIBLE, find_chances, find_p_improvement
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.recording.load import load_recording
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Predictor
from cclsearch.stats.simulated import SimulatedCluster, SimulatedSettings
from cclsearch.tasks.training.prediction import STEP_TIME, Priors, make_predictor, read_priors

BUDGET = 15
SIMULATED = ("wl2", "wl4", "wl5", "wl6")
BINS = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
FIT_BINS = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Of the chance to run where no trial measured its memory."""


class Statement(NamedTuple):
    """One chance that the surrogate stated, and whether it came true."""

    chance: float
    is_true: bool


class State(NamedTuple):
    """What the surrogate stated before one trial."""

    landscape: str
    seed: int
    trial: int
    rows: list[Statement]
    """Of each open configuration."""
    fits: list[Statement]
    """The same of their success."""
    has_peak: bool
    """Whether a trial so far measured its memory."""
    any_row: Statement
    """That one of them wins."""
    gain: float
    """By how much the best open configuration beats the best so far, in log units; 0 if none does."""
    ranked: int
    """Trials with a value so far."""


def search_one(path: Path, folder: Path, seed: int, trials: int) -> list[State]:
    """Return the statements of one search, with constants fitted on the other frameworks of this folder."""
    recording = load_recording(path)
    predictor = make_predictor(recording.card, recording.space, fit_without(folder, recording.card.framework))
    values_N = np.array([value or np.inf for value in recording.values])
    ask = RecordedTable(recording).ask
    return list(state_chances(recording.name, recording.card, recording.space, values_N, ask, predictor, seed, trials))


@cache
def fit_without(folder: Path, framework: str) -> Priors:
    """Return the constants fitted on the landscapes of the other frameworks."""
    return read_priors(fit_prior([other for other in load_all([folder]) if other.card.framework != framework]))


def search_cluster(workload: str, seed: int, trials: int) -> list[State]:
    """Return the statements of one search of a simulated cluster."""
    card = load_card(workload)
    space = build_space(card, load_framework(card.framework))
    settings = SimulatedSettings(**{**load_profile("simulate").settings, "seed": seed})
    cluster, rows = SimulatedCluster.of(settings, card, space), np.arange(len(space))
    values_N = np.where(cluster.succeeds(rows), cluster.values(STEP_TIME, rows), np.inf)

    def ask(trial: int, row: int | None, config: Config) -> Observation:
        result = next(one for one in (cluster.run(row or 0, attempt) for attempt in count(1)) if one.accident is None)
        if result.metrics:
            return Observation(trial, config, row, result.metrics[STEP_TIME], metrics=result.metrics)
        kind = FailureKind.OUT_OF_MEMORY if result.needed_gib else FailureKind.CRASHED
        return Observation(trial, config, row, None, failure=Failure(stage=Stage.RUN, kind=kind, message="simulated"))

    return list(state_chances(f"{workload} simulated", card, space, values_N, ask, None, seed, trials))


def state_chances(
    name: str,
    card: Card,
    space: Space,
    values_N: NDArray[np.float64],
    ask: Callable[[int, int | None, Config], Observation],
    predictor: Predictor | None,
    seed: int,
    trials: int,
) -> Iterator[State]:
    """Yield the statements before each trial of a search, from the first ranked one on; `values_N` have no noise."""
    proposer = DefaultProposer() if predictor is None else DefaultProposer(lambda card, space: predictor)
    seen: list[Observation] = []
    for trial in range(1, trials + 1):
        view = SearchView(card, space, tuple(seen), frozenset(), BUDGET - trial + 1, seed)
        posterior = fit_posterior(view, predictor)
        ranked = [(o.loss, o.row) for o in seen if o.loss is not None]
        if posterior is not None and posterior.best is not None and ranked:
            ratio_m = np.log(values_N[posterior.rows_m] / values_N[min(ranked)[1]])
            won_m = ratio_m < -NEGLIGIBLE
            yield State(
                name,
                seed,
                trial,
                pair(find_chances(posterior), won_m),
                pair(posterior.p_success_m, np.isfinite(ratio_m)),
                any(PEAK_MEMORY in o.metrics for o in seen),
                Statement(find_p_improvement(posterior), bool(won_m.any())),
                float(max(0.0, -ratio_m.min())),
                len(ranked),
            )
        proposals = proposer.propose(view, 1)
        if not proposals:
            return
        seen.append(ask(trial, space.row(proposals[0].config), proposals[0].config))


def pair(chance_m: NDArray[np.float64], true_m: NDArray[np.bool_]) -> list[Statement]:
    """Return the statements with these chances."""
    return [Statement(float(chance), bool(true)) for chance, true in zip(chance_m, true_m, strict=True)]


def print_bins(title: str, statements: Sequence[tuple[str, Statement]], bins: Sequence[float] = BINS) -> None:
    """Print by bins of the stated chance: the mean stated, and the share that came true; and the scores of all.

    The calibration error is the mean distance between the two (Guo et al. 2017, equation 3).
    """
    counts: dict[str, int] = defaultdict(int)
    for landscape, _ in statements:
        counts[landscape] += 1
    weight = np.array([1.0 / counts[landscape] for landscape, _ in statements])
    chance = np.array([one.chance for _, one in statements])
    true = np.array([one.is_true for _, one in statements], dtype=np.float64)
    print(f"\n{title}: {len(statements)} statements, {len(counts)} landscapes\n")
    print("| stated | statements | mean stated | came true |\n|---|---|---|---|")
    error = 0.0
    for low, high in pairwise(bins):
        inside = (chance >= low) & ((chance < high) | (high == 1.0))
        if inside.any():
            share, stated = (float(np.average(of[inside], weights=weight[inside])) for of in (true, chance))
            error += float(weight[inside].sum() / weight.sum()) * abs(share - stated)
            print(f"| {low:g} to {high:g} | {int(inside.sum())} | {stated:.3f} | {share:.3f} |")
    clipped = np.clip(chance, 1e-4, 1 - 1e-4)
    log_score = -np.average(true * np.log(clipped) + (1 - true) * np.log(1 - clipped), weights=weight)
    brier = np.average((chance - true) ** 2, weights=weight)
    total = f"stated in all {np.average(chance, weights=weight):.4f}, came true {np.average(true, weights=weight):.4f}"
    print(f"\ncalibration error {error:.4f}, log score {log_score:.4f}, Brier score {brier:.5f}; {total}")


def print_ends(kind: str, states: Sequence[State]) -> None:
    """Print how many searches say that nothing is left, when at first, and how many of them are wrong."""
    searches: dict[tuple[str, int], State | None] = dict.fromkeys((s.landscape, s.seed) for s in states)
    for state in states:
        if state.ranked >= MIN_TRIALS and state.any_row.chance < NO_CHANCE:
            searches[state.landscape, state.seed] = searches[state.landscape, state.seed] or state
    said = [state for state in searches.values() if state is not None]
    wrong = [f"{s.landscape} {np.expm1(s.gain):.1%}" for s in said if s.any_row.is_true]
    mean = f", on average before trial {np.mean([s.trial for s in said]):.1f}" if said else ""
    print(f"\n{kind}: {len(said)} of {len(searches)} searches say that nothing is left{mean}; wrong: {wrong or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trials", type=int, default=BUDGET)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--clusters", type=int, default=0, help="simulated clusters of each of four workloads")
    args = parser.parse_args()
    folders = tuple(args.landscapes)
    tasks = [(r.folder, seed) for r in load_all(folders) if r.folder for seed in range(args.seeds)]
    paths, seeds = zip(*tasks, strict=True)
    with ProcessPoolExecutor(args.workers) as pool:
        given = (repeat(folders[0]), seeds, repeat(args.trials))
        states = [state for found in pool.map(search_one, paths, *given) for state in found]
        clusters = [(name, seed) for name in SIMULATED for seed in range(1, args.clusters + 1)]
        found = pool.map(search_cluster, *zip(*clusters, strict=True), repeat(args.trials)) if clusters else ()
        simulated = [state for one in found for state in one]
    print_bins("A configuration wins", [(s.landscape, one) for s in states for one in s.rows])
    print_bins("A configuration succeeds", [(s.landscape, one) for s in states for one in s.fits])
    unmeasured = [(s.landscape, one) for s in states if not s.has_peak for one in s.fits]
    if unmeasured:
        print_bins("A configuration succeeds, no trial measured its memory", unmeasured, FIT_BINS)
    for kind, own in (("recorded", states), ("simulated", simulated)):
        if own:
            print_bins(f"Some configuration wins, {kind}", [(s.landscape, s.any_row) for s in own])
            print_ends(kind, own)


if __name__ == "__main__":
    main()
