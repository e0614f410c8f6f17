"""Multipliers of a closed form of other work, from earlier searches on the same cluster and framework.

A hierarchical model: the multipliers of a framework on a cluster are drawn from the prior, and each search's from a
normal around them, since no closed form fits two models in the same way (Gelman et al. 2013, section 5.4). All searches
are calibrated together; the multipliers of the framework on the cluster, with the spread between searches added, are
the prior of the next search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from cclsearch.core.values import Config
from cclsearch.propose.bayes.ensemble import MIN_WEIGHT, NOISE_PENALTY, widen_scale
from cclsearch.stats.calibration import CalibrationData, KnownResidual, ParametricModel, Prior, RowModel, calibrate
from cclsearch.stats.columns import take_rows
from cclsearch.stats.kernel import Array, Features

OWN_SHARE = 0.35
"""Share of the prior variance of a log multiplier, and of the residual, that differs between searches on one cluster
with one framework; as much again changes with each doubling of the number of accelerators."""
NUM_FIRST = 5
"""Number of a search's first trials that earlier searches should predict: afterwards its own trials say more."""
# A factor of 20.
MAX_GAIN = 3.0
"""Largest evidence of one search for or against the others, in log units."""
# Trials that disagree with each other move the multipliers little; at the prior's noise, one slow run moved them all.
DOUBTS = ((1.0, 1.0), (3.0, 2.0), (10.0, 4.0))
"""Noise of trials, and error of the closed form, relative to the prior: the evidence weighs these."""
ROUNDED = 12
"""Digits to which log multipliers are compared."""


@dataclass(frozen=True, eq=False)
class EarlierFit:
    """The closed form of one earlier search at its trials, and their measurements."""

    model: ParametricModel
    """Model of the rows of `features`."""
    features: Features
    """Features in coordinates that all searches have in common."""
    evidence: CalibrationData
    """One observation for each row, in their order."""
    own_share: float | None = None
    """Variance of a multiplier's own part in this search, relative to the prior's; its residual is its own then. None:
    `OWN_SHARE`, and more by its number of accelerators.
    """
    num_accelerators: int = 1
    index: int = 0
    """Its position among the searches."""
    configs: Sequence[Config] = ()
    """Configurations of the rows, if their residuals are kept."""

    @property
    def share(self) -> float:
        """Variance of a multiplier that this search has for itself, relative to the prior's."""
        return OWN_SHARE if self.own_share is None else self.own_share

    def count_doublings(self, num_accelerators: int) -> float:
        """Return the doublings from so many accelerators of the next search to its own; 0 if they do not matter."""
        return 0.0 if self.own_share is not None else float(np.log2(self.num_accelerators / num_accelerators))


def load_jobs(shares_J: Array, doublings_J: Array) -> Array:
    """Return the loadings of jobs, so many doublings of accelerators from the next job, on their differences.

    Column 0 is the part common to all jobs, column 1 the part of the next job, `load_next`, alone, then each job's own
    part, with these shares; the others are steps of a random walk over the number of accelerators, `find_steps`.
    """
    passed_JS, length_S = find_steps(doublings_J)
    first = np.tile([np.sqrt(1 - OWN_SHARE), 0.0], (len(shares_J), 1))
    return np.hstack([first, np.diag(np.sqrt(shares_J)), passed_JS * np.sqrt(OWN_SHARE * length_S)])


def find_steps(doublings_J: Array) -> tuple[Array, Array]:
    """(J, S) whether each of S steps is between the next job and each job, and (S,) their lengths, in doublings."""
    # So jobs far from the next on the same side share their difference from it, and any number of them do not show what
    # it is like.
    edges = np.unique([0.0, *doublings_J])
    low_S, high_S = edges[:-1], edges[1:]
    passed_JS = np.where(low_S >= 0, doublings_J[:, None] >= high_S, doublings_J[:, None] <= low_S)
    return passed_JS.astype(np.float64), high_S - low_S


def load_next(num_rows: int, num_columns: int) -> Array:
    """Return the loadings of the rows of the next job, beside earlier jobs with so many columns."""
    return np.tile([np.sqrt(1 - OWN_SHARE), np.sqrt(OWN_SHARE), *[0.0] * (num_columns - 2)], (num_rows, 1))


def transfer_prior(
    prior: Prior, searches: Sequence[EarlierFit], num_accelerators: int = 1, multipliers: Sequence[str] = ()
) -> Prior:
    """Return the prior of the next search on the same cluster with the same framework, on so many accelerators.

    `multipliers` names them, so that a cluster that is slow as a whole is among the hypotheses (`widen_scale`).
    Means and widths change, and the knowledge of the residual is added: its features have the loadings of `load_jobs`.
    """
    size = len(prior.mean_P)
    shares_J = np.array([search.share for search in searches])
    doublings_J = np.array([search.count_doublings(num_accelerators) for search in searches])
    passed_JS, length_S = find_steps(doublings_J)
    part_JB = np.hstack([np.ones((len(searches), 1)), np.eye(len(searches)), passed_JS])
    share_B = np.array([1 - OWN_SHARE, *shares_J, *(OWN_SHARE * length_S)])
    model, features = _stack(searches, part_JB, load_jobs(shares_J, doublings_J))
    evidence = _join([search.evidence for search in searches])
    means, variances, scores, known, widths = [], [], [], [], []
    for base, loss in ((prior, 0.0), *widen_scale(prior, multipliers)):
        mean_P = np.concatenate([base.mean_P, np.zeros(size * (len(share_B) - 1))])
        joint = replace(base, mean_P=mean_P, sd_P=np.outer(np.sqrt(share_B), base.sd_P).ravel())
        for noise, residual in DOUBTS:
            doubted = replace(joint, shape=joint.shape.scaled(residual), noise=joint.noise * noise)
            posterior = calibrate(model, features, doubted, _with_noise(evidence, prior.noise, doubted.noise))
            means.append(posterior.theta_P[:size])
            variances.append(posterior.multiplier_sd()[:size] ** 2 + OWN_SHARE * base.sd_P**2)
            widths.append(base.sd_P)
            scores.append(posterior.log_evidence - NOISE_PENALTY * np.log(noise) - loss)
            value_n = posterior.value_n - model(posterior.rows_n)(posterior.theta_P)
            known.append(KnownResidual(features, value_n, posterior.variance_n + posterior.model_variance()))
    weights = softmax(scores)
    mean = weights @ np.array(means)
    variance = weights @ (np.array(variances) + (np.array(means) - mean) ** 2)
    widest = np.array(widths)[weights > MIN_WEIGHT].max(axis=0)
    return replace(prior, mean_P=mean, sd_P=np.minimum(np.sqrt(variance), widest), known=known[int(np.argmax(weights))])


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
        others, first = (
            transfer_prior(prior, rest, search.num_accelerators),
            take_rows(search.evidence, slice(NUM_FIRST)),
        )
        assert others.known is not None
        assert others.known.features.jobs_NJ is not None
        num_columns = others.known.features.jobs_NJ.shape[1]
        features = replace(search.features, jobs_NJ=load_next(len(search.features), num_columns))
        with_others, alone = (calibrate(search.model, features, one, first) for one in (others, prior))
        gains.append(float(np.clip(with_others.log_evidence - alone.log_evidence, -MAX_GAIN, MAX_GAIN)))
    return sum(gains) / (len(gains) + 1)


def _stack(searches: Sequence[EarlierFit], part_JB: Array, jobs_JC: Array) -> tuple[ParametricModel, Features]:
    """Return one model of all rows: the multipliers of a search are the sum of its parts' multipliers, of B blocks."""
    counts = [len(search.features) for search in searches]
    ends, size = np.cumsum(counts), part_JB.shape[1]

    def model(rows: NDArray[np.int64]) -> RowModel:
        each = []
        for search, end, count, part_B in zip(searches, ends, counts, part_JB, strict=True):
            at = np.flatnonzero((rows >= end - count) & (rows < end))
            each.append((at, search.model(rows[at] - (end - count)), part_B))

        def value(theta: Array) -> Array:
            found = np.empty((*theta.shape[:-1], len(rows)))
            blocks = theta.reshape(*theta.shape[:-1], size, -1)
            for at, one, part_B in each:
                summed = part_B @ blocks
                if theta.ndim == 1:
                    found[at] = one(summed)
                    continue
                # most points of a derivative are, but for rounding, the same for this search
                distinct, which = np.unique(np.round(summed, ROUNDED), axis=0, return_inverse=True)
                found[:, at] = one(distinct)[which.ravel()]
            return found

        return value

    numbers_ND = np.concatenate([search.features.numbers_ND for search in searches])
    categories_NC = np.concatenate([search.features.categories_NC for search in searches])
    unknown_NU = np.zeros((len(numbers_ND), 0), dtype=np.int16)
    jobs_NJ = np.repeat(jobs_JC, counts, axis=0)
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
