"""What the observations of a search say of every row: loss, memory, and the probability that a trial succeeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.feasibility import Feasibility, fit_feasibility
from cclsearch.propose.bayes.prior_hints import collect_hints, shift_prior
from cclsearch.propose.bayes.time_ensemble import TimeModels, fit_time_models
from cclsearch.stats.calibration import CalibrationData, Prior, RowModel, calibrate
from cclsearch.tasks.training.layout import Array
from cclsearch.tasks.training.prediction import CardModel, Priors, load_priors, model_of

MAX_CANDIDATES = 1500
"""Rows that get a full posterior; a larger space is first sifted by the calibrated closed form."""


@dataclass(frozen=True, eq=False)
class CandidatePosterior:
    """What is believed of m candidate rows, by k plausible models."""

    rows_m: NDArray[np.int64]
    """Rows that may be proposed."""
    weight_k: Array
    mean_km: Array
    """Loss on `scale`'s scale."""
    sd_km: Array
    """Of one measurement."""
    memory_gib_m: Array
    p_fits_m: Array
    """Probability that the trial fits into memory."""
    p_success_m: Array
    """Probability that the trial succeeds."""
    best: float | None
    """Best loss so far, on the same scale; None where nothing has succeeded."""
    pending_kp: Array
    """What the models expect of the rows that run now."""
    log_time_m: Array
    """Log seconds per step that are expected."""
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


def fit_posterior(view: SearchView, priors: Priors | None = None) -> CandidatePosterior | None:
    """The belief over rows that may still be proposed; None where there is none left."""
    priors = apply_hints(priors or load_priors(), view)
    model = model_of(view.card, view.space)
    open_rows = _open_rows(view)
    if not len(open_rows):
        return None
    earlier = _place_earlier(view)
    time = fit_time_models(model, view.observations, earlier, priors)
    feasibility = fit_feasibility(model, (*earlier, *view.observations), priors)
    rows = _sift(model, time, feasibility, open_rows)
    pending = np.array(sorted(view.pending), dtype=np.int64)
    both = np.concatenate([rows, pending])
    rng = np.random.default_rng([view.seed, len(view.observations), len(pending)])
    mean, sd, weight = time.draw(both, rng)
    log_time = weight @ mean
    if view.objective != "step_time":
        mean, sd, weight = _loss_from_time(view, model, time, both, (mean, sd, weight))
    memory_gib, fits, works = feasibility.at(rows)
    size = len(rows)
    return CandidatePosterior(
        rows_m=rows,
        weight_k=weight,
        mean_km=mean[:, :size],
        sd_km=sd[:, :size],
        memory_gib_m=memory_gib,
        p_fits_m=fits,
        p_success_m=works,
        best=_best(view),
        pending_kp=mean[:, size:],
        log_time_m=log_time[:size],
        time=time,
        feasibility=feasibility,
    )


def apply_hints(priors: Priors, view: SearchView) -> Priors:
    """The priors with what proposers said in this search that they have learnt of the framework."""
    held = collect_hints(view)
    if not held:
        return priors
    mean_P = priors.time.mean_P + shift_prior(held, priors.time)
    return replace(priors, time=replace(priors.time, mean_P=mean_P))


def _open_rows(view: SearchView) -> NDArray[np.int64]:
    free = np.ones(len(view.space), dtype=bool)
    free[[o.row for o in view.observations if o.row is not None]] = False
    free[list(view.closed)] = False
    return np.flatnonzero(free)


def _place_earlier(view: SearchView) -> tuple[Observation, ...]:
    """Observations of earlier runs whose configuration is a member of this space, at its row here."""
    placed = [(o, view.space.row(o.config)) for o in view.prior]
    return tuple(replace(o, row=row) for o, row in placed if row is not None)


def _sift(model: CardModel, time: TimeModels, feasibility: Feasibility, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows that the calibrated closed forms find worth a closer look, in order."""
    if len(rows) <= MAX_CANDIDATES:
        return rows
    log_time = model.log_time(rows)(time.likeliest.theta_P)
    over = model.log_memory(rows)(feasibility.memory.theta_P) - model.log_limit
    order = np.argsort(log_time + 3.0 * np.maximum(over + 0.1, 0.0), kind="stable")
    return np.sort(rows[order[:MAX_CANDIDATES]])


def loss_scale(seen: Sequence[Observation]) -> tuple[bool, float, float]:
    """Whether losses are taken as logs, and the centre and spread by which they are scaled: to units of log step time.

    A loss that moves by so much where the step takes 1 % longer counts as 1 % worse by that; before two trials have
    told, losses are taken relatively, as step times are.
    """
    losses = np.array([o.loss for o in seen], dtype=np.float64)
    is_log = bool(np.all(losses > 0))
    values = np.log(losses) if is_log else losses
    centre = float(np.median(values))
    log_time = np.log([o.step_time_s for o in seen if o.step_time_s])
    time_spread = float(np.std(log_time)) if len(log_time) == len(losses) else 0.0
    if time_spread > MIN_LOG_TIME_SD and np.std(values) > 0:
        return is_log, centre, float(np.std(values)) / time_spread
    return is_log, centre, 1.0 if is_log else max(abs(centre), 1e-6)


def _best(view: SearchView) -> float | None:
    ranked = [o for o in view.observations if o.loss is not None]
    lowest = min((o.loss for o in ranked if o.loss is not None), default=None)
    if lowest is None:
        return None
    if view.objective == "step_time":
        return float(np.log(lowest))
    is_log, centre, spread = loss_scale(ranked)
    return float(((np.log(lowest) if is_log else lowest) - centre) / spread)


MIN_LOG_TIME_SD = 1e-3
"""Spread of log step times below which they do not tell how a loss goes with them."""
SLOPES = ((1.0, 0.5, 0.9), (0.0, 1.5, 0.1))
"""How a loss may go with the log step time, in units of `loss_scale`: slope, its deviation, how probable that is. It
goes with it as a rule, but a score of few accelerators goes against it."""
LOSS_NOISE = 0.02
"""Relative noise of a loss whose step time is known."""
RESIDUALS = (0.1, 1.0, 3.0)
"""How much of a loss that is no step time may lie in what step time does not say, over the step time's own residual."""


def _loss_from_time(
    view: SearchView, model: CardModel, time: TimeModels, rows: NDArray[np.int64], drawn: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """The models of the time (their means, deviations and weights at these rows) as models of a loss of any kind.

    The loss is a line in the log time plus a Gaussian process over the knobs; the evidence weighs how large that is.
    """
    seen = [o for o in view.observations if o.row is not None and o.loss is not None]
    is_log, centre, spread = loss_scale(seen) if seen else (True, 0.0, 1.0)
    losses = np.array([o.loss for o in seen], dtype=np.float64)
    values = ((np.log(losses) if is_log else losses) - centre) / spread
    seen_rows = np.array([o.row for o in seen], dtype=np.int64)
    measured = {int(o.row): float(np.log(o.step_time_s)) for o in seen if o.row is not None and o.step_time_s}
    seen_time = np.array(list(measured.values()) or time.mean(rows))
    centre_time = float(np.median(seen_time))

    def line(at: NDArray[np.int64]) -> RowModel:
        expected = zip(at.tolist(), time.mean(at).tolist(), strict=True)
        log_time = np.array([measured.get(row, value) for row, value in expected]) - centre_time
        return lambda theta: np.asarray(theta[..., :1] + theta[..., 1:2] * log_time)

    zeros = np.zeros(len(seen))
    evidence = CalibrationData(seen_rows, values, zeros.astype(np.int8), zeros)
    shape = time.likeliest.prior.shape
    hypotheses, scores = [], []
    for (slope, doubt, probability), size in product(SLOPES, RESIDUALS):
        prior = Prior(np.array([0.0, slope]), np.array([1.0, doubt]), shape.scaled(size), LOSS_NOISE, dof=4.0)
        hypotheses.append(calibrate(line, model.features, prior, evidence))
        scores.append(hypotheses[-1].log_evidence + float(np.log(probability)))
    score_h = np.array(scores)
    weight_h = np.exp(score_h - score_h.max())
    weight_h /= weight_h.sum()
    mean_km, sd_km, weight_k = drawn
    off_km = mean_km - weight_k @ mean_km
    means, sds = [], []
    for hypothesis in hypotheses:
        mean_m, variance_m = hypothesis.marginals(rows)
        steepness = float(hypothesis.theta_P[1])
        means.append(mean_m + steepness * off_km)
        sds.append(np.sqrt(variance_m + (steepness * sd_km) ** 2))
    return np.concatenate(means), np.concatenate(sds), np.outer(weight_h, weight_k).ravel()
