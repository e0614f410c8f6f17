"""What earlier searches on the same cluster and framework say about the multipliers of a closed form of other work.

A hierarchical model: the multipliers of a framework on a cluster are drawn from the prior, and those of each search
from a normal around them, since no closed form fits two models in the same way (Gelman et al. 2013, section 5.4). All
searches are calibrated together; the multipliers of the framework on the cluster, with the spread between searches
added, are the prior of the next search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.stats.calibration import CalibrationData, ParametricModel, Prior, RowModel, calibrate
from cclsearch.stats.kernel import Array, Features

OWN_SHARE = 0.35
"""Share of the prior variance of a log multiplier that differs between searches on one cluster with one framework."""

DOUBTS = ((1.0, 1.0), (3.0, 2.0), (10.0, 4.0))
"""How noisy the trials and how far off the closed form may be, relative to the prior's: the evidence weighs
these. Trials that disagree with each other move multipliers little; at the prior's noise, one slow run moves all."""
NOISE_PENALTY = 0.2
"""What a doubt loses in log evidence for each log unit of noise above the prior's."""


@dataclass(frozen=True, eq=False)
class EarlierFit:
    """The closed form of one earlier search at its trials, and what they measured."""

    model: ParametricModel
    """Of the rows of `features`."""
    features: Features
    evidence: CalibrationData
    """One observation for each row, in their order."""


def transfer_prior(prior: Prior, searches: Sequence[EarlierFit]) -> Prior:
    """Return the prior of the next search on the same cluster with the same framework; only means and widths change."""
    size = len(prior.mean_P)
    model, features = _stack(searches, size)
    evidence = _join([search.evidence for search in searches])
    own = np.sqrt(OWN_SHARE) * prior.sd_P
    common = np.sqrt(1 - OWN_SHARE) * prior.sd_P
    mean_P = np.concatenate([prior.mean_P, np.zeros(size * len(searches))])
    joint = replace(prior, mean_P=mean_P, sd_P=np.concatenate([common, *[own] * len(searches)]))
    means, variances, scores = [], [], []
    for noise, residual in DOUBTS:
        doubted = replace(joint, shape=joint.shape.scaled(residual), noise=joint.noise * noise)
        posterior = calibrate(model, features, doubted, _with_noise(evidence, prior.noise, doubted.noise))
        means.append(posterior.theta_P[:size])
        variances.append(posterior.multiplier_sd()[:size] ** 2)
        scores.append(posterior.log_evidence - NOISE_PENALTY * np.log(noise))
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    variance = weights @ (np.array(variances) + (np.array(means) - mean) ** 2)
    return replace(prior, mean_P=mean, sd_P=np.minimum(np.sqrt(variance + own**2), prior.sd_P))


def _with_noise(evidence: CalibrationData, assumed: float, noise: float) -> CalibrationData:
    """Return the observations with this noise between runs in place of the assumed one."""
    if evidence.noise_n is None:
        return evidence
    return replace(evidence, noise_n=np.sqrt(evidence.noise_n**2 + noise**2 - assumed**2))


def _stack(searches: Sequence[EarlierFit], size: int) -> tuple[ParametricModel, Features]:
    """Return one model of all rows, whose parameters are the common ones and each search's differences from them."""
    ends = np.cumsum([len(search.features) for search in searches])
    starts = ends - [len(search.features) for search in searches]

    def model(rows: NDArray[np.int64]) -> RowModel:
        each = []
        for k, (search, start, end) in enumerate(zip(searches, starts, ends, strict=True)):
            at = np.flatnonzero((rows >= start) & (rows < end))
            each.append((at, search.model(rows[at] - start), slice(size * (k + 1), size * (k + 2))))

        def value(theta: Array) -> Array:
            found = np.empty((*theta.shape[:-1], len(rows)))
            for at, one, own in each:
                found[..., at] = one(theta[..., :size] + theta[..., own])
            return found

        return value

    return model, _separate([search.features for search in searches])


def _separate(each: Sequence[Features]) -> Features:
    """Return the rows of all searches with numbers and codes of their own, so that residuals are nearly independent.

    One more category names the search: its level may be off by as much as a category.
    """
    total = sum(len(features) for features in each)
    numbers_ND = np.zeros((total, sum(features.numbers_ND.shape[1] for features in each)))
    kinds = max(features.categories_NC.shape[1] for features in each)
    categories_NC = np.zeros((total, kinds + 1), dtype=np.int16)
    row = number = code = 0
    for features in each:
        end, width, own = row + len(features), features.numbers_ND.shape[1], features.categories_NC
        numbers_ND[row:end, number : number + width] = features.numbers_ND
        categories_NC[row:end] = code
        categories_NC[row:end, : own.shape[1]] += own
        row, number, code = end, number + width, code + 1 + int(own.max(initial=0))
    return Features(numbers_ND, categories_NC, np.zeros((total, 0), dtype=np.int16))


def _join(each: Sequence[CalibrationData]) -> CalibrationData:
    """Return the observations of all searches, one for each row."""
    noise = [one.noise_n for one in each if one.noise_n is not None]
    value_n = np.concatenate([one.value_n for one in each])
    return replace(
        each[0],
        rows_n=np.arange(len(value_n)),
        value_n=value_n,
        censoring_n=np.concatenate([one.censoring_n for one in each]),
        label_noise_n=np.concatenate([one.label_noise_n for one in each]),
        noise_n=np.concatenate(noise) if len(noise) == len(each) else None,
    )
