"""Metrics of a trial that are computed from its other metrics, for objectives and constraints of your own.

    from cclsearch.scoring.trial_metric import trial_metric

    @trial_metric("usd_per_hour", unit="USD/h", better="lower", summary="what the trial's accelerators cost")
    def measure_usd_per_hour(metrics, config, card):
        return 2.5 * metrics["num_accelerators"]

A file in `metrics/` or `objectives/` of a trusted project registers its metrics in this way, or the module of a package
(`cclsearch.plugins`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from cclsearch.card.model import Card
from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.core.registry import Registry
from cclsearch.core.text import one_line
from cclsearch.core.values import Config

Measure = Callable[[Mapping[str, float], Config, Card], float | None]
"""The trial's metrics by name, its configuration and the card -> the value; None if there is none."""
F = TypeVar("F", bound=Measure)
DIRECTIONS = {"lower": Direction.MINIMIZE, "higher": Direction.MAXIMIZE}


@dataclass(frozen=True)
class TrialMetric:
    """One registered metric of trials."""

    info: MetricInfo
    summary: str
    function: Measure


TRIAL_METRICS: Registry[TrialMetric] = Registry("trial metric", needs=("info", "function"))
"""name -> metric of a trial, from its other metrics; registered by `trial_metric`."""


def trial_metric(
    name: str, *, unit: str, better: Literal["lower", "higher"], summary: str = "", is_positive: bool = False
) -> Callable[[F], F]:
    """Return a decorator that registers a function as the metric `name`; the function itself stays callable.

    `is_positive` says that every value is above 0. Raises ValueError for another direction or an unusable name.
    """
    if better not in DIRECTIONS:
        raise ValueError(f"better must be 'lower' or 'higher', not {better!r}")
    if not name.isidentifier():
        raise ValueError(f"the name of a metric has letters, digits and '_', not {name!r}")
    info = MetricInfo(
        name=name,
        unit=unit,
        direction=DIRECTIONS[better],
        source="code",
        missing=f"no code computed {name!r} from the trial's metrics: see the trial's notes and `ccl-search doctor`",
        is_positive=is_positive,
    )

    def register(function: F) -> F:
        TRIAL_METRICS.register(name)(TrialMetric(info, summary or one_line(function.__doc__ or ""), function))
        return function

    return register


def derive_by_code(metrics: Mapping[str, float], config: Config, card: Card) -> tuple[dict[str, float], list[str]]:
    """The values of all registered metrics, and a note on each that failed; one that the trial has is not replaced."""
    found: dict[str, float] = {}
    notes = []
    for name in TRIAL_METRICS.names():
        if name in metrics:
            continue
        try:
            value = TRIAL_METRICS.get(name).function(dict(metrics), config, card)
            if value is None:
                continue
            value = float(value)
            problem = "" if math.isfinite(value) else f"it is {value}"
        except Exception as error:  # the code is the user's
            value, problem = 0.0, f"it raised {type(error).__name__}: {error}"
        if problem:
            notes.append(one_line(f"{name} was left out: {problem}", 300))
        else:
            found[name] = value
    return found, notes
