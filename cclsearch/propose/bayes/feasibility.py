"""Whether a trial will succeed: memory from the calibrated closed form, and failures that memory does not explain.

Where a space does not say whether data-parallel ranks share out the optimizer's states, or tensor-parallel ranks the
sequence, one of both holds for all of it. As long as no peak was measured, these are rival models, weighed by how well
each would have foretold what fitted and what did not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cclsearch.core.values import FailureKind
from cclsearch.propose.base import Observation
from cclsearch.stats.calibration import CalibrationData, Posterior, Prior, RowModel, calibrate
from cclsearch.tasks.training.layout import Array
from cclsearch.tasks.training.memory import MULTIPLIERS
from cclsearch.tasks.training.prediction import CardModel, Priors

_DOUBT = {FailureKind.OUT_OF_MEMORY: 0.01, FailureKind.CRASHED: 0.15}
_OTHER_DOUBT = 0.8
"""Probability that a failure was not for lack of memory, by what the launcher or the source called it."""
_UNDECLARED = {
    "unsharded": ((0.0, 0.3), (-5.0, 0.7)),
    "replicated": ((0.0, 0.4), (-5.0, 0.6)),
    "gradients": ((0.0, None), (float(np.log(0.5)), None)),
}
"""Part of the memory -> its log multiplier and how probable that is (None: as its fitted prior says), for each way in
which frameworks do it: states whole or shared out, sequences whole or shared out, gradients of four bytes or of two."""
_WIDTH = 0.15
"""How far such a log multiplier may be off."""
_MIN_WEIGHT = 0.02


@dataclass(frozen=True, eq=False)
class Feasibility:
    """What the trials so far say of success."""

    model: CardModel
    priors: Priors
    hypotheses: tuple[Posterior, ...]
    """Models of the memory."""
    weight_h: Array
    crash: Posterior

    @property
    def memory(self) -> Posterior:
        """The likeliest model of the memory."""
        return self.hypotheses[int(np.argmax(self.weight_h))]

    def at(self, rows: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """(m,) expected GiB, probability of fitting, and probability of success."""
        log_gib, fits = np.zeros(len(rows)), np.zeros(len(rows))
        for hypothesis, weight in zip(self.hypotheses, self.weight_h, strict=True):
            mean, variance = hypothesis.marginals(rows)
            log_gib += weight * mean
            fits += weight * ndtr((self.model.log_limit - mean) / np.sqrt(variance + self.priors.softness**2))
        mean, spread = self.crash.marginals(rows)
        stays = ndtr(-mean / np.sqrt(1.0 + spread))
        return np.exp(log_gib), fits, fits * stays


def fit_feasibility(model: CardModel, observations: Sequence[Observation], priors: Priors) -> Feasibility:
    """Memory and crashes, given observations of rows of the space."""
    seen = [o for o in observations if o.row is not None]
    evidence = _memory_evidence(seen, model, priors)
    hypotheses, weights = _learn_memory(model, evidence, priors.memory)
    crashes = _crash_evidence(seen, model, hypotheses[int(np.argmax(weights))], priors)
    return Feasibility(model, priors, hypotheses, weights, calibrate(_constant, model.features, priors.crash, crashes))


def _learn_memory(model: CardModel, evidence: CalibrationData, prior: Prior) -> tuple[tuple[Posterior, ...], Array]:
    """Rival posteriors with their weights; one alone where peaks were measured: they tell the parts apart."""
    if np.any(evidence.censoring_n == 0):
        return (model.calibrate_memory(evidence, prior),), np.ones(1)
    found = [
        (*_prequential_log_lik(model, evidence, hypothesis), log_prior)
        for hypothesis, log_prior in _hypothesis_priors(model, prior)
    ]
    score_h = np.array([log_evidence + log_prior for _, log_evidence, log_prior in found])
    weight_h = np.exp(score_h - score_h.max())
    weight_h /= weight_h.sum()
    kept = np.flatnonzero(weight_h >= _MIN_WEIGHT)
    return tuple(found[r][0] for r in kept), weight_h[kept] / weight_h[kept].sum()


_FITS: WeakKeyDictionary[CardModel, OrderedDict[Hashable, tuple[Posterior, float]]] = WeakKeyDictionary()
_MAX_CACHED = 256


def _prequential_log_lik(model: CardModel, evidence: CalibrationData, prior: Prior) -> tuple[Posterior, float]:
    """The posterior after what was seen, and the log probability with which the model foretold it, one after another.

    What came before the last observation is remembered: a search asks again after each trial.
    """
    memory = _FITS.setdefault(model, OrderedDict())
    said = list(
        zip(evidence.rows_n.tolist(), evidence.censoring_n.tolist(), evidence.label_noise_n.tolist(), strict=True)
    )
    hypothesis = (prior.mean_P.tobytes(), prior.sd_P.tobytes(), evidence.limit)
    start = next((n for n in range(len(said), 0, -1) if (hypothesis, tuple(said[:n])) in memory), 0)
    posterior, total = (
        memory[hypothesis, tuple(said[:start])] if start else (_calibrate_first(model, evidence, prior, 0), 0.0)
    )
    for n in range(start, len(said)):
        mean, variance = posterior.marginals(evidence.rows_n[n : n + 1])
        sides = evidence.censoring_n[n] * (mean - evidence.limit) / np.sqrt(variance + evidence.softness**2)
        doubt = evidence.label_noise_n[n]
        total += float(np.log(max(doubt + (1 - doubt) * float(ndtr(sides[0])), 1e-6)))
        posterior = _calibrate_first(model, evidence, prior, n + 1)
        memory[hypothesis, tuple(said[: n + 1])] = posterior, total
    while len(memory) > _MAX_CACHED:
        memory.popitem(last=False)
    return posterior, total


def _calibrate_first(model: CardModel, evidence: CalibrationData, prior: Prior, count: int) -> Posterior:
    """The posterior after the first observations."""
    first = {name: getattr(evidence, name)[:count] for name in ("rows_n", "value_n", "censoring_n", "label_noise_n")}
    return model.calibrate_memory(replace(evidence, **first), prior)


def _hypothesis_priors(model: CardModel, prior: Prior) -> Iterator[tuple[Prior, float]]:
    """Each combination of the ways, with its log probability but for a constant."""
    names = [name for name in _UNDECLARED if np.any(getattr(model.memory_parts, name) > 0)]
    for ways in product(*(_UNDECLARED[name] for name in names)):
        mean_P, sd_P, log_prior = prior.mean_P.copy(), prior.sd_P.copy(), 0.0
        for name, (log_multiplier, probability) in zip(names, ways, strict=True):
            at = MULTIPLIERS.index(name)
            mean_P[at], sd_P[at] = log_multiplier, _WIDTH
            if probability is None:
                log_prior -= 0.5 * float((log_multiplier - prior.mean_P[at]) / prior.sd_P[at]) ** 2
            else:
                log_prior += float(np.log(probability))
        yield replace(prior, mean_P=mean_P, sd_P=sd_P), log_prior


def _memory_evidence(seen: Sequence[Observation], model: CardModel, priors: Priors) -> CalibrationData:
    """A measured peak where there is one; else on which side of the limit the configuration lies."""
    peaks = [o.peak_memory_gib if o.failure is None and o.peak_memory_gib else np.nan for o in seen]
    failed = np.array([o.failure is not None for o in seen], dtype=bool)
    values = np.log(np.array(peaks, dtype=np.float64))
    doubts = [0.0 if o.failure is None else _DOUBT.get(o.failure.kind, _OTHER_DOUBT) for o in seen]
    return CalibrationData(
        rows_n=_rows(seen),
        value_n=values,
        censoring_n=np.where(np.isfinite(values), 0, np.where(failed, 1, -1)).astype(np.int8),
        label_noise_n=np.array(doubts, dtype=np.float64),
        limit=model.log_limit,
        softness=priors.softness,
    )


def _crash_evidence(
    seen: Sequence[Observation], model: CardModel, memory: Posterior, priors: Priors
) -> CalibrationData:
    """A threshold at 0 for every trial; one that memory explains says little, one called out of memory nothing."""
    rows = _rows(seen)
    failed = np.array([o.failure is not None for o in seen], dtype=bool)
    explained = np.zeros(len(seen))
    if len(seen):
        log_gib, variance = memory.marginals(rows)
        fits = ndtr((model.log_limit - log_gib) / np.sqrt(variance + priors.softness**2))
        explained = np.where(failed, (1 - fits) / (1 - fits + fits * _DOUBT[FailureKind.CRASHED]), 0.0)
    named = [o.failure is not None and o.failure.kind is FailureKind.OUT_OF_MEMORY for o in seen]
    return CalibrationData(
        rows_n=rows,
        value_n=np.full(len(seen), np.nan),
        censoring_n=np.where(failed, 1, -1).astype(np.int8),
        label_noise_n=np.where(named, 1.0, np.minimum(explained, 0.98)),
        limit=0.0,
        softness=1.0,
    )


def _rows(seen: Sequence[Observation]) -> NDArray[np.int64]:
    return np.array([o.row for o in seen], dtype=np.int64)


def _constant(rows: NDArray[np.int64]) -> RowModel:
    """A rate that is the same everywhere but for what the residual learns."""
    return lambda theta: np.broadcast_to(theta[..., :1], (*theta.shape[:-1], len(rows)))
