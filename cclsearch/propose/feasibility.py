"""Whether a trial will succeed: memory from the calibrated closed form, and failures that memory does not explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cclsearch.predict.calibrate import Curve, Evidence, Posterior, calibrate
from cclsearch.predict.layout import Array
from cclsearch.predict.model import CardModel, Priors
from cclsearch.propose.base import Observation
from cclsearch.values import FailureKind

_DOUBT = {FailureKind.OUT_OF_MEMORY: 0.01, FailureKind.CRASHED: 0.15}
_OTHER_DOUBT = 0.8
"""Probability that a failure was not for lack of memory, by what the launcher or the source called it."""


@dataclass(frozen=True, eq=False)
class Feasibility:
    """What the trials so far say of success."""

    model: CardModel
    priors: Priors
    memory: Posterior
    crash: Posterior

    def at(self, rows: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """(m,) expected GiB, probability of fitting, and probability of success."""
        log_gib, variance = self.memory.marginals(rows)
        fits = ndtr((self.model.log_limit - log_gib) / np.sqrt(variance + self.priors.softness**2))
        mean, spread = self.crash.marginals(rows)
        stays = ndtr(-mean / np.sqrt(1.0 + spread))
        return np.exp(log_gib), fits, fits * stays


def learn_feasibility(model: CardModel, observations: Sequence[Observation], priors: Priors) -> Feasibility:
    """Memory and crashes, given observations of rows of the space."""
    seen = [o for o in observations if o.row is not None]
    memory = model.calibrate_memory(_memory_evidence(seen, model, priors), priors.memory)
    evidence = _crash_evidence(seen, model, memory, priors)
    return Feasibility(model, priors, memory, calibrate(_constant, model.features, priors.crash, evidence))


def _memory_evidence(seen: Sequence[Observation], model: CardModel, priors: Priors) -> Evidence:
    """A measured peak where there is one; else on which side of the limit the configuration lies."""
    peaks = [o.peak_memory_gib if o.failure is None and o.peak_memory_gib else np.nan for o in seen]
    failed = np.array([o.failure is not None for o in seen], dtype=bool)
    values = np.log(np.array(peaks, dtype=np.float64))
    doubts = [0.0 if o.failure is None else _DOUBT.get(o.failure.kind, _OTHER_DOUBT) for o in seen]
    return Evidence(
        rows_n=_rows(seen),
        value_n=values,
        side_n=np.where(np.isfinite(values), 0, np.where(failed, 1, -1)).astype(np.int8),
        doubt_n=np.array(doubts, dtype=np.float64),
        limit=model.log_limit,
        softness=priors.softness,
    )


def _crash_evidence(seen: Sequence[Observation], model: CardModel, memory: Posterior, priors: Priors) -> Evidence:
    """A threshold at 0 for every trial; one that memory explains says little, one called out of memory nothing."""
    rows = _rows(seen)
    failed = np.array([o.failure is not None for o in seen], dtype=bool)
    explained = np.zeros(len(seen))
    if len(seen):
        log_gib, variance = memory.marginals(rows)
        fits = ndtr((model.log_limit - log_gib) / np.sqrt(variance + priors.softness**2))
        explained = np.where(failed, (1 - fits) / (1 - fits + fits * _DOUBT[FailureKind.CRASHED]), 0.0)
    named = [o.failure is not None and o.failure.kind is FailureKind.OUT_OF_MEMORY for o in seen]
    return Evidence(
        rows_n=rows,
        value_n=np.full(len(seen), np.nan),
        side_n=np.where(failed, 1, -1).astype(np.int8),
        doubt_n=np.where(named, 1.0, np.minimum(explained, 0.98)),
        limit=0.0,
        softness=1.0,
    )


def _rows(seen: Sequence[Observation]) -> NDArray[np.int64]:
    return np.array([o.row for o in seen], dtype=np.int64)


def _constant(rows: NDArray[np.int64]) -> Curve:
    """A rate that is the same everywhere but for what the residual learns."""
    return lambda theta: np.broadcast_to(theta[..., :1], (*theta.shape[:-1], len(rows)))
