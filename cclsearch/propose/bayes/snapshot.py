"""A summary of the surrogate's posterior, for the agent's prompt and for the decision to stop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.acquisition import choose_batch, expected_improvement, failure_penalty, incumbent
from cclsearch.propose.bayes.surrogate import CandidatePosterior
from cclsearch.stats.kernel import Array
from cclsearch.stats.one_thread import on_one_thread

MIN_CERTAINTY = 0.2
"""Share of its prior variance removed by the trials from which a multiplier is shown as learned."""
NEGLIGIBLE = 0.01
"""Relative improvement below which a gain does not count (1 %)."""
NO_CHANCE = 0.02
"""Probability below which no untried configuration is likely to win."""
FARTHEST = 4.0
"""Standard deviations of a candidate up to which its possible gains count."""
NUM_GAINS = 201
"""Points of the integral over gains."""
TENTH_PERCENTILE = 1.2816
"""Standard deviations from a normal's mean to its tenth percentile."""
MAX_HALFWIDTH = float(np.log(100.0))
"""Largest shown half-width: a metric without a closed form has a prior of any magnitude."""


@dataclass(frozen=True)
class LearnedMultiplier:
    """A multiplier of the closed form as the trials have calibrated it."""

    part: str
    multiplier: float
    """Cost of the part over the closed form's prediction of it before any trial."""
    certainty: float
    """Share of the prior variance that the trials removed: 0 nothing learned, 1 known exactly."""


@dataclass(frozen=True)
class SearchSnapshot:
    """State of the search as the surrogate sees it."""

    top_rows: tuple[int, ...]
    """Rows that the default strategy would run next, in order."""
    num_open: int
    """Number of candidates: configurations neither tried, running nor held back, at most `MAX_CANDIDATES`."""
    max_expected_improvement: float | None
    """Largest expected improvement times P(success and constraints); None before the first trial with a loss."""
    p_improvement: float | None
    """Probability that a candidate improves on the best by over 1 %; None before the first trial with a loss."""
    median_error: float | None
    """Median relative leave-one-out error of the predicted primary metric; None with fewer than 3 measured trials."""
    learned_multipliers: tuple[LearnedMultiplier, ...]
    """Multipliers with a certainty of at least 0.2, most certain first."""


@on_one_thread
def summarize_posterior(view: SearchView, posterior: CandidatePosterior, top: int) -> SearchSnapshot:
    """Return the snapshot of a posterior, with the `top` rows to run next."""
    gain_m = expected_improvement(posterior, incumbent(posterior))
    has_best = posterior.best is not None
    p_improvement = find_p_improvement(posterior) if has_best else None
    is_won = p_improvement is not None and p_improvement < NO_CHANCE
    chosen = choose_batch(posterior, top, failure_penalty(view), is_won=is_won)
    return SearchSnapshot(
        top_rows=tuple(int(posterior.rows_m[m]) for m, _ in chosen),
        num_open=len(posterior.rows_m),
        max_expected_improvement=float(np.max(gain_m * posterior.p_valid_m)) if has_best else None,
        p_improvement=p_improvement,
        median_error=_median_error(posterior),
        learned_multipliers=_learned_multipliers(posterior),
    )


def p10_halfwidth_m(posterior: CandidatePosterior) -> Array:
    """(m,) half-width of the 10th to 90th percentile interval of the primary metric, in log units, at most a factor of
    100.
    """
    return np.minimum(TENTH_PERCENTILE * posterior.spread * posterior.log_cost_sd_m, MAX_HALFWIDTH)


def find_chances(posterior: CandidatePosterior) -> Array:
    """(m,) chance that each candidate runs and improves on the best by over 1 %; needs a best."""
    return np.asarray(posterior.weight_k @ _better_km(posterior))


def _better_km(posterior: CandidatePosterior) -> Array:
    assert posterior.best is not None
    mean_km = posterior.mean_m + posterior.spread * (posterior.mean_km - posterior.mean_m)
    gap_km = posterior.best - NEGLIGIBLE - mean_km
    return np.asarray(ndtr(gap_km / (posterior.spread * posterior.sd_km)) * posterior.p_valid_m)


def find_p_improvement(posterior: CandidatePosterior) -> float:
    """Return the chance that any candidate runs and improves on the best by over 1 %; needs a best.

    Candidates are independent given the model. The largest chance of a single one instead, as a lower bound, came true
    more than three times as often as stated (benchmarks/calibration.md).
    """
    none_k = np.prod(1 - _better_km(posterior), axis=1)
    return float(1 - posterior.weight_k @ none_k)


def find_gain_left(posterior: CandidatePosterior, num_trials: int) -> float:
    """Return the expected relative gain of the best of the `num_trials` most promising candidates; needs a best."""
    promise_m = expected_improvement(posterior, incumbent(posterior)) * posterior.p_valid_m
    return find_gain(posterior, np.argsort(-promise_m, kind="stable")[: max(num_trials, 0)])


def find_gain(posterior: CandidatePosterior, candidates: NDArray[np.int64]) -> float:
    """Return the expected relative gain of the best of these candidates, which may fail; needs a best.

    Each model expects `integral of 1 - product of P(no gain above g) over g`, with candidates that are independent
    given the model: a bound from above, as is the noise of one measurement that counts as gain.
    """
    assert posterior.best is not None
    mean_km = posterior.mean_m + posterior.spread * (posterior.mean_km - posterior.mean_m)
    gap_km, sd_km = posterior.best - mean_km[:, candidates], posterior.spread * posterior.sd_km[:, candidates]
    gains = np.linspace(0.0, max(float((gap_km + FARTHEST * sd_km).max(initial=0.0)), NEGLIGIBLE), NUM_GAINS)
    above_gkm = ndtr((gap_km - gains[:, None, None]) / sd_km) * posterior.p_valid_m[candidates]
    expected_k = np.trapezoid(1 - np.prod(1 - above_gkm, axis=2), gains, axis=0)
    return float(-np.expm1(-float(posterior.weight_k @ expected_k)))


def _median_error(posterior: CandidatePosterior) -> float | None:
    error = posterior.models.primary.leave_one_out_error()
    return float(np.median(np.abs(np.expm1(error)))) if len(error) >= 3 else None


def _learned_multipliers(posterior: CandidatePosterior) -> tuple[LearnedMultiplier, ...]:
    view = posterior.models.view
    if view.primary.name not in view.predictor.forms:
        return ()
    primary = posterior.models.primary.most_likely
    names, before = posterior.models.primary.form.multipliers, view.predictor.form(view.primary).prior.mean_P
    certainty = 1 - (primary.multiplier_sd() / primary.prior.sd_P) ** 2
    order = np.argsort(-certainty, kind="stable")
    return tuple(
        LearnedMultiplier(names[p], float(np.exp(primary.theta_P[p] - before[p])), float(certainty[p]))
        for p in order
        if certainty[p] >= MIN_CERTAINTY
    )
