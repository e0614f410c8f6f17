"""The surrogate's own view of a search, for whoever decides: the agent's prompt, and whether to stop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.proposer import bar, choose_batch, expected_gain, failure_price
from cclsearch.propose.bayes.surrogate import Belief
from cclsearch.tasks.training.layout import Array
from cclsearch.tasks.training.time import MULTIPLIERS

NEGLIGIBLE = 0.01
"""An improvement below this share is none."""
TENTH_PERCENTILE = 1.2816
"""Standard deviations of a normal below its mean."""


@dataclass(frozen=True)
class Lesson:
    """What the trials taught of one part of the closed form."""

    part: str
    multiplier: float
    """Measured over predicted, as calibrated."""
    certainty: float
    """0 nothing was learned, 1 it is known."""


@dataclass(frozen=True)
class Outlook:
    """Where the search stands by the surrogate's own account."""

    foremost: tuple[int, ...]
    """Rows, best first: what the default strategy would run, one after another."""
    num_open: int
    """Configurations neither tried nor pending."""
    best_gain: float | None
    """Largest expected improvement, chance of success counted; None before anything has succeeded."""
    chance_of_better: float | None
    """Probability that any single remaining configuration improves on the best by over 1 %; None before a success."""
    median_error: float | None
    """Median relative error of the predicted step time over measured trials, each predicted without itself; None
    below three."""
    lessons: tuple[Lesson, ...]
    """Parts whose multiplier the trials have moved, most certain first."""

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing plausible is left that would improve on the best by a thousandth."""
        return self.num_open == 0 or (self.best_gain is not None and self.best_gain < 0.1 * NEGLIGIBLE)


def survey_belief(view: SearchView, belief: Belief, top: int) -> Outlook:
    """The outlook that follows from a belief which is there already."""
    gain = expected_gain(belief, bar(belief))
    has_best = belief.best is not None
    return Outlook(
        foremost=tuple(int(belief.rows_m[m]) for m, _ in choose_batch(belief, top, failure_price(view))),
        num_open=len(belief.rows_m),
        best_gain=float(np.max(gain * belief.works_m)) if has_best else None,
        chance_of_better=_chance_of_better(belief) if has_best else None,
        median_error=_median_error(belief),
        lessons=_lessons(belief),
    )


def reach_m(view: SearchView, belief: Belief) -> Array:
    """(m,) log units below and above the expected step time that leave 10 % of what may be measured on either side."""
    if view.objective == "step_time":
        return TENTH_PERCENTILE * belief.sd_m
    return np.asarray(TENTH_PERCENTILE * np.sqrt(belief.time.likeliest.marginals(belief.rows_m)[1]))


def _chance_of_better(belief: Belief) -> float:
    """By model: one minus the chance that the likeliest rows all fail to improve; models carry the correlation."""
    assert belief.best is not None
    better_km = ndtr((belief.best - NEGLIGIBLE - belief.mean_km) / belief.sd_km) * belief.works_m
    return float(belief.weight_k @ better_km.max(axis=1))


def _median_error(belief: Belief) -> float | None:
    error = belief.time.left_out_error()
    return float(np.median(np.abs(np.expm1(error)))) if len(error) >= 3 else None


def _lessons(belief: Belief) -> tuple[Lesson, ...]:
    posterior = belief.time.likeliest
    certainty = 1 - (posterior.multiplier_sd() / posterior.prior.sd_P) ** 2
    order = np.argsort(-certainty, kind="stable")
    return tuple(
        Lesson(MULTIPLIERS[p], float(np.exp(posterior.theta_P[p])), float(certainty[p]))
        for p in order
        if certainty[p] >= 0.2
    )
