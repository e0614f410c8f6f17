"""What the surrogate thinks of every configuration, in the form in which the agent and the arbiter use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.proposer import expected_improvement, incumbent
from cclsearch.propose.bayes.snapshot import SearchSnapshot, p10_halfwidth_m, summarize_posterior
from cclsearch.propose.bayes.surrogate import fit_posterior

Floats = NDArray[np.float64]

NUM_TOP_ROWS = 12
PLAUSIBLE = 0.05
"""Chance below which a candidate's win is no longer plausible."""
LEAST_NOISE = 0.01
"""Relative difference below which two runs are never told apart: repeats of one configuration differ by more."""


@dataclass(frozen=True, eq=False)
class SurrogateTable:
    """The surrogate's view of N configurations; NaN where a large space was sifted and a row left out."""

    time_N: Floats
    """Predicted seconds per step where it fits."""
    low_N: Floats
    """Seconds that it beats only by luck: the tenth percentile."""
    memory_gib_N: Floats
    fits_N: Floats
    """Probability that it fits into memory, 0 to 1."""
    order: tuple[int, ...]
    """Rows that may still be proposed, the most promising first."""
    nothing_left: bool
    """Whether no open row could plausibly beat the best beyond the noise."""
    why: str
    """One sentence that says how `nothing_left` was found."""
    record: tuple[str, ...] = ()
    """How well earlier predictions held, one line each, latest last."""


SurveyFunction = Callable[[SearchView], SurrogateTable]


def best_observation(view: SearchView) -> Observation | None:
    """The ranked observation with the lowest loss; None where nothing is ranked."""
    ranked = [observation for observation in view.observations if observation.loss is not None]
    return min(ranked, key=lambda o: (o.loss, o.trial)) if ranked else None  # type: ignore[return-value, arg-type]


def estimate_noise(view: SearchView) -> float:
    """Relative noise of a loss: from repeats of one configuration where there are any, else from the steps' spread."""
    losses: dict[int, list[float]] = {}
    for observation in view.observations:
        if observation.loss is not None and observation.row is not None:
            losses.setdefault(observation.row, []).append(observation.loss)
    gaps = [(max(many) - min(many)) / abs(min(many)) for many in losses.values() if len(many) > 1 and min(many)]
    spreads = [o.spread for o in view.observations if o.spread is not None]
    found = max(gaps) if gaps else float(np.median(spreads)) if spreads else 0.0
    return max(found, LEAST_NOISE)


def open_rows(view: SearchView) -> NDArray[np.bool_]:
    """(N,) bool: rows that may still be proposed."""
    free = np.ones(len(view.space), dtype=bool)
    taken = [o.row for o in view.observations if o.row is not None] + list(view.closed)
    free[taken] = False
    return free


def survey_surrogate(view: SearchView) -> SurrogateTable:
    """The surrogate's look at a search."""
    size = len(view.space)
    time_N, low_N, memory_N, fits_N = (
        np.full(size, np.nan),
        np.full(size, np.nan),
        np.full(size, np.nan),
        np.zeros(size),
    )
    posterior = fit_posterior(view)
    if posterior is None:
        why = "every legal configuration was tried or held back"
        return SurrogateTable(time_N, low_N, memory_N, fits_N, (), nothing_left=True, why=why)
    outlook = summarize_posterior(view, posterior, NUM_TOP_ROWS)
    rows = posterior.rows_m
    time_N[rows] = np.exp(posterior.log_time_m)
    low_N[rows] = np.exp(posterior.log_time_m - p10_halfwidth_m(view, posterior))
    memory_N[rows] = posterior.memory_gib_m
    fits_N[rows] = posterior.p_fits_m
    promise = expected_improvement(posterior, incumbent(posterior)) * posterior.p_success_m
    rest = [int(row) for row in rows[np.argsort(-promise, kind="stable")]]
    order = tuple(dict.fromkeys([*outlook.top_rows, *rest]))
    left, why = _what_is_left(outlook, best_observation(view) is not None)
    return SurrogateTable(
        time_N, low_N, memory_N, fits_N, order, nothing_left=not left, why=why, record=_describe_record(outlook)
    )


def _what_is_left(outlook: SearchSnapshot, has_best: bool) -> tuple[bool, str]:
    if not has_best or outlook.p_improvement is None or outlook.max_expected_improvement is None:
        return True, "nothing has run successfully yet"
    why = (
        f"the surrogate gives a chance of {outlook.p_improvement:.0%} that one of {outlook.num_open} open "
        f"configurations beats the best by over 1 %; "
        f"the largest expected improvement is {outlook.max_expected_improvement:.2%}"
    )
    return not (outlook.is_exhausted or outlook.p_improvement < PLAUSIBLE), why


def _describe_record(outlook: SearchSnapshot) -> tuple[str, ...]:
    lines = []
    if outlook.median_error is not None:
        lines.append(
            f"its median error over the measured trials, each predicted without itself: {outlook.median_error:.1%}"
        )
    lines += [
        f"learnt: {lesson.part.replace('_', ' ')} takes x{lesson.multiplier:.2f} of the closed form "
        f"(certainty {lesson.certainty:.1f})"
        for lesson in outlook.learned_multipliers[:6]
    ]
    return tuple(lines)
