"""Constraints that no trial can satisfy, and models that no device holds, as far as that is known before one runs."""

from __future__ import annotations

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.metrics import NUM_ACCELERATORS
from cclsearch.scoring.objective import Constraint, Objective
from cclsearch.space.table import Space, count_ranks
from cclsearch.stats.closed_form import describe_none_fits, predict_space
from cclsearch.tasks.base import find_task

MAX_CONFIGS = 200_000
"""Largest space whose configurations are counted: about a second."""


def describe_impossible(objective: Objective, space: Space, task: str) -> tuple[str, ...]:
    """Return one line for each constraint that no configuration of the space can satisfy."""
    reasons = ((constraint, _find_reason(constraint, space, task)) for constraint in objective.constraints)
    return tuple(
        f"no trial can satisfy the constraint {str(constraint)!r}: {reason}. The search will rank nothing: change the"
        f" constraint first"
        for constraint, reason in reasons
        if reason
    )


def describe_no_room(card: Card, space: Space) -> tuple[str, ...]:
    """Return a line if no configuration is likely to fit into memory, as far as a closed form predicts it."""
    if not 0 < len(space) <= MAX_CONFIGS or not np.isfinite(card.hardware.memory_gib or np.inf):
        return ()
    prediction = predict_space(card, space)
    none_fits = "" if prediction is None else describe_none_fits(card, prediction)
    return (f"predicted: {none_fits}",) if none_fits else ()


def _find_reason(constraint: Constraint, space: Space, task: str) -> str:
    """Return why no trial can satisfy it; empty if one may."""
    low, high = _find_range(constraint.metric, space, task)
    if constraint.at_most is not None and low is not None and (constraint.at_most < low[0] or constraint.at_most <= 0):
        return low[1]
    return high[1] if constraint.at_least is not None and high is not None and constraint.at_least > high[0] else ""


def _find_range(metric: str, space: Space, task: str) -> tuple[tuple[float, str] | None, tuple[float, str] | None]:
    """Return the lowest and highest value that the metric can have, each with the reason; None if it is not known."""
    if metric == NUM_ACCELERATORS and 0 < len(space) <= MAX_CONFIGS:
        counts = [count_ranks(config) for config in map(space.config, range(len(space)))]
        least, most = min(counts), max(counts)
        return (least, f"the search space needs at least {least}"), (most, f"the search space has at most {most}")
    info = find_task(task).metric(metric)
    low = (0.0, f"{info.words} is always above 0") if info.is_positive else None
    high = (1.0, f"{info.words} is a fraction, at most 1") if info.unit == "fraction" else None
    return low, high
