"""Replays the surrogate with one of its mechanisms left out at a time: the table of `ablations.md`.

    python benchmarks/ablate.py FOLDER [FOLDER ...] [--fit LANDSCAPES] [--jittered 3] [--changes NAME ...]

Every search has 15 trials; a recording whose trials have several loads is one search for each limit of its task. With
`--fit`, training is searched with constants fitted on those landscapes without the framework of the searched one, and
each landscape several times, with the prior means moved at random (`search.py`); else with the shipped constants.
`slow`: share of the trials that take more than twice as long as the best trial before them, among the trials after the
first success that did not fail. Differences below 0.01 are luck.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from search import fit_without, list_priors

from cclsearch.loop.bench import (
    Problem,
    RecordedTable,
    label_landscapes,
    limit_recording,
    list_problems,
    replay_search,
    summarize,
)
from cclsearch.propose.base import Observation, Proposer
from cclsearch.propose.bayes import acquisition, ensemble, feasibility, loads, proposer, surrogate
from cclsearch.propose.bayes.ensemble import Ensemble
from cclsearch.propose.bayes.feasibility import NOT_BLAMED, Feasibility
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.recording.load import find_recordings, load_recording
from cclsearch.stats.calibration import Posterior, Prior, calibrate
from cclsearch.stats.closed_form import Predictor, constant
from cclsearch.stats.kernel import Array
from cclsearch.tasks.training.prediction import make_predictor

Change = Mapping[tuple[object, str], object]
"""(Module or class, attribute) -> what takes its place."""
MANY = 1e4
"""Degrees of freedom of a Student-t that is all but a normal."""


def draw_marginals(self: Ensemble, rows: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return one model per hypothesis: the linearized posterior in place of drawn multipliers."""
    moments = [hypothesis.marginals(rows) for hypothesis in self.hypotheses]  # type: ignore[arg-type]
    noises = [hypothesis.prior.noise for hypothesis in self.hypotheses]
    sds = [np.sqrt(variance + noise**2) for (_, variance), noise in zip(moments, noises, strict=True)]
    return np.array([mean for mean, _ in moments]), np.array(sds), self.weight_h


def with_prior(change: Callable[[Prior], Prior]) -> Callable[..., Posterior]:
    """Return `calibrate` with another prior."""
    return lambda model, features, prior, data: calibrate(model, features, change(prior), data)


def flat_crashes(model: Any, features: Any, prior: Prior, data: Any) -> Posterior:
    """Calibrate with one rate of crashes for all configurations."""
    shape = prior.shape.scaled(1e-3) if model is constant else prior.shape
    return calibrate(model, features, replace(prior, shape=shape), data)


def never_crash(self: Feasibility, rows: Any) -> tuple[Array, Array, Array]:
    """Predict as if all failures were due to memory or broken values."""
    gib, p_fits, _ = PREDICT(self, rows)
    return gib, p_fits, p_fits if self.broken is None else p_fits * (1 - self.broken.p_broken(rows))


def drop_loads(view: object, predictor: Predictor, earlier: object) -> Predictor:
    """Return the predictor of what counts alone, in place of one of every load."""
    return replace(predictor, loads=None)


PREDICT = Feasibility.predict
CHANGES: dict[str, Change] = {
    "as shipped": {},
    "one noise of the cluster": {(ensemble, "NOISE_FACTORS"): (1.0,)},
    "one size of the residual": {(ensemble, "RESIDUAL_FACTORS"): (1.0,)},
    "no residual": {(ensemble, "RESIDUAL_FACTORS"): (1e-3,)},
    "no hypothesis of a wide scale": {(ensemble, "SCALE"): ""},
    "linearized posterior, no drawn models": {(Ensemble, "draw"): draw_marginals},
    "far costs weigh as much as near ones": {(ensemble, "downweight_far"): lambda log_cost_n, noise_n: noise_n},
    "normal noise, no outliers": {(ensemble, "calibrate"): with_prior(lambda prior: replace(prior, dof=MANY))},
    "residual without slopes": {
        (ensemble, "calibrate"): with_prior(lambda prior: replace(prior, shape=replace(prior.shape, slope=0.0)))
    },
    "residual without categories": {
        (ensemble, "calibrate"): with_prior(lambda prior: replace(prior, shape=replace(prior.shape, category_sd=0.0)))
    },
    "no spread by leave-one-out errors": {(Posterior, "spread"): 1.0},
    "one memory hypothesis": {
        (feasibility, "_hypothesis_priors"): lambda form, names: [(frozenset(), form.form.prior, 0.0)]
    },
    "one rate of crashes": {(feasibility, "calibrate"): flat_crashes},
    "no crashes": {(Feasibility, "predict"): never_crash},
    "no broken values": {(feasibility, "_blame_values"): lambda predictor, seen: (None, NOT_BLAMED)},
    "constant failure penalty": {(proposer, "failure_penalty"): lambda view: acquisition.MIN_FAILURE_PENALTY},
    "safe rows without a chance kept": {(surrogate, "WORTHWHILE"): 0.0},
    "risky rows run if nothing is left to win": {
        (proposer, "choose_batch"): lambda posterior, count, penalty, is_won: acquisition.choose_batch(
            posterior, count, penalty
        )
    },
    "no simulation of the promising rows": {
        (surrogate, "refine_predictor"): lambda view, predictor, earlier: predictor
    },
    "loads: only the one that counts": {(surrogate, "refine_predictor"): drop_loads},
    "loads: one hypothesis": {(loads, "HYPOTHESES"): ((1.0, 1.0, 1.0, 0.0),)},
    "loads: no offset of what counts": {(loads, "find_offset"): lambda cells, primary, measured: 0.0},
}


def count_slow(trials: Sequence[Observation]) -> tuple[int, int]:
    """Return how many trials took over twice the best before them, and how many had one before them."""
    slow = compared = 0
    best = np.inf
    for trial in trials:
        if trial.loss is not None:
            compared += bool(np.isfinite(best))
            slow += trial.loss > 2 * best
            best = min(best, trial.loss)
    return slow, compared


def list_searches(folders: Sequence[Path], fit: tuple[Path, ...], jittered: int) -> Iterator[tuple[Problem, Proposer]]:
    """Yield each problem below the folders, once for each draw of its constants, with its proposer."""
    for folder in folders:
        paths = find_recordings(folder)
        for problem in list_problems([load_recording(path) for path in paths], label_landscapes(paths, folder)):
            card = problem.recording.card
            if not fit or card.task != "training":
                yield problem, DefaultProposer()
                continue
            priors = fit_without(fit, (), "framework", Path(), card.framework)
            for moved in list_priors(priors, 0, jittered):
                yield problem, DefaultProposer(partial(make_predictor, priors=moved))


def measure(change: Change, folders: Sequence[Path], fit: tuple[Path, ...], jittered: int) -> str:
    """Return the figures of one changed surrogate, as cells of a Markdown table."""
    searches, slow, compared = [], 0, 0
    ask = RecordedTable.ask
    for problem, asked in list_searches(folders, fit, jittered):
        recording, objective = limit_recording(problem.recording, problem.limit)
        trials: list[Observation] = []

        def keep(table: RecordedTable, *of_trial: Any, kept: list[Observation] = trials) -> Observation:
            kept.append(ask(table, *of_trial))
            return kept[-1]

        with ExitStack() as stack:
            for (place, name), value in {**change, (RecordedTable, "ask"): keep}.items():
                stack.enter_context(patch.object(place, name, value))
            searches.append(replay_search(recording, asked, seed=0, budget=15, objective=objective))
        found = count_slow(trials)
        slow, compared = slow + found[0], compared + found[1]
    figures = summarize(searches)
    means = " | ".join(f"{figures['best_over_optimum']['gmean'][k]:.3f}" for k in ("3", "5", "10", "15"))
    return f"{means} | {figures['failed_share']:.1%} | {slow / max(1, compared):.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--fit", type=Path, nargs="+", default=[], help="landscapes that constants are fitted on")
    parser.add_argument("--jittered", type=int, default=3, help="searches of each landscape with prior means moved")
    parser.add_argument("--changes", nargs="+", default=list(CHANGES), choices=list(CHANGES))
    args = parser.parse_args()
    print("| left out | after 3 | after 5 | after 10 | after 15 | failed | slow |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in args.changes:
        print(f"| {name} | {measure(CHANGES[name], args.folders, tuple(args.fit), args.jittered)}", flush=True)


if __name__ == "__main__":
    main()
