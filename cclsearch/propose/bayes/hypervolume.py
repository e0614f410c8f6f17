"""Proposals for several metrics: expected hypervolume improvement over any number of them.

The hypervolume is an expectation over random scalarizations (Golovin and Zhang 2020, lemma 5). So its expected
improvement is a mean over scalarizations and plausible models, in any dimension and without box decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cclsearch.core.metrics import NUM_ACCELERATORS, Direction
from cclsearch.propose.base import Observation, Proposal, SearchView
from cclsearch.propose.bayes.acquisition import MAX_FAILURE_PENALTY
from cclsearch.propose.bayes.models import Drawn, Draws
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.space.table import count_ranks
from cclsearch.stats.kernel import Array

# The worst candidates would stretch the front's range.
HIGH_QUANTILE = 0.9
"""Quantile of the expected costs that bounds the range."""
NUM_DIRECTIONS = 64
NUM_DRAWS = 48
MARGIN = 0.1
"""Distance of the reference point beyond the worst value, as a share of the range."""


class _Axis(NamedTuple):
    """One metric of the front, lower is better."""

    metric: str
    sign: float
    """-1 if greater values are better."""
    drawn: Drawn
    is_log: bool

    def place(self, value: float | None) -> float:
        """Return a measured value on the axis; NaN for one that has no place there."""
        if value is None or (self.is_log and value <= 0):
            return math.nan
        return self.sign * (math.log(value) if self.is_log else value)

    def draw(self, rng: np.random.Generator) -> Array:
        """(S, m) draws of measurements."""
        mean_km, sd_km, weight_k = self.drawn
        pick = rng.choice(len(weight_k), size=NUM_DRAWS, p=weight_k / weight_k.sum())
        return self.sign * (mean_km[pick] + sd_km[pick] * rng.standard_normal((NUM_DRAWS, mean_km.shape[1])))


def propose_pareto(
    view: SearchView, count: int, metrics: Sequence[tuple[str, str]], proposer: str = "pareto"
) -> list[Proposal]:
    """Return up to `count` untried configurations by expected improvement of the hypervolume of `metrics`.

    A metric is predicted, derived from a predicted one, or any of the observations' `metrics`, which is learned from
    them. Raises ValueError for fewer than two metrics.
    """
    if len(metrics) < 2:
        raise ValueError(f"a Pareto front needs at least two metrics; got {len(metrics)}")
    posterior = fit_posterior(view)
    if posterior is None:
        return []
    rng = np.random.default_rng([view.seed, len(view.observations), len(metrics)])
    axes = _find_axes(Draws(posterior.models, posterior.rows_m, rng), metrics)
    draws_SmD, front_nD = np.stack([axis.draw(rng) for axis in axes], axis=-1), _measured(view, axes)
    unit_SmD, unit_nD = _to_unit(draws_SmD, front_nD)
    lengths_LD = np.abs(rng.standard_normal((NUM_DIRECTIONS, len(axes))))
    lengths_LD /= np.linalg.norm(lengths_LD, axis=1, keepdims=True)
    reached_SL = np.broadcast_to(_reach(unit_nD, lengths_LD).max(axis=0, initial=0.0), (len(unit_SmD), NUM_DIRECTIONS))
    return [_propose(view, posterior, m, proposer) for m in _choose(posterior, unit_SmD, lengths_LD, reached_SL, count)]


def _find_axes(draws: Draws, metrics: Sequence[tuple[str, str]]) -> list[_Axis]:
    """Return the metrics that can be modelled; one that nothing predicts and no trial measured says nothing yet."""
    axes = []
    for name, direction in metrics:
        drawn, is_log = draws.find(name)
        if drawn is not None:
            axes.append(_Axis(name, -1.0 if direction == Direction.MAXIMIZE else 1.0, drawn, is_log))
    primary = draws.models.view.primary
    return axes or _find_axes(draws, [(primary.name, str(primary.direction))])


def _choose(
    posterior: CandidatePosterior, unit_SmD: Array, lengths_LD: Array, reached_SL: Array, count: int
) -> list[int]:
    reach_SmL = _reach(unit_SmD, lengths_LD)
    free = np.ones(unit_SmD.shape[1], dtype=bool)
    chosen: list[int] = []
    for _ in range(min(count, len(free))):
        gain_m = np.where(free, np.maximum(reach_SmL - reached_SL[:, None, :], 0.0).mean(axis=(0, 2)), 0.0)
        penalty = MAX_FAILURE_PENALTY * float(gain_m.max(initial=0.0))
        utility = np.where(free, posterior.utility_m(gain_m, penalty), -np.inf)
        m = int(np.argmax(utility))
        free[m] = False
        chosen.append(m)
        reached_SL = np.maximum(reached_SL, reach_SmL[:, m, :])
    return chosen


def _reach(unit: Array, lengths_LD: Array) -> Array:
    """(..., L) distance from the reference point that each point dominates along each direction, to the power D."""
    ratio = np.maximum(unit[..., None, :], 0.0) / lengths_LD
    return np.asarray(ratio.min(axis=-1) ** lengths_LD.shape[1])


def _to_unit(draws_SmD: Array, front_nD: Array) -> tuple[Array, Array]:
    """Return draws and measured points as distances from the reference point, in units of each metric's range."""
    expected_mD = draws_SmD.mean(axis=0)
    known = np.concatenate([front_nD, expected_mD]) if len(front_nD) else expected_mD
    low, high = known.min(axis=0), np.quantile(known, HIGH_QUANTILE, axis=0)
    if len(front_nD):
        high = np.maximum(high, np.median(front_nD, axis=0))
    span = np.maximum(high - low, 1e-9)
    reference = high + MARGIN * span
    return (reference - draws_SmD) / span, (reference - front_nD) / span


def _measured(view: SearchView, axes: Sequence[_Axis]) -> Array:
    """(n, D) measured metrics on the axes; trials without a loss or one of the metrics are left out."""
    ranked = [o for o in view.observations if o.loss is not None]
    points_nD = np.array([[axis.place(_value_of(o, axis.metric, view)) for axis in axes] for o in ranked])
    points_nD = points_nD.reshape(len(ranked), len(axes))
    return np.asarray(points_nD[np.isfinite(points_nD).all(axis=1)])


def _value_of(o: Observation, name: str, view: SearchView) -> float | None:
    if name == NUM_ACCELERATORS:
        return float(count_ranks(o.config))
    derived = view.predictor.derived.get(name)
    if derived and o.row is not None and (base := o.value(derived.base)) is not None:
        return float(derived.value(np.array([base]), np.array([o.row]))[0])
    return o.metrics.get(name)


def _propose(view: SearchView, posterior: CandidatePosterior, m: int, proposer: str) -> Proposal:
    expects = posterior.expected_outcome(m)
    rationale = f"largest expected gain of the Pareto front, P(success) {posterior.p_success_m[m]:.0%}"
    return Proposal(view.space.config(int(posterior.rows_m[m])), proposer, rationale, expects)
