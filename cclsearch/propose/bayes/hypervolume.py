"""Proposals for several metrics: expected hypervolume improvement over any number of them.

The hypervolume is an expectation over random scalarizations (Golovin and Zhang 2020, lemma 5). So its expected
improvement is a mean over scalarizations and plausible models, in any dimension and without box decomposition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.arch import tokens_per_step
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.propose.base import Observation, Proposal, SearchView
from cclsearch.propose.bayes.acquisition import MAX_FAILURE_PENALTY
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.space.table import count_ranks
from cclsearch.stats.calibration import CalibrationData, Prior, RowModel, calibrate
from cclsearch.tasks.training.layout import Array
from cclsearch.tasks.training.prediction import model_of

Direction = Literal["minimize", "maximize"]
NUM_DIRECTIONS = 64
NUM_DRAWS = 48
MARGIN = 0.1
"""Distance of the reference point beyond the worst value, as a share of the range."""

_FROM_TIME: dict[str, Callable[[SearchView, Array, Array], Array]] = {
    "step_time_s": lambda view, time_s, ranks: time_s,
    "step_time": lambda view, time_s, ranks: time_s,
    "tokens_per_s": lambda view, time_s, ranks: tokens_per_step(view.card) / time_s,
    "tokens_per_s_per_accelerator": lambda view, time_s, ranks: tokens_per_step(view.card) / time_s / ranks,
}
"""Metrics that are computed from the step time and the number of accelerators instead of being learned."""


def propose_pareto(
    view: SearchView, count: int, metrics: Sequence[tuple[str, Direction]], proposer: str = "pareto"
) -> list[Proposal]:
    """Return up to `count` untried configurations by expected improvement of the hypervolume of `metrics`.

    A metric is `num_accelerators`, `peak_memory_gib`, one computed from the step time, or any of the observations'
    `metrics`, which is learned from them. Raises ValueError for fewer than two metrics.
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
        gain_m = np.maximum(reach_SmL - reached_SL[:, None, :], 0.0).mean(axis=(0, 2))
        penalty = MAX_FAILURE_PENALTY * float(gain_m.max(initial=0.0))
        utility = np.where(free, gain_m * posterior.p_success_m - penalty * (1 - posterior.p_success_m), -np.inf)
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
    low, high = known.min(axis=0), np.quantile(known, 0.9, axis=0)
    if len(front_nD):
        high = np.maximum(high, np.median(front_nD, axis=0))
    span = np.maximum(high - low, 1e-9)
    reference = high + MARGIN * span
    return (reference - draws_SmD) / span, (reference - front_nD) / span


def _draw(
    view: SearchView, posterior: CandidatePosterior, name: str, direction: Direction, rng: np.random.Generator
) -> Array:
    """(S, m) draws of one metric, lower is better; logs if it is always positive."""
    sign = 1.0 if direction == "minimize" else -1.0
    ranks = view.space.num_accelerators_N[posterior.rows_m].astype(np.float64)
    shape = (NUM_DRAWS, len(posterior.rows_m))
    if name == "num_accelerators":
        return np.broadcast_to(sign * np.log(ranks), shape)
    if name == "peak_memory_gib":
        mean, variance = posterior.feasibility.memory.marginals(posterior.rows_m)
        return np.asarray(sign * (mean + np.sqrt(variance) * rng.standard_normal(shape)))
    models, sds, weights = posterior.time.draw(posterior.rows_m, rng)
    pick = rng.choice(len(weights), size=NUM_DRAWS, p=weights / weights.sum())
    log_time = models[pick] + sds[pick] * rng.standard_normal(shape)
    if name in _FROM_TIME:
        return np.asarray(sign * np.log(_FROM_TIME[name](view, np.exp(log_time), ranks)))
    return np.asarray(sign * _LearnedMetric(view, posterior, name).draw(posterior.rows_m, log_time, rng))


def _measured(observations: Sequence[Observation], metrics: Sequence[tuple[str, Direction]], view: SearchView) -> Array:
    """(n, D) measured metrics on the scale of `_draw`; trials without a loss or one of the metrics are left out."""
    points = []
    for o in observations:
        if o.value("step_time_s") is None:
            continue
        values = [_value_of(o, name, view) for name, _ in metrics]
        if any(value is None for value in values):
            continue
        signs = [1.0 if direction == "minimize" else -1.0 for _, direction in metrics]
        scaled = [_LearnedMetric.scale(view, name, value) for (name, _), value in zip(metrics, values, strict=True)]
        points.append([sign * value for sign, value in zip(signs, scaled, strict=True)])
    return np.array(points, dtype=np.float64).reshape(len(points), len(metrics))


def _value_of(o: Observation, name: str, view: SearchView) -> float | None:
    ranks = count_ranks(o.config)
    if name == "num_accelerators":
        return float(ranks)
    if name == "peak_memory_gib":
        return o.metrics.get(PEAK_MEMORY)
    if name in _FROM_TIME and (time_s := o.value("step_time_s")) is not None:
        return float(_FROM_TIME[name](view, np.array(time_s), np.array(float(ranks))))
    return o.metrics.get(name)


class _LearnedMetric:
    """A metric without a closed form: a line in the log step time plus a Gaussian process over the knobs."""

    def __init__(self, view: SearchView, posterior: CandidatePosterior, name: str) -> None:
        seen = [
            o
            for o in view.observations
            if o.row is not None and o.value("step_time_s") is not None and name in o.metrics
        ]
        self._values = np.array([self.scale(view, name, o.metrics[name]) for o in seen], dtype=np.float64)
        self._center = float(self._values.mean()) if len(seen) else 0.0
        self._spread = max(float(self._values.std()), 1e-6) if len(seen) else 1.0
        log_time = np.log(np.array([o.value("step_time_s") for o in seen], dtype=np.float64))
        self._center_time = float(log_time.mean()) if len(seen) else 0.0
        rows = np.array([o.row for o in seen], dtype=np.int64)
        known = dict(zip(rows.tolist(), (log_time - self._center_time).tolist(), strict=True))
        expected = posterior.time

        def line_in_log_time(at: NDArray[np.int64]) -> RowModel:
            times = expected.mean(at) - self._center_time
            times = np.array([known.get(int(row), time) for row, time in zip(at, times, strict=True)])
            return lambda theta: np.asarray(theta[..., :1] + theta[..., 1:2] * times)

        shape = posterior.time.most_likely.prior.shape.scaled(3.0)
        prior = Prior(np.zeros(2), np.array([1.0, 2.0]), shape, noise=0.1, dof=4.0)
        zeros = np.zeros(len(seen))
        standard = (self._values - self._center) / self._spread
        evidence = CalibrationData(rows, standard, zeros.astype(np.int8), zeros)
        self._posterior = calibrate(line_in_log_time, model_of(view.card, view.space).features, prior, evidence)

    @staticmethod
    def scale(view: SearchView, name: str, value: float | None) -> float:
        """Return the value, as a log if this metric is positive in every trial."""
        values = [o.metrics[name] for o in view.observations if name in o.metrics]
        assert value is not None
        return float(np.log(value)) if value > 0 and all(v > 0 for v in values) else float(value)

    def draw(self, rows: NDArray[np.int64], log_time_Sm: Array, rng: np.random.Generator) -> Array:
        """(S, m) draws of the metric, correlated with the drawn step times."""
        mean, variance = self._posterior.marginals(rows)
        slope = self._posterior.theta_P[1]
        moved = slope * (log_time_Sm - log_time_Sm.mean(axis=0))
        noise = np.sqrt(variance) * rng.standard_normal(log_time_Sm.shape)
        return np.asarray(self._center + self._spread * (mean + moved + noise))


def _propose(view: SearchView, posterior: CandidatePosterior, m: int, proposer: str) -> Proposal:
    expects = posterior.expected_outcome(m)
    rationale = f"largest expected gain of the Pareto front, P(success) {posterior.p_success_m[m]:.0%}"
    return Proposal(view.space.config(int(posterior.rows_m[m])), proposer, rationale, expects)
