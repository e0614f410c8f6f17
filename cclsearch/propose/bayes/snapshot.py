"""The surrogate's own view of a search, for whoever decides: the agent's prompt, and whether to stop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.proposer import choose_batch, expected_improvement, failure_penalty, incumbent
from cclsearch.propose.bayes.surrogate import CandidatePosterior
from cclsearch.tasks.training.layout import Array
from cclsearch.tasks.training.time import MULTIPLIERS

NEGLIGIBLE = 0.01
"""An improvement below this share is none."""
TENTH_PERCENTILE = 1.2816
"""Standard deviations of a normal below its mean."""


@dataclass(frozen=True)
class LearnedMultiplier:
    """What the trials taught of one part of the closed form."""

    part: str
    multiplier: float
    """Measured over predicted, as calibrated."""
    certainty: float
    """0 nothing was learned, 1 it is known."""


@dataclass(frozen=True)
class SearchSnapshot:
    """Where the search stands by the surrogate's own account."""

    top_rows: tuple[int, ...]
    """Rows, best first: what the default strategy would run, one after another."""
    num_open: int
    """Configurations neither tried nor pending."""
    max_expected_improvement: float | None
    """Largest expected improvement, chance of success counted; None before anything has succeeded."""
    p_improvement: float | None
    """Probability that any single remaining configuration improves on the best by over 1 %; None before a success."""
    median_error: float | None
    """Median relative error of the predicted step time over measured trials, each predicted without itself; None
    below three."""
    learned_multipliers: tuple[LearnedMultiplier, ...]
    """Parts whose multiplier the trials have moved, most certain first."""

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing plausible is left that would improve on the best by a thousandth."""
        return self.num_open == 0 or (
            self.max_expected_improvement is not None and self.max_expected_improvement < 0.1 * NEGLIGIBLE
        )


def summarize_posterior(view: SearchView, posterior: CandidatePosterior, top: int) -> SearchSnapshot:
    """The outlook that follows from a belief which is there already."""
    gain = expected_improvement(posterior, incumbent(posterior))
    has_best = posterior.best is not None
    return SearchSnapshot(
        top_rows=tuple(int(posterior.rows_m[m]) for m, _ in choose_batch(posterior, top, failure_penalty(view))),
        num_open=len(posterior.rows_m),
        max_expected_improvement=float(np.max(gain * posterior.p_success_m)) if has_best else None,
        p_improvement=_p_improvement(posterior) if has_best else None,
        median_error=_median_error(posterior),
        learned_multipliers=_lessons(posterior),
    )


def p10_halfwidth_m(view: SearchView, posterior: CandidatePosterior) -> Array:
    """(m,) log units below and above the expected step time that leave 10 % of what may be measured on either side."""
    if view.objective == "step_time":
        return TENTH_PERCENTILE * posterior.sd_m
    return np.asarray(TENTH_PERCENTILE * np.sqrt(posterior.time.likeliest.marginals(posterior.rows_m)[1]))


def _p_improvement(posterior: CandidatePosterior) -> float:
    """By model: one minus the chance that the likeliest rows all fail to improve; models carry the correlation."""
    assert posterior.best is not None
    better_km = ndtr((posterior.best - NEGLIGIBLE - posterior.mean_km) / posterior.sd_km) * posterior.p_success_m
    return float(posterior.weight_k @ better_km.max(axis=1))


def _median_error(posterior: CandidatePosterior) -> float | None:
    error = posterior.time.leave_one_out_error()
    return float(np.median(np.abs(np.expm1(error)))) if len(error) >= 3 else None


def _lessons(posterior: CandidatePosterior) -> tuple[LearnedMultiplier, ...]:
    time_posterior = posterior.time.likeliest
    certainty = 1 - (time_posterior.multiplier_sd() / time_posterior.prior.sd_P) ** 2
    order = np.argsort(-certainty, kind="stable")
    return tuple(
        LearnedMultiplier(MULTIPLIERS[p], float(np.exp(time_posterior.theta_P[p])), float(certainty[p]))
        for p in order
        if certainty[p] >= 0.2
    )
