"""The surrogate: the posterior of loss, memory and P(success) of each candidate, given the observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.propose.base import ExpectedOutcome, Observation, SearchView
from cclsearch.propose.bayes.feasibility import Feasibility, fit_feasibility
from cclsearch.propose.bayes.prior_hints import collect_hints, shift_prior
from cclsearch.propose.bayes.time_ensemble import TimeModels, fit_time_models
from cclsearch.stats.calibration import CalibrationData, Prior, RowModel, calibrate
from cclsearch.tasks.training.layout import Array
from cclsearch.tasks.training.prediction import CardModel, Priors, load_priors, model_of

MAX_CANDIDATES = 1500
"""Rows that get a full posterior; a larger space is first pruned by the calibrated closed form."""
MIN_LOG_TIME_SD = 1e-3
"""Minimum standard deviation of log step times for estimating how a loss depends on them."""
SLOPES = ((1.0, 0.5, 0.9), (0.0, 1.5, 0.1))
"""Prior of a loss's slope over log step time, in units of `loss_scale`: mean, standard deviation, probability. Most
losses grow with step time; a score that rewards few accelerators may fall with it."""
LOSS_NOISE = 0.02
"""Relative noise of a loss given the step time."""
RESIDUAL_FACTORS = (0.1, 1.0, 3.0)
"""Scale of the residual of a loss that step time does not explain, relative to the residual of the step time."""


@dataclass(frozen=True, eq=False)
class CandidatePosterior:
    """The posterior at m candidate rows, as k weighted models."""

    metric: str
    """The primary metric."""
    rows_m: NDArray[np.int64]
    """Candidate rows: they may be proposed."""
    weight_k: Array
    mean_km: Array
    """Expected loss on the loss scale: log step time, or as `loss_scale` says for another objective."""
    sd_km: Array
    """Standard deviation of one measured loss."""
    memory_gib_m: Array
    p_fits_m: Array
    """Probability that the trial fits into memory."""
    p_success_m: Array
    """Probability that the trial succeeds."""
    best: float | None
    """Best loss so far, on the same scale; None before the first success."""
    pending_kp: Array
    """Expected loss of the running trials."""
    log_time_m: Array
    """Expected log seconds per step."""
    time: TimeModels
    feasibility: Feasibility

    @property
    def mean_m(self) -> Array:
        """(m,) expected loss, on the scale."""
        return np.asarray(self.weight_k @ self.mean_km)

    @property
    def sd_m(self) -> Array:
        """(m,) standard deviation of a measured loss, on the scale."""
        second = self.weight_k @ (self.sd_km**2 + self.mean_km**2)
        return np.asarray(np.sqrt(np.maximum(second - self.mean_m**2, 1e-12)))

    def expected_outcome(self, m: int) -> ExpectedOutcome:
        """Return what candidate `m` is expected to measure."""
        expected = {self.metric: float(np.exp(self.log_time_m[m])), PEAK_MEMORY: float(self.memory_gib_m[m])}
        return ExpectedOutcome(expected, fits=float(self.p_fits_m[m]))


def fit_posterior(view: SearchView, priors: Priors | None = None) -> CandidatePosterior | None:
    """Return the posterior at the rows that may still be proposed; None if no row is left."""
    priors = apply_hints(priors or load_priors(), view)
    model = model_of(view.card, view.space)
    open_rows = np.flatnonzero(~view.taken_N)
    if not len(open_rows):
        return None
    earlier = _match_earlier(view)
    time = fit_time_models(model, view.observations, earlier, priors, view.primary.name)
    feasibility = fit_feasibility(model, (*earlier, *view.observations), priors)
    rows = _prune(model, time, feasibility, open_rows)
    pending = np.array(sorted(view.pending), dtype=np.int64)
    both = np.concatenate([rows, pending])
    rng = np.random.default_rng([view.seed, len(view.observations), len(pending)])
    mean, sd, weight = time.draw(both, rng)
    log_time = weight @ mean
    if not view.is_primary:
        mean, sd, weight = _loss_from_time(view, model, time, both, (mean, sd, weight))
    memory_gib, p_fits, p_success = feasibility.predict(rows)
    size = len(rows)
    return CandidatePosterior(
        metric=view.primary.name,
        rows_m=rows,
        weight_k=weight,
        mean_km=mean[:, :size],
        sd_km=sd[:, :size],
        memory_gib_m=memory_gib,
        p_fits_m=p_fits,
        p_success_m=p_success,
        best=_best(view),
        pending_kp=mean[:, size:],
        log_time_m=log_time[:size],
        time=time,
        feasibility=feasibility,
    )


def apply_hints(priors: Priors, view: SearchView) -> Priors:
    """Return the priors, shifted by the hints that proposers gave in this search."""
    hints = collect_hints(view)
    if not hints:
        return priors
    mean_P = priors.time.mean_P + shift_prior(hints, priors.time)
    return replace(priors, time=replace(priors.time, mean_P=mean_P))


def _match_earlier(view: SearchView) -> tuple[Observation, ...]:
    """Return the observations of earlier runs whose configuration is in this space, with its row."""
    matched = [(o, view.space.row(o.config)) for o in view.prior]
    return tuple(replace(o, row=row) for o, row in matched if row is not None)


def _prune(model: CardModel, time: TimeModels, feasibility: Feasibility, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return at most `MAX_CANDIDATES` rows, in order: those that the calibrated closed forms rank first."""
    if len(rows) <= MAX_CANDIDATES:
        return rows
    log_time = model.log_time(rows)(time.most_likely.theta_P)
    over = model.log_memory(rows)(feasibility.memory.theta_P) - model.log_limit
    # a row predicted above about 90 % of the memory limit (-0.1 in log units) ranks as if it were slower
    order = np.argsort(log_time + 3.0 * np.maximum(over + 0.1, 0.0), kind="stable")
    return np.sort(rows[order[:MAX_CANDIDATES]])


def loss_scale(seen: Sequence[Observation], metric: str) -> tuple[bool, float, float]:
    """Return whether losses are logged, and the center and spread that standardize them.

    One unit of a scaled loss equals one unit of log step time. Until the trials' step times differ, losses are scaled
    by themselves: log losses stay as they are, others are divided by the absolute value of their median.
    """
    losses = np.array([o.loss for o in seen], dtype=np.float64)
    is_log = bool(np.all(losses > 0))
    values = np.log(losses) if is_log else losses
    center = float(np.median(values))
    log_time = np.log([value for o in seen if (value := o.value(metric))])
    time_spread = float(np.std(log_time)) if len(log_time) == len(losses) else 0.0
    if time_spread > MIN_LOG_TIME_SD and np.std(values) > 0:
        return is_log, center, float(np.std(values)) / time_spread
    return is_log, center, 1.0 if is_log else max(abs(center), 1e-6)


def _best(view: SearchView) -> float | None:
    ranked = [o for o in view.observations if o.loss is not None]
    lowest = min((o.loss for o in ranked if o.loss is not None), default=None)
    if lowest is None:
        return None
    if view.is_primary:
        return float(np.log(lowest))
    is_log, center, spread = loss_scale(ranked, view.primary.name)
    return float(((np.log(lowest) if is_log else lowest) - center) / spread)


def _loss_from_time(
    view: SearchView, model: CardModel, time: TimeModels, rows: NDArray[np.int64], drawn: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Turn models of the time (`drawn`: means, standard deviations, weights at these rows) into models of the loss.

    A loss is a line in the log step time plus a Gaussian process over the knobs; hypotheses about slope and residual
    are weighted by their evidence.
    """
    seen = [o for o in view.observations if o.row is not None and o.loss is not None]
    is_log, center, spread = loss_scale(seen, view.primary.name) if seen else (True, 0.0, 1.0)
    losses = np.array([o.loss for o in seen], dtype=np.float64)
    values = ((np.log(losses) if is_log else losses) - center) / spread
    seen_rows = np.array([o.row for o in seen], dtype=np.int64)
    name = view.primary.name
    measured = {int(o.row): float(np.log(v)) for o in seen if o.row is not None and (v := o.value(name))}
    seen_time = np.array(list(measured.values()) or time.mean(rows))
    center_time = float(np.median(seen_time))

    def line_in_log_time(at: NDArray[np.int64]) -> RowModel:
        expected = zip(at.tolist(), time.mean(at).tolist(), strict=True)
        log_time = np.array([measured.get(row, value) for row, value in expected]) - center_time
        return lambda theta: np.asarray(theta[..., :1] + theta[..., 1:2] * log_time)

    zeros = np.zeros(len(seen))
    evidence = CalibrationData(seen_rows, values, zeros.astype(np.int8), zeros)
    shape = time.most_likely.prior.shape
    hypotheses, scores = [], []
    for (slope, slope_sd, probability), residual in product(SLOPES, RESIDUAL_FACTORS):
        prior = Prior(np.array([0.0, slope]), np.array([1.0, slope_sd]), shape.scaled(residual), LOSS_NOISE, dof=4.0)
        hypotheses.append(calibrate(line_in_log_time, model.features, prior, evidence))
        scores.append(hypotheses[-1].log_evidence + float(np.log(probability)))
    score_h = np.array(scores)
    weight_h = np.exp(score_h - score_h.max())
    weight_h /= weight_h.sum()
    mean_km, sd_km, weight_k = drawn
    deviation_km = mean_km - weight_k @ mean_km
    means, sds = [], []
    for hypothesis in hypotheses:
        mean_m, variance_m = hypothesis.marginals(rows)
        fitted_slope = float(hypothesis.theta_P[1])
        means.append(mean_m + fitted_slope * deviation_km)
        sds.append(np.sqrt(variance_m + (fitted_slope * sd_km) ** 2))
    return np.concatenate(means), np.concatenate(sds), np.outer(weight_h, weight_k).ravel()
