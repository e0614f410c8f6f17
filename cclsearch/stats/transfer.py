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

NUM_FIRST = 5
"""Trials of a search that earlier ones should predict: afterwards its own trials say more."""
MAX_GAIN = 3.0
"""What one search may say for or against the others, in log units: a factor of 20."""


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
    own = np.sqrt(OWN_SHARE) * prior.sd_P
    common = np.sqrt(1 - OWN_SHARE) * prior.sd_P
    joint = replace(
        prior,
        mean_P=np.concatenate([prior.mean_P, np.zeros(size * len(searches))]),
        sd_P=np.concatenate([common, *[own] * len(searches)]),
    )
    posterior = calibrate(model, features, joint, _join([search.evidence for search in searches]))
    spread = np.hypot(posterior.multiplier_sd()[:size], own)
    return replace(prior, mean_P=posterior.theta_P[:size], sd_P=np.minimum(spread, prior.sd_P))


def find_odds(prior: Prior, searches: Sequence[EarlierFit]) -> float:
    """Return the log odds that the next search is like these rather than like the prior alone.

    Each search in turn is left out: how much better do the others predict its first trials than the prior does, as the
    log of the ratio of the evidences? The mean over the searches is shrunk, as if one more search had shown no
    difference; so few searches, or ones that disagree, say little, and one says nothing.
    """
    if len(searches) < 2:
        return 0.0
    gains = []
    for search in searches:
        others = transfer_prior(prior, [other for other in searches if other is not search])
        first = _take_first(search.evidence)
        with_others, alone = (calibrate(search.model, search.features, one, first) for one in (others, prior))
        gains.append(float(np.clip(with_others.log_evidence - alone.log_evidence, -MAX_GAIN, MAX_GAIN)))
    return sum(gains) / (len(gains) + 1)


def _take_first(evidence: CalibrationData) -> CalibrationData:
    """Return the first `NUM_FIRST` observations."""
    columns = ("rows_n", "value_n", "censoring_n", "label_noise_n")
    first = {name: getattr(evidence, name)[:NUM_FIRST] for name in columns}
    return replace(evidence, **first, noise_n=None if evidence.noise_n is None else evidence.noise_n[:NUM_FIRST])


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
