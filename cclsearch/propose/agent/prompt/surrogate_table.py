"""The surrogate's predictions for every configuration, as the agent and the arbiter use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.array_codec import Packed
from cclsearch.core.metrics import Direction
from cclsearch.core.text import count_of
from cclsearch.core.values import FailureKind
from cclsearch.propose.agent.prompt.correction_lines import describe_corrections
from cclsearch.propose.agent.prompt.recent_trials import review_trials
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.acquisition import expected_improvement, incumbent
from cclsearch.propose.bayes.outlook import MIN_TRIALS
from cclsearch.propose.bayes.snapshot import (
    NEGLIGIBLE,
    SearchSnapshot,
    find_chances,
    find_gain_left,
    p10_halfwidth_m,
    summarize_posterior,
)
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.scoring.objective import Term
from cclsearch.stats.closed_form import predict_space

Floats = Annotated[NDArray[np.float64], Packed(np.float64)]

NUM_TOP_ROWS = 12
NUM_FIRST_CHOICES = 3
"""Number of the surrogate's first candidates, which it would run itself."""
NUM_PROMISING = 5
"""Number of first candidates, and of the likeliest to win, that the LLM may submit without an overrule."""
PLAUSIBLE = 0.02
"""A configuration with at least this chance of beating the best by over 1 % is free."""
# It would almost certainly fail.
UNLIKELY = 0.01
"""P(fits) below which a configuration is neither listed nor free."""
MIN_BET_TRIALS = 3
"""Measured trials from which the model may end the search at its own risk."""
MAX_BET_GAIN = 0.05
"""Expected gain of the trials left up to which it may."""
MAX_UNSEEN = 2
"""Failures of a value of a knob without a closed form after which the surrogate's judgement of it counts."""
MIN_NARROWING = 0.05
"""Narrowing of the surrogate's spread from which its record mentions it."""
# Repeats of one configuration differ by more.
MIN_NOISE = 0.01
"""Relative difference below which two runs are never distinguished."""
LEARNT = "learnt, as factors of the closed form (in brackets the share of the prior variance that trials removed)"


@dataclass(frozen=True, eq=False)
class SurrogateTable:
    """The surrogate's predictions for N configurations; NaN for rows that were pruned from a large space."""

    value_N: Floats
    """Predicted value of the primary metric, if it fits into memory."""
    optimistic_N: Floats
    """Optimistic value: the tenth percentile, on the better side."""
    memory_gib_N: Floats
    fits_N: Floats
    """Probability that it fits into memory, 0 to 1."""
    order: Annotated[tuple[int, ...], Packed(np.int32)]
    """Rows that may still be proposed, the most promising first."""
    nothing_left: bool
    """Whether no open row could plausibly beat the best beyond the noise."""
    why: str
    """The reason for `nothing_left`, in one sentence."""
    record: tuple[str, ...] = ()
    """Accuracy of earlier predictions, and lessons from them, in lines."""
    satisfies_N: Floats | None = None
    """Probability that it satisfies the objective's constraints if it succeeds, 0 to 1; None without constraints."""
    wins_N: Floats | None = None
    """Chance that it runs and beats the best by over 1 %, 0 to 1; None before a trial is ranked."""
    unseen_N: Annotated[NDArray[np.bool_], Packed(np.bool_)] | None = None
    """Whether a row has a value of a knob without a closed form that has not run yet, so that the surrogate cannot
    judge it."""
    review: tuple[str, ...] = ()
    """The latest trials beside their predictions, and the surrogate's next choice with its reasons, in lines."""
    oom_odds: Mapping[int, float] = field(default_factory=dict)
    """Failed trial with an unknown cause -> probability that memory was the cause."""
    gain_left: float = 1.0
    """Expected relative gain of all trials left together; 1 before a trial is ranked."""
    first_only: bool = False
    """Whether only the surrogate's first candidates, and the likeliest to win, are free."""
    scatter: str = ""
    """Scatter of the measured trials that the surrogate cannot explain, in words; empty for too few trials."""
    corrections: tuple[str, ...] = ()
    """The LLM's corrections and doubts, with their weights and what they change, in lines."""

    @cached_property
    def least_fits(self) -> float:
        """P(fits) below which rows are neither listed nor free; 0 if none of the open rows may fit."""
        fits = self.fits_N[list(self.order)]
        return UNLIKELY if (fits >= UNLIKELY).any() else 0.0

    @cached_property
    def listed(self) -> tuple[int, ...]:
        """`order` without the rows that almost certainly do not fit."""
        return tuple(row for row in self.order if self.fits_N[row] >= self.least_fits)

    @cached_property
    def likeliest(self) -> tuple[int, ...]:
        """`listed` with the likeliest to win first; the surrogate's own order before a trial is ranked."""
        wins_N = self.wins_N
        return self.listed if wins_N is None else tuple(sorted(self.listed, key=lambda row: -wins_N[row]))

    def is_first_choice(self, row: int) -> bool:
        """Whether the surrogate alone could run this row next: by its expected improvement, or by its chance to win."""
        return row in self.order[:NUM_FIRST_CHOICES] or row in self.likeliest[:NUM_FIRST_CHOICES]

    def is_promising(self, row: int) -> bool:
        """Whether it is one of the first by the surrogate's expected improvement, or by its chance to win."""
        return row in self.listed[:NUM_PROMISING] or row in self.likeliest[:NUM_PROMISING]

    def is_free(self, row: int) -> bool:
        """Whether the LLM may submit this row without overruling the surrogate."""
        if self.is_promising(row):
            return True
        if self.first_only or self.fits_N[row] < self.least_fits:
            return False
        if self.unseen_N is not None and self.unseen_N[row]:
            return True
        return self.wins_N is not None and bool(self.wins_N[row] >= PLAUSIBLE)

    def sort_by_chance(self, rows: Iterable[int], sign: float) -> list[int]:
        """These rows, the likeliest to win first, ties by the predicted metric; before a trial is ranked, as given."""
        wins_N = self.wins_N
        if wins_N is None:
            return list(rows)
        return sorted(rows, key=lambda row: (-round(float(wins_N[row]), 3), sign * float(self.value_N[row])))


MakeSurrogateTable = Callable[[SearchView], SurrogateTable]


def best_observation(view: SearchView) -> Observation | None:
    """The ranked observation with the lowest loss; None if none is ranked."""
    ranked = [observation for observation in view.observations if observation.loss is not None]
    return min(ranked, key=lambda o: (o.loss, o.trial)) if ranked else None  # type: ignore[return-value, arg-type]


def none_ranked(view: SearchView) -> str:
    """Return why no trial is ranked yet, in words."""
    is_violated = any(observation.is_valid for observation in view.observations)
    return "no trial satisfies the constraints yet" if is_violated else "no trial has succeeded yet"


def primary_term(view: SearchView) -> Term | None:
    """The objective's term if it ranks by the primary metric alone, in its better direction; else None."""
    term, metric = view.objective.terms[0], view.primary
    is_alone = view.objective.metrics == (metric.name,) and term.weight is None and term.scale == 1.0
    return term if is_alone and term.direction is (metric.direction or Direction.MINIMIZE) else None


def improvement_threshold(view: SearchView) -> float:
    """Relative difference that counts: from repeats of a configuration if any, else from the spread inside runs."""
    gaps = _list_gaps(view)
    spreads = [o.spread for o in view.observations if o.spread is not None]
    found = max(gaps) if gaps else float(np.median(spreads)) if spreads else 0.0
    return max(found, MIN_NOISE)


def describe_noise(view: SearchView, scatter: str) -> str:
    """Describe the noise: from configurations that ran twice, else a bound from the scatter."""
    least = improvement_threshold(view)
    if _list_gaps(view):
        return f"two runs of one configuration differ by up to {least:.1%}; a smaller difference is not an improvement"
    known = scatter or f"unknown, no configuration ran twice and under {MIN_TRIALS} trials are measured"
    return f"{known}; a difference below {least:.1%} does not count as an improvement"


def describe_scatter(posterior: CandidatePosterior) -> str:
    """Describe the scatter of the measured trials that the surrogate cannot explain; empty for too few trials.

    The noise is heavy-tailed, so the median and the largest error are named. They bound the noise from above, because
    the closed form errs too; the hypotheses weigh how much of it is noise.
    """
    ensemble = posterior.models.primary
    error_n = np.abs(ensemble.leave_one_out_error())
    if len(error_n) < MIN_TRIALS:
        return ""
    weights: dict[float, float] = {}
    for hypothesis, weight in zip(ensemble.hypotheses, ensemble.weight_h, strict=True):
        weights[hypothesis.prior.noise] = weights.get(hypothesis.prior.noise, 0.0) + float(weight)
    likely = ", ".join(f"{noise:.0%} (weight {weight:.2f})" for noise, weight in sorted(weights.items()))
    row = int(ensemble.most_likely.rows_n[int(np.argmax(error_n))])
    trials = [o.trial for o in posterior.models.view.observations if o.row == row]
    where = f" (trial {trials[-1]})" if trials else ""
    return (
        f"no configuration ran twice; the surrogate, fitted without each of {len(error_n)} measured trials, misses it "
        f"by x{np.exp(np.median(error_n)):.2f} in the median and up to x{np.exp(error_n.max()):.2f}{where}; its "
        f"hypotheses of the noise between runs: {likely}"
    )


def _list_gaps(view: SearchView) -> list[float]:
    """Return the relative difference between the runs of each configuration that ran more than once."""
    losses: dict[int, list[float]] = {}
    for observation in view.observations:
        if observation.loss is not None and observation.row is not None:
            losses.setdefault(observation.row, []).append(observation.loss)
    return [(max(many) - min(many)) / abs(min(many)) for many in losses.values() if len(many) > 1 and min(many)]


def make_surrogate_table(view: SearchView) -> SurrogateTable:
    """The table of the surrogate fitted to a view."""
    size = len(view.space)
    value_N, optimistic_N, memory_N = (np.full(size, np.nan) for _ in range(3))
    fits_N = np.zeros(size)
    posterior = fit_posterior(view)
    if posterior is None:
        why = "every configuration of the search space was tried or is held back"
        return SurrogateTable(value_N, optimistic_N, memory_N, fits_N, (), nothing_left=True, why=why)
    snapshot = summarize_posterior(view, posterior, NUM_TOP_ROWS)
    rows = posterior.rows_m
    if len(rows) < np.count_nonzero(~view.taken_N):
        _fill_closed_form(view, fits_N, memory_N)
    sign = view.primary.sign  # a cost is the metric, or its reciprocal if greater is better
    value_N[rows] = np.exp(sign * posterior.log_cost_m)
    optimistic_N[rows] = np.exp(sign * (posterior.log_cost_m - p10_halfwidth_m(posterior)))
    memory_N[rows] = posterior.memory_gib_m
    fits_N[rows] = posterior.p_fits_m
    promise = expected_improvement(posterior, incumbent(posterior)) * posterior.p_valid_m
    rest = [int(row) for row in rows[np.argsort(-promise, kind="stable")]]
    order = tuple(dict.fromkeys([*snapshot.top_rows, *rest]))
    satisfies_N = None
    if view.objective.constraints:
        satisfies_N = np.zeros(size)
        satisfies_N[rows] = posterior.p_satisfies_m
    wins_N = None
    if posterior.best is not None:
        wins_N = np.zeros(size)
        wins_N[rows] = find_chances(posterior)
    gain = 1.0 if wins_N is None else find_gain_left(posterior, view.budget_left)
    left, why = _find_left(view, posterior, wins_N, gain)
    return SurrogateTable(
        *(value_N, optimistic_N, memory_N, fits_N, order, not left, why, _describe_record(snapshot, posterior.spread)),
        satisfies_N=satisfies_N,
        wins_N=wins_N,
        unseen_N=find_unseen(view),
        review=review_trials(view, posterior, order),
        scatter=describe_scatter(posterior),
        corrections=describe_corrections(view, posterior),
        oom_odds=find_oom_odds(view, posterior),
        gain_left=gain,
    )


def find_unseen(view: SearchView) -> NDArray[np.bool_]:
    """(N,) whether a row has a value of an unknown knob that neither succeeded once nor failed `MAX_UNSEEN` times."""
    codes_NU = view.predictor.features.unknown_NU
    unseen_N = np.zeros(len(view.space), dtype=bool)
    fine = [o.row for o in view.observations if o.row is not None and o.failure is None]
    failed = [o.row for o in view.observations if o.row is not None and o.failure is not None]
    for codes_N in codes_NU.T:
        counts = np.bincount(codes_N[failed], minlength=int(codes_N.max(initial=0)) + 1)
        known = np.union1d(codes_N[fine], np.flatnonzero(counts >= MAX_UNSEEN))
        unseen_N |= ~np.isin(codes_N, known)
    return unseen_N


def _fill_closed_form(view: SearchView, fits_N: NDArray[np.float64], memory_N: NDArray[np.float64]) -> None:
    """Fill in P(fits) and memory of open rows by the prediction before any trial.

    The surrogate replaces the values of the rows that it ranks: of a large space, the most promising ones.
    """
    prediction = predict_space(view.card, view.space, view.predictor)
    if prediction is not None:
        rows = np.flatnonzero(~view.taken_N)
        fits_N[rows], memory_N[rows] = prediction.fits_N[rows], prediction.memory_gib_N[rows]


def _find_left(
    view: SearchView, posterior: CandidatePosterior, wins_N: NDArray[np.float64] | None, gain: float
) -> tuple[bool, str]:
    """Return whether the rest of the budget is worth running, and why, in words.

    It is while its expected gain is at least a difference that counts, so a search ends, on average, within the noise
    of the whole budget's result; and while the trials are too few to show the surrogate's error.
    """
    if wins_N is None:
        return True, none_ranked(view)
    # with measurements of earlier runs of the same work, and with failures, which show what cannot win
    num_known = len(posterior.models.primary.most_likely.rows_n) + sum(o.failure is not None for o in view.observations)
    if num_known < MIN_TRIALS:
        why = f"only {count_of(num_known, 'trial')} finished, `finish` is granted from {MIN_TRIALS} on"
        return True, f"{why} (the trials left are expected to improve the best by {gain:.2%} in all)"
    why = (
        f"the trials left ({view.budget_left}) are expected to improve the best by {gain:.2%} in all (`finish` is "
        f"granted below {NEGLIGIBLE:.0%}); the largest chance of one configuration to win is {wins_N.max():.1%}"
    )
    return gain >= NEGLIGIBLE, why


def find_oom_odds(view: SearchView, posterior: CandidatePosterior) -> dict[int, float]:
    """Return failed trial with an unknown cause -> the probability that memory was it."""
    failed = [o for o in view.observations if o.failure is not None and o.row is not None]
    crashed = [o for o in failed if o.failure and o.failure.kind is FailureKind.CRASHED]
    if not crashed or view.predictor.memory is None:
        return {}
    rows = np.array([o.row for o in crashed], dtype=np.int64)
    p_fits = posterior.models.feasibility.predict(rows)[1]
    return {o.trial: float(1 - fits) for o, fits in zip(crashed, p_fits, strict=True)}


def _describe_record(snapshot: SearchSnapshot, spread: float) -> tuple[str, ...]:
    lines = []
    if spread < 1 - MIN_NARROWING:
        lines.append(f"its errors so far are smaller than it expected: chances use x{spread:.2f} of its own spread")
    if snapshot.median_error is not None:
        lines.append(
            f"its median error over the measured trials, each predicted without itself: {snapshot.median_error:.1%}"
        )
    learned = [
        f"{lesson.part.replace('_', ' ')} x{lesson.multiplier:.2f} ({lesson.certainty:.0%})"
        for lesson in snapshot.learned_multipliers[:6]
    ]
    if learned:
        lines.append(f"{LEARNT}: {', '.join(learned)}")
    return tuple(lines)
