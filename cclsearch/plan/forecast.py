"""Forecast a search before it starts: its cost, constraints that no trial can satisfy, whether models fit.

The cost is trials x seconds of a trial x nodes, and its line states the assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.metrics import NUM_ACCELERATORS
from cclsearch.scoring.objective import Constraint, Objective
from cclsearch.space.table import Space, count_ranks
from cclsearch.stats.closed_form import Prediction, Predictor, describe_none_fits, predict_space
from cclsearch.tasks.base import find_task, task_of

START_S = 120.0
"""Assumed seconds from the start of a job to its first step: imports, processes, communicators, first compilation."""
LOCAL_START_S = 15.0
"""The same on this machine's CPUs."""


@dataclass(frozen=True)
class SearchCost:
    """The expected use of a cluster by a search."""

    trials: int
    start_s: float
    units: int
    """Steps of a trial: warm-up, timed and profiled ones."""
    unit_s: float
    unit: str
    nodes: int

    @property
    def node_hours(self) -> float:
        return self.trials * self.nodes * (self.start_s + self.units * self.unit_s) / 3600

    def describe(self) -> str:
        """Return the sum in one line, with its factors and the assumption."""
        trial = f"{self.start_s:.0f} s start + {self.units} {self.unit}s x {self.unit_s:.3g} s"
        factors = f"{self.trials} trials x ({trial}) x {self.nodes} node{'s' * (self.nodes != 1)}"
        return (
            f"about {self.node_hours:.2g} node-hours: {factors}. Assumed are the start and the median predicted time"
            f" of the {self.trials} fastest configurations that are likely to fit. Retries, repeats and queue time are"
            " not included"
        )


def start_seconds(card: Card) -> float:
    """Return the assumed seconds before a trial's first step."""
    return LOCAL_START_S if card.hardware.accelerator == "cpu" else START_S


def estimate_search(card: Card, space: Space, trials: int, prediction: Prediction | None = None) -> SearchCost | None:
    """Return the cost of a search with so many trials; None if the task predicts no time."""
    prediction = prediction or predict_space(card, space)
    task = task_of(card)
    if prediction is None or not len(space):
        return None
    rows = prediction.order()[:trials]
    payload = task.make_input(card, space.config(int(rows[0])), is_measured=True, run_id="", trial=1)
    units = task.count_units(payload)
    if units is None:
        return None
    per_node = max(card.hardware.accelerators_per_node, 1)
    nodes = float(np.median([math.ceil(space.num_accelerators_N[row] / per_node) for row in rows]))
    unit_s = float(np.median(prediction.value_N[rows]))
    return SearchCost(trials, start_seconds(card), units, unit_s, task.unit_of_work, math.ceil(nodes))


# Counting them takes about a second.
MAX_CONFIGS = 200_000
"""Largest space whose configurations are counted."""


def describe_impossible(objective: Objective, space: Space, task: str) -> tuple[str, ...]:
    """Return one line for each constraint that no configuration of the space can satisfy."""
    reasons = ((constraint, _find_reason(constraint, space, task)) for constraint in objective.constraints)
    return tuple(
        f"no trial can satisfy the constraint {str(constraint)!r}: {reason}. The search will rank nothing: change the"
        f" constraint first"
        for constraint, reason in reasons
        if reason
    )


def describe_doubt(predictor: Predictor) -> tuple[str, ...]:
    """Return a line if the constants of the closed forms were fitted to nothing like the card."""
    if not predictor.unlike:
        return ()
    return (
        f"not trustworthy here: no measurement {predictor.unlike} is behind the predicted figures, which may be off by"
        " several times; one measured run corrects them",
    )


def describe_no_room(card: Card, space: Space) -> tuple[str, ...]:
    """Return a line if a closed form predicts that no configuration is likely to fit into memory."""
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
    """Return the lowest and highest value that the metric can have, each with the reason; None for an unknown bound."""
    if metric == NUM_ACCELERATORS and 0 < len(space) <= MAX_CONFIGS:
        counts = [count_ranks(config) for config in map(space.config, range(len(space)))]
        least, most = min(counts), max(counts)
        return (least, f"the search space needs at least {least}"), (most, f"the search space has at most {most}")
    info = find_task(task).metric(metric)
    low = (0.0, f"{info.words} is always above 0") if info.is_positive else None
    high = (1.0, f"{info.words} is a fraction, at most 1") if info.unit == "fraction" else None
    return low, high
