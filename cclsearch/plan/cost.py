"""What a search will cost before it starts: trials x seconds of a trial x nodes, with what that assumes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cclsearch.card.model import Card
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Prediction, predict_space
from cclsearch.tasks.base import task_of

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
