"""Proposals for several metrics: expected hypervolume improvement over any number of them.

The hypervolume is an expectation over random scalarizations (Golovin and Zhang 2020, lemma 5). So its expected
improvement is a mean over scalarizations and plausible models, in any dimension and without box decomposition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.metrics import NUM_ACCELERATORS, PEAK_MEMORY, Direction
from cclsearch.propose.base import Observation, Proposal, SearchView
from cclsearch.propose.bayes.acquisition import MAX_FAILURE_PENALTY
from cclsearch.propose.bayes.models import line_in_cost
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.space.table import count_ranks
from cclsearch.stats.calibration import CalibrationData, Prior, calibrate
from cclsearch.stats.kernel import Array

HIGH_QUANTILE = 0.9
"""Quantile of the expected costs that bounds the front's range: the worst candidates would stretch it."""
NUM_DIRECTIONS = 64
NUM_DRAWS = 48
MARGIN = 0.1
"""Distance of the reference point beyond the worst value, as a share of the range."""


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
    draws_SmD = np.stack([_draw(view, posterior, name, direction, rng) for name, direction in metrics], axis=-1)
    front_nD = _measured(view.observations, metrics, view)
    unit_SmD, unit_nD = _to_unit(draws_SmD, front_nD)
    lengths_LD = np.abs(rng.standard_normal((NUM_DIRECTIONS, len(metrics))))
    lengths_LD /= np.linalg.norm(lengths_LD, axis=1, keepdims=True)
    reached_SL = np.broadcast_to(_reach(unit_nD, lengths_LD).max(axis=0, initial=0.0), (len(unit_SmD), NUM_DIRECTIONS))
    return [_propose(view, posterior, m, proposer) for m in _choose(posterior, unit_SmD, lengths_LD, reached_SL, count)]


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


def _draw(
    view: SearchView, posterior: CandidatePosterior, name: str, direction: str, rng: np.random.Generator
) -> Array:
    """(S, m) draws of one metric, lower is better; logs if it is always positive."""
    sign = -1.0 if direction == Direction.MAXIMIZE else 1.0
    models, rows = posterior.models, posterior.rows_m
    base, shape = models.base_of(name), (NUM_DRAWS, len(rows))
    if base == NUM_ACCELERATORS:
        return np.broadcast_to(sign * np.log(view.space.num_accelerators_N[rows].astype(np.float64)), shape)
    if base == PEAK_MEMORY:
        mean, variance = models.feasibility.memory.marginals(rows)
        log_base = mean + np.sqrt(variance) * rng.standard_normal(shape)
    else:
        ensemble = models.ensemble(base or view.primary.name)
        means, sds, weights = ensemble.draw(rows, rng)
        pick = rng.choice(len(weights), size=NUM_DRAWS, p=weights / weights.sum())
        log_cost = means[pick] + sds[pick] * rng.standard_normal(shape)
        if base is None:
            return np.asarray(sign * _LearnedMetric(view, posterior, name).draw(rows, log_cost, rng))
        log_base = ensemble.form.metric.sign * log_cost
    return np.asarray(sign * models.derive(name, log_base, rows))


def _measured(observations: Sequence[Observation], metrics: Sequence[tuple[str, str]], view: SearchView) -> Array:
    """(n, D) measured metrics on the scale of `_draw`; trials without a loss or one of the metrics are left out."""
    points = []
    for o in observations:
        if o.loss is None:
            continue
        values = [_value_of(o, name, view) for name, _ in metrics]
        if any(value is None for value in values):
            continue
        signs = [-1.0 if direction == Direction.MAXIMIZE else 1.0 for _, direction in metrics]
        scaled = [_LearnedMetric.scale(view, name, value) for (name, _), value in zip(metrics, values, strict=True)]
        points.append([sign * value for sign, value in zip(signs, scaled, strict=True)])
    return np.array(points, dtype=np.float64).reshape(len(points), len(metrics))


def _value_of(o: Observation, name: str, view: SearchView) -> float | None:
    if name == NUM_ACCELERATORS:
        return float(count_ranks(o.config))
    derived = view.predictor.derived.get(name)
    if derived and o.row is not None and (base := o.value(derived.base)) is not None:
        return float(derived.value(np.array([base]), np.array([o.row]))[0])
    return o.metrics.get(name)


class _LearnedMetric:
    """A metric without a closed form: a line in the log cost of the primary metric plus a Gaussian process."""

    def __init__(self, view: SearchView, posterior: CandidatePosterior, name: str) -> None:
        primary, metric = posterior.models.primary, view.primary.name
        seen = [(o, v) for o in view.observations if o.row is not None and name in o.metrics and (v := o.value(metric))]
        values = np.array([self.scale(view, name, o.metrics[name]) for o, _ in seen], dtype=np.float64)
        self._center = float(values.mean()) if len(seen) else 0.0
        self._spread = max(float(values.std()), 1e-6) if len(seen) else 1.0
        log_cost = primary.form.metric.sign * np.log(np.array([value for _, value in seen], dtype=np.float64))
        rows = np.array([o.row for o, _ in seen], dtype=np.int64)
        known = dict(zip(rows.tolist(), log_cost.tolist(), strict=True))
        line = line_in_cost(primary, known, float(log_cost.mean()) if len(seen) else 0.0)
        shape = primary.most_likely.prior.shape.scaled(3.0)
        prior = Prior(np.zeros(2), np.array([1.0, 2.0]), shape, noise=0.1, dof=4.0)
        evidence = CalibrationData.measured(rows, (values - self._center) / self._spread)
        self._posterior = calibrate(line, posterior.models.predictor.features, prior, evidence)

    @staticmethod
    def scale(view: SearchView, name: str, value: float | None) -> float:
        """Return the value, as a log if this metric is positive in every trial."""
        values = [o.metrics[name] for o in view.observations if name in o.metrics]
        assert value is not None
        return float(np.log(value)) if value > 0 and all(v > 0 for v in values) else float(value)

    def draw(self, rows: NDArray[np.int64], log_cost_Sm: Array, rng: np.random.Generator) -> Array:
        """(S, m) draws of the metric, correlated with the drawn costs."""
        mean, variance = self._posterior.marginals(rows)
        slope = self._posterior.theta_P[1]
        moved = slope * (log_cost_Sm - log_cost_Sm.mean(axis=0))
        noise = np.sqrt(variance) * rng.standard_normal(log_cost_Sm.shape)
        return np.asarray(self._center + self._spread * (mean + moved + noise))


def _propose(view: SearchView, posterior: CandidatePosterior, m: int, proposer: str) -> Proposal:
    expects = posterior.expected_outcome(m)
    rationale = f"largest expected gain of the Pareto front, P(success) {posterior.p_success_m[m]:.0%}"
    return Proposal(view.space.config(int(posterior.rows_m[m])), proposer, rationale, expects)
