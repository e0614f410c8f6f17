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

from cclsearch.stats.calibration import CalibrationData, KnownResidual, ParametricModel, Prior, RowModel, calibrate
from cclsearch.stats.kernel import Array, Features

OWN_SHARE = 0.35
"""Share of the prior variance of a log multiplier that differs between searches on one cluster with one framework."""
NUM_FIRST = 5
"""Trials of a search that earlier ones should predict: afterwards its own trials say more."""
MAX_GAIN = 3.0
"""What one search may say for or against the others, in log units: a factor of 20."""
DOUBTS = ((1.0, 1.0), (3.0, 2.0), (10.0, 4.0))
"""How noisy trials may be, and how far the closed form may be off, relative to the prior: the evidence weighs these.
Trials that disagree with each other move the multipliers little; at the prior's noise, one slow run moved them all."""
NOISE_PENALTY = 0.2
"""What a doubt loses in log evidence for each log unit of noise above the prior's."""


@dataclass(frozen=True, eq=False)
class EarlierFit:
    """The closed form of one earlier search at its trials, and what they measured."""

    model: ParametricModel
    """Of the rows of `features`."""
    features: Features
    """In coordinates that all searches have in common."""
    evidence: CalibrationData
    """One observation for each row, in their order."""
    own_share: float | None = None
    """Variance of a multiplier that this search has for itself, relative to the prior's, and its residual is its own.
    None: both by its number of accelerators."""
    num_accelerators: int = 1

    def find_share(self, num_accelerators: int) -> float:
        """Return the variance that it has for itself if the next search is on so many accelerators."""
        if self.own_share is not None:
            return self.own_share
        return OWN_SHARE * (1 + abs(float(np.log2(self.num_accelerators / num_accelerators))))


def load_jobs(shares: Sequence[float], num_rows: Sequence[int]) -> Array:
    """Return the loadings of the rows of jobs with these shares on what jobs have in common and on what each has alone.

    Column 0 is what they have in common, column 1 is that of the next job, `load_next`.
    """
    own = np.hstack([np.zeros((len(shares), 1)), np.diag(np.sqrt(shares))])
    return np.repeat(np.hstack([np.full((len(shares), 1), np.sqrt(1 - OWN_SHARE)), own]), num_rows, axis=0)


def load_next(num_rows: int, num_jobs: int) -> Array:
    """Return the loadings of the rows of the next job, beside those of so many earlier jobs."""
    return np.tile([np.sqrt(1 - OWN_SHARE), np.sqrt(OWN_SHARE), *[0.0] * num_jobs], (num_rows, 1))


def transfer_prior(prior: Prior, searches: Sequence[EarlierFit], num_accelerators: int = 1) -> Prior:
    """Return the prior of the next search on the same cluster with the same framework, on so many accelerators.

    Means and widths change, and what is known of the residual is added: its features have the loadings of `load_jobs`.
    """
    size = len(prior.mean_P)
    shares = [search.find_share(num_accelerators) for search in searches]
    model, features = _stack(searches, size, shares)
    evidence = _join([search.evidence for search in searches])
    own = np.sqrt(OWN_SHARE) * prior.sd_P
    apart = [np.sqrt(share) * prior.sd_P for share in shares]
    common = np.sqrt(1 - OWN_SHARE) * prior.sd_P
    mean_P = np.concatenate([prior.mean_P, np.zeros(size * len(searches))])
    joint = replace(prior, mean_P=mean_P, sd_P=np.concatenate([common, *apart]))
    means, variances, scores, known = [], [], [], []
    for noise, residual in DOUBTS:
        doubted = replace(joint, shape=joint.shape.scaled(residual), noise=joint.noise * noise)
        posterior = calibrate(model, features, doubted, _with_noise(evidence, prior.noise, doubted.noise))
        means.append(posterior.theta_P[:size])
        variances.append(posterior.multiplier_sd()[:size] ** 2)
        scores.append(posterior.log_evidence - NOISE_PENALTY * np.log(noise))
        value_n = posterior.value_n - model(posterior.rows_n)(posterior.theta_P)
        known.append(KnownResidual(features, value_n, posterior.variance_n + posterior.model_variance()))
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    variance = weights @ (np.array(variances) + (np.array(means) - mean) ** 2)
    sd_P = np.minimum(np.sqrt(variance + own**2), prior.sd_P)
    return replace(prior, mean_P=mean, sd_P=sd_P, known=known[int(np.argmax(weights))])


def _with_noise(evidence: CalibrationData, assumed: float, noise: float) -> CalibrationData:
    """Return the observations with this noise between runs in place of the assumed one."""
    if evidence.noise_n is None:
        return evidence
    return replace(evidence, noise_n=np.sqrt(evidence.noise_n**2 + noise**2 - assumed**2))


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
        rest = [other for other in searches if other is not search]
        others, first = transfer_prior(prior, rest, search.num_accelerators), _take_first(search.evidence)
        features = replace(search.features, jobs_NJ=load_next(len(search.features), len(rest)))
        with_others, alone = (calibrate(search.model, features, one, first) for one in (others, prior))
        gains.append(float(np.clip(with_others.log_evidence - alone.log_evidence, -MAX_GAIN, MAX_GAIN)))
    return sum(gains) / (len(gains) + 1)


def _take_first(evidence: CalibrationData) -> CalibrationData:
    """Return the first `NUM_FIRST` observations."""
    columns = ("rows_n", "value_n", "censoring_n", "label_noise_n")
    first = {name: getattr(evidence, name)[:NUM_FIRST] for name in columns}
    return replace(evidence, **first, noise_n=None if evidence.noise_n is None else evidence.noise_n[:NUM_FIRST])


def _stack(searches: Sequence[EarlierFit], size: int, shares: Sequence[float]) -> tuple[ParametricModel, Features]:
    """Return one model of all rows, whose parameters are the common ones and each search's differences from them."""
    counts = [len(search.features) for search in searches]
    ends = np.cumsum(counts)

    def model(rows: NDArray[np.int64]) -> RowModel:
        each = []
        for k, (search, end, count) in enumerate(zip(searches, ends, counts, strict=True)):
            at = np.flatnonzero((rows >= end - count) & (rows < end))
            each.append((at, search.model(rows[at] - (end - count)), slice(size * (k + 1), size * (k + 2))))

        def value(theta: Array) -> Array:
            found = np.empty((*theta.shape[:-1], len(rows)))
            for at, one, own in each:
                summed = theta[..., :size] + theta[..., own]
                if theta.ndim == 1:
                    found[at] = one(summed)
                    continue
                # most points of a derivative change another search's parameters alone
                found[:, at] = one(summed[0])
                moved = np.flatnonzero((summed != summed[0]).any(axis=1))
                found[np.ix_(moved, at)] = one(summed[moved])
            return found

        return value

    numbers_ND = np.concatenate([search.features.numbers_ND for search in searches])
    categories_NC = np.concatenate([search.features.categories_NC for search in searches])
    unknown_NU = np.zeros((len(numbers_ND), 0), dtype=np.int16)
    jobs_NJ = load_jobs(shares, counts)
    alone_N = np.repeat([search.own_share is not None for search in searches], counts)
    jobs_NJ[alone_N] = np.sign(jobs_NJ[alone_N])
    jobs_NJ[alone_N, 0] = 0.0
    return model, Features(numbers_ND, categories_NC, unknown_NU, jobs_NJ)


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
