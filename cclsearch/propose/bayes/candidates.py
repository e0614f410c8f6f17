"""Bounds on the surrogate's work for each proposal: the observations it fits, and the rows it judges.

Below the bounds every observation is fitted and every open row is judged. Beyond them the cost of a proposal no longer
grows with the trials, and hardly with the space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.metrics import Direction
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.excess import log_excess
from cclsearch.propose.bayes.models import MetricModels
from cclsearch.propose.observations import observed_losses
from cclsearch.scoring.objective import Term, single_metric
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Predictor
from cclsearch.stats.kernel import Array, Features

Rows = NDArray[np.int64]

PENALTY = 3.0
"""Log units of cost for each log unit by which a limit is exceeded, when candidates are first ranked."""
MEMORY_MARGIN = 0.1
"""Log units below the memory limit from which a row ranks as slower; 0.1 is about 90 % of the limit."""
# Inverting their covariance costs the cube of their number.
MAX_OBSERVATIONS = 64
"""Number of observations that models are fitted to."""
MAX_CANDIDATES = 1500
"""Rows that get a full posterior; a larger space is first pruned by the calibrated closed form."""
# Each row then costs a few times as much.
MAX_CANDIDATES_WINDOWED = 512
"""The same once there are more observations than are fitted."""
MAX_LOADS = 4096
"""The same if trials measure several loads: loads of all candidates together."""
MAX_RANKED = 8192
"""Rows that the calibrated closed form ranks for each proposal; of a larger space, those that it ranked first when the
number of trials last doubled."""
NUM_IMPROVED = 8
"""Best observed configurations whose neighbours (one knob changed) are always candidates in such a space."""
_FIRST_RANKING = 16
"""Trials after which the rows are ranked anew for the first time."""
# This bounds the memory.
_CHUNK = 65_536
"""Rows that are ranked at once."""
_RANKINGS: WeakKeyDictionary[Features, tuple[object, NDArray[np.int32]]] = WeakKeyDictionary()
"""Features of a space -> the state of its last ranking, and the rows in that order."""


def select_window(observations: Sequence[Observation]) -> Sequence[Observation]:
    """Return all observations, or `MAX_OBSERVATIONS` of them in their order.

    Half of these have the lowest losses, a quarter are the latest, and a quarter are spread evenly over the others,
    failures included.
    """
    size = len(observations)
    if size <= MAX_OBSERVATIONS:
        return observations
    losses_n = observed_losses(observations)
    kept_n = np.zeros(size, dtype=bool)
    best = np.argsort(np.where(np.isfinite(losses_n), losses_n, np.inf), kind="stable")[: MAX_OBSERVATIONS // 2]
    kept_n[best[np.isfinite(losses_n[best])]] = True
    kept_n[-(MAX_OBSERVATIONS // 4) :] = True
    others = np.flatnonzero(~kept_n)
    count = MAX_OBSERVATIONS - int(kept_n.sum())
    kept_n[others[np.linspace(0, len(others) - 1, count).astype(np.int64)]] = True
    return tuple(observations[int(n)] for n in np.flatnonzero(kept_n))


def choose_candidates(models: MetricModels, view: SearchView, predictor: Predictor, groups: Sequence[Rows]) -> Rows:
    """Return the rows that get a full posterior, in order: as many from each group of open rows, if not all.

    `view` has all observations, the models those fitted.
    """
    most = MAX_CANDIDATES if len(view.observations) <= MAX_OBSERVATIONS else MAX_CANDIDATES_WINDOWED
    if (loads := predictor.loads) is not None:
        most = min(most, MAX_LOADS // len(loads.grid))
    if sum(map(len, groups)) <= most:
        return np.sort(np.concatenate(groups))
    most //= len(groups)
    if len(view.space) <= MAX_RANKED:
        best = [rows[np.argsort(_rank(models, rows), kind="stable")[:most]] for rows in groups]
        return np.sort(np.concatenate(best))
    order = _rank_space(models, view, predictor)
    near = _find_neighbours(view, most * len(groups) // 2)
    chosen = [near]
    for rows in groups:
        is_here_N = np.zeros(len(order), dtype=bool)
        is_here_N[rows] = True
        ranked = order[is_here_N[order]][: MAX_RANKED // len(groups)].astype(np.int64)
        first = ranked[np.argsort(_rank(models, ranked), kind="stable")]
        taken = int(np.isin(near, rows).sum())
        chosen.append(first[~np.isin(first, near)][: max(most - taken, 0)])
    return np.sort(np.concatenate(chosen))


def rank_rows(models: MetricModels, view: SearchView, predictor: Predictor) -> Rows:
    """Return rows by the calibrated closed forms, best first: all, or the first `MAX_RANKED` of a larger space."""
    if len(view.space) > MAX_RANKED:
        return _rank_space(models, view, predictor)[:MAX_RANKED].astype(np.int64)
    rows = np.arange(len(view.space))
    return rows[np.argsort(_rank(models, rows), kind="stable")]


def direct_term(models: MetricModels) -> Term | None:
    """Return the objective's term if the log of the loss is one metric's with a closed form; else None."""
    term, *others = models.view.objective.terms
    is_positive = term.direction is Direction.MINIMIZE or term.reciprocal
    return term if not others and term.weight is None and is_positive and models.base_of(term.metric) else None


def direct_sign(term: Term) -> float:
    """Return 1 if the loss grows with the term's metric, else -1."""
    return 1.0 if term.direction is Direction.MINIMIZE else -1.0


def _rank(models: MetricModels, rows: Rows) -> Array:
    """(m,) log of the expected cost by the calibrated closed forms, higher where memory or a bound is exceeded."""
    view, memory = models.view, models.predictor.memory
    term = direct_term(models) or single_metric(view.primary).terms[0]
    log_metric = models.expect(term.metric, rows)
    assert log_metric is not None
    rank = direct_sign(term) * log_metric
    if memory is not None:
        over = models.feasibility.memory.model(rows)(models.feasibility.memory.theta_P) - memory.log_limit
        rank = rank + PENALTY * np.maximum(over + MEMORY_MARGIN, 0.0)
    for constraint in view.objective.constraints:
        expected = models.expect(constraint.metric, rows)
        if expected is not None:
            rank = rank + PENALTY * log_excess(constraint, np.exp(expected))
    return rank


def _rank_space(models: MetricModels, view: SearchView, predictor: Predictor) -> NDArray[np.int32]:
    """(N,) every row, best first, by closed forms calibrated on the trials at the last doubling of their number.

    Rows of equal rank (a knob that no closed form knows) are in random order, the same for each call.
    """
    count = len(view.observations)
    first = 2 ** (count.bit_length() - 1) if count >= _FIRST_RANKING else 0
    trials = tuple(o.trial for o in view.observations[: min(first, _FIRST_RANKING)])
    key = (first, trials, view.objective, view.seed)
    features = predictor.features
    known = _RANKINGS.get(features)
    if known is not None and known[0] == key:
        return known[1]
    earlier = replace(view, observations=select_window(view.observations[:first]))
    then = MetricModels(earlier, predictor, models.earlier)
    size = len(view.space)
    rank_N = np.empty(size, dtype=np.float32)
    for start in range(0, size, _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, size))
        rank_N[rows] = _rank(then, rows)
    shuffled = np.random.default_rng(view.seed).permutation(size).astype(np.int32)
    order = shuffled[np.argsort(rank_N[shuffled], kind="stable")]
    _RANKINGS[features] = key, order
    return order


def _find_neighbours(view: SearchView, most: int) -> Rows:
    """Return up to `most` open rows that differ in one knob from one of the best observed configurations.

    Of each of these configurations a random choice, the same for each call, if there are more.
    """
    losses_n = observed_losses(view.observations)
    best = np.argsort(np.where(np.isfinite(losses_n), losses_n, np.inf), kind="stable")[:NUM_IMPROVED]
    found = [np.zeros(0, dtype=np.int64)]
    for n in best[np.isfinite(losses_n[best])]:
        row = view.observations[int(n)].row
        if row is not None:
            near = _change_one_knob(view.space, row)
            near = near[~view.taken_N[near]]
            shuffled = np.random.default_rng([view.seed, row]).permutation(near)
            found.append(shuffled[: most // NUM_IMPROVED])
    return np.unique(np.concatenate(found))


def _change_one_knob(space: Space, row: int) -> Rows:
    """Return the rows that differ from this one in exactly one knob."""
    codes_K = space.codes_NK[row]
    found = []
    for k, knob in enumerate(space.knobs):
        changed = np.repeat(codes_K[None], len(knob.choices), axis=0)
        changed[:, k] = np.arange(len(knob.choices))
        found.append(space.find_rows(np.delete(changed, codes_K[k], axis=0)))
    rows = np.concatenate(found)
    return rows[rows >= 0]
