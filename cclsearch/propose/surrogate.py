"""What the observations of a search say of every row: time, memory, and the probability that a trial succeeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cclsearch.predict.calibrate import Evidence, Posterior, Prior, calibrate
from cclsearch.predict.features import KernelShape
from cclsearch.predict.layout import Array
from cclsearch.predict.model import CardModel, Priors, load_priors, model_of
from cclsearch.propose.base import Observation, SearchView
from cclsearch.values import FailureKind

MOST_CANDIDATES = 1500
"""Rows that get a full posterior; a larger space is first sifted by the calibrated closed form."""
_DOUBT = {FailureKind.OUT_OF_MEMORY: 0.01, FailureKind.CRASHED: 0.15, FailureKind.ILLEGAL_CONFIG: 0.9}
"""Probability that a failure of this kind was not for lack of memory."""
_OTHER_DOUBT = 0.8
CRASH = Prior(np.array([-2.2]), np.array([0.4]), KernelShape(0.8, 1.5, 0.2, 0.6, 0.4), 1.0, 5.0)


@dataclass(frozen=True, eq=False)
class Belief:
    """What is believed of candidate rows, given everything seen."""

    rows_m: NDArray[np.int64]
    """Rows that may be proposed."""
    weight_k: Array
    """Of each of k rival models, which differ in how far the closed form may be off and how noisy the cluster is."""
    mean_km: Array
    """Log loss."""
    sd_km: Array
    fits_m: Array
    """Probability that the trial fits into memory."""
    works_m: Array
    """Probability that the trial succeeds."""
    memory_gib_m: Array
    best_log_loss: float | None
    """Log of the best loss so far."""
    time: Posterior
    memory: Posterior

    @property
    def mean_m(self) -> Array:
        """(m,) expected log loss."""
        return np.asarray(self.weight_k @ self.mean_km)

    @property
    def sd_m(self) -> Array:
        """(m,) standard deviation of the log loss."""
        second = self.weight_k @ (self.sd_km**2 + self.mean_km**2)
        return np.asarray(np.sqrt(np.maximum(second - self.mean_m**2, 1e-12)))


def believe(view: SearchView, priors: Priors | None = None) -> Belief | None:
    """The belief over rows that may still be proposed; None where there is none left."""
    priors = priors or load_priors()
    model = model_of(view.card, view.space)
    taken = {o.row for o in view.observations if o.row is not None} | view.pending
    open_rows = np.setdiff1d(np.arange(len(view.space)), np.array(sorted(taken), dtype=np.int64))
    if not len(open_rows):
        return None
    rivals, weights = _calibrate_rivals(model, view.observations, priors)
    time = rivals[int(np.argmax(weights))]
    memory = model.calibrate_memory(_memory_evidence(view.observations, model, priors), priors.memory)
    rows = _sift(model, time, memory, open_rows, priors)
    means, sds, shares = _ensemble(rivals, weights, rows, view)
    log_memory, memory_variance = memory.marginals(rows)
    spread = np.sqrt(memory_variance + priors.softness**2)
    fits = ndtr((model.log_limit - log_memory) / spread)
    stays = 1 - _crash_probability(view.observations, model, memory, priors, rows)
    return Belief(
        rows_m=rows,
        weight_k=shares,
        mean_km=means,
        sd_km=sds,
        fits_m=fits,
        works_m=fits * stays,
        memory_gib_m=np.exp(log_memory),
        best_log_loss=min((np.log(o.loss) for o in view.observations if o.loss is not None), default=None),
        time=time,
        memory=memory,
    )


DEVIATIONS = (0.6, 1.5, 3.0)
NOISES = (1.0, 4.0)
RIVAL_SHARE = 0.05


def _calibrate_rivals(
    model: CardModel, observations: Sequence[Observation], priors: Priors
) -> tuple[list[Posterior], Array]:
    """Models that differ in the size of deviations and of noise, with their posterior weights; the unlikely are dropped."""
    rivals, scores = [], []
    for noise in NOISES:
        for deviation in DEVIATIONS:
            prior = replace(priors.time, shape=priors.time.shape.scaled(deviation), noise=priors.time.noise * noise)
            rival = model.calibrate_time(_time_evidence(observations, replace(priors, time=prior)), prior)
            rivals.append(rival)
            scores.append(rival.log_evidence - 0.5 * (np.log(deviation / 1.0) ** 2) - 0.2 * np.log(noise))
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    kept = np.flatnonzero(weights >= RIVAL_SHARE)
    return [rivals[k] for k in kept], weights[kept] / weights[kept].sum()


ENSEMBLE = 48


def _ensemble(
    rivals: list[Posterior], weights: Array, rows: NDArray[np.int64], view: SearchView
) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng([view.seed, len(view.observations)])
    means, sds, shares = [], [], []
    for rival, weight in zip(rivals, weights, strict=True):
        count = max(4, round(ENSEMBLE * weight))
        normal = rng.standard_normal((count, len(rival.theta_P)))
        mean, variance = rival.ensemble(rows, normal)
        means.append(mean)
        sds.append(np.broadcast_to(np.sqrt(variance), mean.shape))
        shares.append(np.full(count, weight / count))
    return np.concatenate(means), np.concatenate(sds), np.concatenate(shares)


def temper(log_loss_n: Array, noise: float) -> Array:
    """(n,) noise of each measured loss: what is far slower than the best teaches little about what is fast.

    Beyond a factor of two, causes enter that no closed form holds (allocator retries, stalled transports), so the
    trust falls with the distance.
    """
    if not len(log_loss_n):
        return np.zeros(0)
    far = np.maximum(log_loss_n - log_loss_n.min() - np.log(2.0), 0.0)
    return np.asarray(np.sqrt(noise**2 + (0.3 * far) ** 2))


def _time_evidence(observations: Sequence[Observation], priors: Priors) -> Evidence:
    seen = [(o.row, np.log(o.loss)) for o in observations if o.row is not None and o.loss is not None]
    rows = np.array([row for row, _ in seen], dtype=np.int64)
    values = np.array([value for _, value in seen], dtype=np.float64)
    zeros = np.zeros(len(rows))
    return Evidence(
        rows, values, zeros.astype(np.int8), zeros, one_sided=True, noise_n=temper(values, priors.time.noise)
    )


def _memory_evidence(observations: Sequence[Observation], model: CardModel, priors: Priors) -> Evidence:
    rows, values, sides, doubts = [], [], [], []
    for o in observations:
        if o.row is None:
            continue
        rows.append(o.row)
        measured = o.peak_memory_gib if o.failure is None else None
        values.append(np.log(measured) if measured else np.nan)
        sides.append(0 if measured else -1 if o.failure is None else 1)
        doubts.append(0.0 if o.failure is None else _DOUBT.get(o.failure.kind, _OTHER_DOUBT))
    return Evidence(
        np.array(rows, dtype=np.int64),
        np.array(values, dtype=np.float64),
        np.array(sides, dtype=np.int8),
        np.array(doubts),
        limit=model.log_limit,
        softness=priors.softness,
    )


def _crash_probability(
    observations: Sequence[Observation], model: CardModel, memory: Posterior, priors: Priors, rows: NDArray[np.int64]
) -> Array:
    """(m,) probability of a failure that memory does not explain: a threshold on a Gaussian process over the knobs."""
    seen = [o for o in observations if o.row is not None]
    seen_rows = np.array([o.row for o in seen], dtype=np.int64)
    sides = np.array([-1 if o.failure is None else 1 for o in seen], dtype=np.int8)
    doubt = np.zeros(len(seen))
    if len(seen):
        log_memory, variance = memory.marginals(seen_rows)
        spread = np.sqrt(variance + priors.softness**2)
        fits = ndtr((model.log_limit - log_memory) / spread)
        prior_crash = 0.15
        doubt = np.where(sides > 0, (1 - fits) / (1 - fits + fits * prior_crash), 0.0)
        doubt = np.array(
            [
                1.0 if o.failure and o.failure.kind is FailureKind.OUT_OF_MEMORY else d
                for o, d in zip(seen, doubt, strict=True)
            ]
        )
    evidence = Evidence(seen_rows, np.full(len(seen), np.nan), sides, np.minimum(doubt, 0.98), limit=0.0, softness=1.0)

    def constant(at: NDArray[np.int64], theta: Array) -> Array:
        return np.full(len(at), theta[0])

    posterior = calibrate(constant, model.features, CRASH, evidence)
    mean, variance = posterior.marginals(rows)
    return np.asarray(ndtr(mean / np.sqrt(1.0 + variance)))


def _sift(
    model: CardModel, time: Posterior, memory: Posterior, rows: NDArray[np.int64], priors: Priors
) -> NDArray[np.int64]:
    if len(rows) <= MOST_CANDIDATES:
        return rows
    log_time = model.log_time(rows, time.theta_P)
    over = model.log_memory(rows, memory.theta_P) - model.log_limit
    order = np.argsort(log_time + 3.0 * np.maximum(over + 0.1, 0.0), kind="stable")
    return np.sort(rows[order[:MOST_CANDIDATES]])
