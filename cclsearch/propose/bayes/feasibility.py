"""P(success) of a trial: memory from the calibrated closed form, and failures that memory does not explain.

A space may not declare whether data-parallel ranks shard the optimizer states, tensor-parallel ranks the sequence, or
the layers are recomputed; then one way applies to the whole space. Each combination is a hypothesis, weighted by its
evidence: the trials that fitted or did not, and the measured peaks. After a measured peak, only the kept share of the
activations remains a hypothesis (`unidentified`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtr

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.values import FailureKind
from cclsearch.propose.base import Observation
from cclsearch.propose.bayes.broken_values import BrokenValues, find_broken_values
from cclsearch.propose.bayes.mixture import Mixed, Variant, mix_forms
from cclsearch.stats.calibration import CalibrationData, Posterior, Prior, calibrate
from cclsearch.stats.closed_form import ClosedForm, MemoryForm, MemoryHypothesis, Predictor, constant
from cclsearch.stats.kernel import Array, Features

_LABEL_NOISE = {FailureKind.OUT_OF_MEMORY: 0.01, FailureKind.CRASHED: 0.15}
_OTHER_LABEL_NOISE = 0.8
"""Probability that a failure had another cause than memory, by the failure kind of the launcher or recording."""
# The crash still says a little about crashes.
MAX_LABEL_NOISE = 0.98
"""Largest label noise of a crash that memory explains but its log does not name."""
P_OTHER_CRASH = 0.05
"""Probability that a trial crashes for a cause other than memory or a broken value (`CRASH`)."""
NOT_BLAMED: Mapping[int, float] = MappingProxyType({})
_UNDECLARED_SD = 0.15
"""Standard deviation of the log multiplier of an alternative in `MemoryForm.undeclared`."""
_MIN_WEIGHT = 0.02
"""Hypotheses with a lower weight are dropped."""


NUM_SAMPLED = 64
"""Rows of a space that show which share of it fits under a hypothesis."""
# The prior's widths of states and activations.
PRIOR_SPREAD = 0.3
"""Standard deviation of the log memory before any trial, given a hypothesis."""


@dataclass(frozen=True, eq=False)
class Feasibility:
    """Posterior of memory and crashes, given the trials so far."""

    form: MemoryForm | None
    """None: the task does not predict memory, and every configuration counts as fitting."""
    hypotheses: tuple[Posterior, ...]
    """Posteriors of the memory, one per hypothesis; none without a closed form."""
    weight_h: Array
    crash: Posterior
    broken: BrokenValues | None
    """None: the space has no unknown knob."""
    shares: tuple[tuple[Variant | None, float], ...] = ()
    """Weights of the memory without corrections, and with those of the LLM."""

    @property
    def memory(self) -> Posterior:
        """The memory posterior with the largest weight."""
        return self.hypotheses[int(np.argmax(self.weight_h))]

    def predict(self, rows: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """(m,) expected GiB (NaN if unknown), (m,) probability that it fits, and (m,) probability of success."""
        if self.form is None:
            log_gib, p_fits = np.full(len(rows), np.nan), np.ones(len(rows))
        else:
            log_gib, p_fits = np.zeros(len(rows)), np.zeros(len(rows))
            for hypothesis, weight in zip(self.hypotheses, self.weight_h, strict=True):
                mean, variance = hypothesis.marginals(rows)
                log_gib += weight * mean
                # only wider: few well predicted peaks do not show that all are (benchmarks/calibration.md)
                p_fits += weight * _p_fits(self.form, mean, variance * max(hypothesis.spread, 1.0) ** 2)
        mean, spread = self.crash.marginals(rows)
        p_no_crash = ndtr(-mean / np.sqrt(1.0 + spread))
        p_intact = 1.0 if self.broken is None else 1 - self.broken.p_broken(rows)
        return np.exp(log_gib), p_fits, p_fits * p_no_crash * p_intact


def _p_fits(form: MemoryForm, mean: Array, variance: Array) -> Array:
    """(m,) probability that configurations with these log GiB fit."""
    return np.asarray(ndtr((form.log_limit - mean) / np.sqrt(variance + form.softness**2)))


def fit_feasibility(
    predictor: Predictor,
    observations: Sequence[Observation],
    doubted: Set[int] = frozenset(),
    memory_crashes: Set[int] = frozenset(),
    variants: Sequence[Variant] = (),
) -> Feasibility:
    """Return the posterior of memory and crashes, given the observations that have a row.

    By the LLM, crashes of `doubted` trials were not due to memory, and those of `memory_crashes` were.
    """
    seen = [
        replace(o, failure=o.failure.model_copy(update={"kind": FailureKind.OUT_OF_MEMORY}))
        if o.failure is not None and o.trial in memory_crashes
        else o
        for o in observations
        if o.row is not None
    ]
    form, features = predictor.memory, predictor.features
    broken, blamed = _blame_values(predictor, seen)
    said = {o.row or 0: _OTHER_LABEL_NOISE for o in seen if o.trial in doubted and o.failure is not None}
    not_memory = {row: max(said.get(row, 0.0), blamed.get(row, 0.0)) for row in {**said, **blamed}}
    mixed = Mixed((), np.zeros(0), ())
    if form:
        mixed = _fit_memory(form, features, seen, not_memory, variants)
    hypotheses, weights = mixed.hypotheses, mixed.weight_h
    explained = np.zeros(len(seen))
    if form and seen:
        # the odds after the crash itself, which the memory has learnt from: it counts once
        explained = 1 - _p_fits(form, *hypotheses[int(np.argmax(weights))].marginals(_rows(seen)))
    explained = np.maximum(explained, [blamed.get(o.row or 0, 0.0) for o in seen])
    crash = calibrate(constant, features, predictor.crash, _crash_evidence(seen, explained))
    return Feasibility(form, hypotheses, weights, crash, broken, mixed.shares)


def _blame_values(predictor: Predictor, seen: Sequence[Observation]) -> tuple[BrokenValues | None, Mapping[int, float]]:
    """Return the values of unknown knobs that always fail, and row -> probability that its failure is due to one."""
    # Successes alone judge memory here: failures must not teach it the effect of a broken value.
    unknown_NU, form = predictor.features.unknown_NU, predictor.memory
    if not unknown_NU.shape[1]:
        return None, NOT_BLAMED
    failed = [o for o in seen if o.failure is not None]
    fits = np.ones(len(failed))
    if form and failed:
        fine = memory_evidence([o for o in seen if o.failure is None], form)
        fits = _p_fits(
            form, *calibrate(form.form.log_cost, predictor.features, form.form.prior, fine).marginals(_rows(failed))
        )
    fine_rows = _rows([o for o in seen if o.failure is None])
    broken = find_broken_values(unknown_NU, fine_rows, _rows(failed), 1 - fits * (1 - P_OTHER_CRASH))
    blamed = broken.p_broken(_rows(failed))
    return broken, dict(zip(_rows(failed).tolist(), blamed.tolist(), strict=True))


def _fit_memory(
    memory: MemoryForm,
    features: Features,
    seen: Sequence[Observation],
    not_memory: Mapping[int, float],
    variants: Sequence[Variant],
) -> Mixed:
    """Return posteriors with weights; if a peak was measured, of fewer hypotheses, since peaks identify most parts."""
    is_measured = bool(np.any(memory_evidence(seen, memory).censoring_n == 0))
    names = memory.unidentified if is_measured else memory.undeclared.keys()

    def fit(form: ClosedForm, some: Sequence[Observation]) -> tuple[list[Posterior], list[float]]:
        own, evidence = replace(memory, form=form), memory_evidence(some, memory, not_memory)
        priors = _hypothesis_priors(own, names, len(features))
        fits = [calibrate(form.log_cost, features, prior, evidence) for _, prior, _ in priors]
        return fits, [fit.log_evidence + log_prior for fit, (*_, log_prior) in zip(fits, priors, strict=True)]

    return mix_forms(fit, memory.form, variants, seen, _MIN_WEIGHT)


def weigh_combinations(
    predictor: Predictor, observations: Sequence[Observation]
) -> dict[MemoryHypothesis, tuple[float, float]]:
    """Return the log probability, up to a constant, and the log evidence of each combination of undeclared ways."""
    form = predictor.memory
    assert form is not None
    evidence = memory_evidence(observations, form)
    return {
        ways: (log_prior, calibrate(form.form.log_cost, predictor.features, prior, evidence).log_evidence)
        for ways, prior, log_prior in _hypothesis_priors(form, form.undeclared.keys(), len(predictor.features))
    }


def _hypothesis_priors(form: MemoryForm, names: Set[str], size: int) -> list[tuple[MemoryHypothesis, Prior, float]]:
    """Return the prior of each hypothesis about these multipliers with its log probability, up to a constant.

    A prior from earlier searches may be wrong: then the hypotheses of the prior without them follow.
    """
    found = _combine_ways(form, form.form.prior, names - form.determined)
    if form.form.unlearned is not None:
        without = _combine_ways(form, form.form.unlearned, names)
        found += [(ways, prior, log_prior - form.form.odds) for ways, prior, log_prior in without]
    if len(found) == 1 or form.probabilities:  # earlier searches weighed them
        return found
    # People make spaces in which something runs: that is as much evidence as one unnamed row that fits.
    rows = np.unique(np.linspace(0, size - 1, NUM_SAMPLED).astype(np.int64))
    log_gib_hn = form.form.log_cost(rows)(np.stack([prior.mean_P for _, prior, _ in found]))
    fits_h = np.mean(ndtr((form.log_limit - log_gib_hn) / PRIOR_SPREAD), axis=1)
    return [(*each[:2], each[2] + float(np.log(share))) for each, share in zip(found, fits_h, strict=True)]


def _combine_ways(form: MemoryForm, prior: Prior, names: Set[str]) -> list[tuple[MemoryHypothesis, Prior, float]]:
    """Return one hypothesis for each combination of the ways of these multipliers; their probabilities add up to 1."""
    found, undeclared = [], [name for name in form.undeclared if name in names]
    for ways in product(
        *(zip(form.undeclared[name], form.weigh_ways(name, prior), strict=True) for name in undeclared)
    ):
        mean_P, sd_P, probability = prior.mean_P.copy(), prior.sd_P.copy(), 1.0
        for name, ((log_multiplier, _), weight) in zip(undeclared, ways, strict=True):
            at = form.form.multipliers.index(name)
            mean_P[at], sd_P[at] = log_multiplier, _UNDECLARED_SD
            probability *= weight
        chosen = frozenset((name, value) for name, ((value, _), _) in zip(undeclared, ways, strict=True))
        log_prior = float(np.log(form.probabilities.get(chosen, probability)))
        found.append((chosen, replace(prior, mean_P=mean_P, sd_P=sd_P), log_prior))
    total = float(logsumexp([log_prior for *_, log_prior in found]))
    return [(ways, each, log_prior - total) for ways, each, log_prior in found]


def memory_evidence(
    seen: Sequence[Observation], form: MemoryForm, blamed: Mapping[int, float] = NOT_BLAMED
) -> CalibrationData:
    """Return each measured peak of this memory; for a trial without one, only whether it is above or below the limit.

    `blamed` is row -> probability that something other than memory makes it fail.
    """
    peaks = [o.metrics.get(PEAK_MEMORY) if form.is_measured and o.failure is None else None for o in seen]
    failed = np.array([o.failure is not None for o in seen], dtype=bool)
    values = np.log(np.array([peak or np.nan for peak in peaks], dtype=np.float64))
    label_noise = [
        0.0
        if o.failure is None
        else max(_LABEL_NOISE.get(o.failure.kind, _OTHER_LABEL_NOISE), blamed.get(o.row or 0, 0.0))
        for o in seen
    ]
    return CalibrationData(
        rows_n=_rows(seen),
        value_n=values,
        censoring_n=np.where(np.isfinite(values), 0, np.where(failed, 1, -1)).astype(np.int8),
        label_noise_n=np.array(label_noise, dtype=np.float64),
        limit=form.log_limit,
        softness=form.softness,
    )


def _crash_evidence(seen: Sequence[Observation], explained_n: Array) -> CalibrationData:
    """Return success or crash of every trial; a failure that memory explains has a label noise up to 1."""
    failed = np.array([o.failure is not None for o in seen], dtype=bool)
    explained = np.where(failed, explained_n, 0.0)
    named = [o.failure is not None and o.failure.kind is FailureKind.OUT_OF_MEMORY for o in seen]
    return CalibrationData(
        rows_n=_rows(seen),
        value_n=np.full(len(seen), np.nan),
        censoring_n=np.where(failed, 1, -1).astype(np.int8),
        label_noise_n=np.where(named, 1.0, np.minimum(explained, MAX_LABEL_NOISE)),
        limit=0.0,
        softness=1.0,
    )


def _rows(seen: Sequence[Observation]) -> NDArray[np.int64]:
    return np.array([o.row for o in seen], dtype=np.int64)
