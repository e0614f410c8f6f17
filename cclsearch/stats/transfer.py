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


@dataclass(frozen=True, eq=False)
class EarlierFit:
    """The closed form of one earlier search at its trials, and what they measured."""

    model: ParametricModel
    """Of the rows of `features`."""
    features: Features
    evidence: CalibrationData
    """One observation for each row, in their order."""
    own_share: float = OWN_SHARE
    """Variance that this search has for itself, relative to the prior's: more if its work is unlike the next one's."""


def transfer_prior(prior: Prior, searches: Sequence[EarlierFit]) -> Prior:
    """Return the prior of the next search on the same cluster with the same framework; only means and widths change."""
    size = len(prior.mean_P)
    model, features = _stack(searches, size)
    own = np.sqrt(OWN_SHARE) * prior.sd_P
    apart = [np.sqrt(search.own_share) * prior.sd_P for search in searches]
    common = np.sqrt(1 - OWN_SHARE) * prior.sd_P
    joint = replace(
        prior,
        mean_P=np.concatenate([prior.mean_P, np.zeros(size * len(searches))]),
        sd_P=np.concatenate([common, *apart]),
    )
    posterior = calibrate(model, features, joint, _join([search.evidence for search in searches]))
    spread = np.hypot(posterior.multiplier_sd()[:size], own)
    return replace(prior, mean_P=posterior.theta_P[:size], sd_P=np.minimum(spread, prior.sd_P))


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
