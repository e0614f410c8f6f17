"""What the surrogate thinks of every configuration, in the form in which the agent and the arbiter use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.surrogate import Belief

Floats = NDArray[np.float64]

TENTH_PERCENTILE = 1.2816
PLAUSIBLE = 0.05
"""Chance below which a candidate's win is no longer plausible."""
LEAST_NOISE = 0.01
"""Relative difference below which two runs are never told apart: repeats of one configuration differ by more."""


@dataclass(frozen=True, eq=False)
class Look:
    """The surrogate's view of N configurations. Losses are in the objective's unit (seconds for `step_time`)."""

    loss_N: Floats
    """Predicted loss where it fits."""
    low_N: Floats
    """A loss that it beats only by luck: the tenth percentile."""
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


LookFunction = Callable[[SearchView], Look]


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
    taken = [o.row for o in view.observations if o.row is not None] + list(view.pending)
    free[taken] = False
    return free


def survey_look(view: SearchView) -> Look:
    """The surrogate's look at a search."""
    from cclsearch.propose.default import expected_improvement
    from cclsearch.propose.surrogate import believe

    size = len(view.space)
    empty = np.full(size, np.nan)
    belief = believe(view)
    if belief is None:
        return Look(empty, empty, empty, np.zeros(size), (), True, "every legal configuration was tried or held back")
    loss_N, low_N, memory_N, fits_N = empty.copy(), empty.copy(), empty.copy(), np.zeros(size)
    rows = belief.rows_m
    loss_N[rows] = np.exp(belief.mean_m)
    low_N[rows] = np.exp(belief.mean_m - TENTH_PERCENTILE * belief.sd_m)
    memory_N[rows] = belief.memory_gib_m
    fits_N[rows] = belief.fits_m
    best = belief.best_log_loss
    target = float(np.min(belief.mean_m)) + 0.3 if best is None else best
    promise = expected_improvement(belief.mean_m, belief.sd_m, target) * belief.works_m
    order = tuple(int(row) for row in rows[np.argsort(-promise, kind="stable")])
    left, why = _what_is_left(belief, estimate_noise(view))
    return Look(loss_N, low_N, memory_N, fits_N, order, not left, why)


def _what_is_left(belief: Belief, noise: float) -> tuple[bool, str]:
    if belief.best_log_loss is None:
        return True, "nothing has run successfully yet"
    target = belief.best_log_loss + np.log1p(-min(noise, 0.5))
    chance = ndtr((target - belief.mean_m) / belief.sd_m) * belief.works_m
    most = float(np.max(chance))
    what = f"the best open candidate has a chance of {most:.0%} to beat the best by more than the noise ({noise:.1%})"
    return most >= PLAUSIBLE, what
