"""What the observations of a search say of every row: time, memory, and the probability that a trial succeeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    mean_m: Array
    """Log loss."""
    covariance_mm: Array
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
    def sd_m(self) -> Array:
        """(m,) standard deviation of the log loss."""
        return np.asarray(np.sqrt(np.maximum(np.diag(self.covariance_mm), 1e-12)))


def believe(view: SearchView, priors: Priors | None = None) -> Belief | None:
    """The belief over rows that may still be proposed; None where there is none left."""
    priors = priors or load_priors()
    model = model_of(view.card, view.space)
    taken = {o.row for o in view.observations if o.row is not None} | view.pending
    open_rows = np.setdiff1d(np.arange(len(view.space)), np.array(sorted(taken), dtype=np.int64))
    if not len(open_rows):
        return None
    time = model.calibrate_time(_time_evidence(view.observations, priors), priors.time)
    memory = model.calibrate_memory(_memory_evidence(view.observations, model, priors), priors.memory)
    rows = _sift(model, time, memory, open_rows, priors)
    mean, covariance = time.at(rows)
    log_memory, memory_covariance = memory.at(rows)
    spread = np.sqrt(np.maximum(np.diag(memory_covariance), 0.0) + priors.softness**2)
    fits = ndtr((model.log_limit - log_memory) / spread)
    stays = 1 - _crash_probability(view.observations, model, memory, priors, rows)
    return Belief(
        rows_m=rows,
        mean_m=mean,
        covariance_mm=covariance,
        fits_m=fits,
        works_m=fits * stays,
        memory_gib_m=np.exp(log_memory),
        best_log_loss=min((np.log(o.loss) for o in view.observations if o.loss is not None), default=None),
        time=time,
        memory=memory,
    )


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
    return Evidence(rows, values, zeros.astype(np.int8), zeros, noise_n=temper(values, priors.time.noise))


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
        log_memory, covariance = memory.at(seen_rows)
        spread = np.sqrt(np.maximum(np.diag(covariance), 0.0) + priors.softness**2)
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
    mean, covariance = posterior.at(rows)
    return np.asarray(ndtr(mean / np.sqrt(1.0 + np.maximum(np.diag(covariance), 0.0))))


def _sift(
    model: CardModel, time: Posterior, memory: Posterior, rows: NDArray[np.int64], priors: Priors
) -> NDArray[np.int64]:
    if len(rows) <= MOST_CANDIDATES:
        return rows
    log_time = model.log_time(rows, time.theta_P)
    over = model.log_memory(rows, memory.theta_P) - model.log_limit
    order = np.argsort(log_time + 3.0 * np.maximum(over + 0.1, 0.0), kind="stable")
    return np.sort(rows[order[:MOST_CANDIDATES]])
