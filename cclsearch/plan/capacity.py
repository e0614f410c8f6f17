"""Whether any configuration is predicted to carry a card's load within its limits, and what carries it if none does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cclsearch.plan.forecast import MAX_CONFIGS
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.prediction import Limited, predict_limited
from cclsearch.space.knobs import meaning_of
from cclsearch.stats.closed_form import Rows
from cclsearch.tasks.base import task_of

FEW = 6
"""Configurations of each number of accelerators that are looked at."""
MIN_SHARE = 0.03
"""Least share of the load that is tried."""
HALVINGS = 3
"""Steps of the search between a share that is carried and one that is not."""


def describe_capacity(view: SearchView) -> list[str]:
    """Return lines that say how many accelerators are predicted to carry the load within its limits; if none do, how
    much of it they carry, how many would carry it, and which limit alone is in the way.

    Empty without limits, or if the task's load has no size.
    """
    task, card, limits = task_of(view.card), view.card, view.objective.constraints
    if not limits or not 0 < len(view.space) <= MAX_CONFIGS or task.share_load(card, 1.0) is None:
        return []
    carried: dict[int, float] = {}
    whole = _look(view, 1.0, carried)
    if not len(whole.rows) or not whole.values:
        return []
    shown = [f"{c}{'' if c.metric in whole.values else ' (not predicted)'}" for c in limits if not c.is_implied]
    wanted = task.describe_load(card) + (f" under {' and '.join(shown)}" if shown else "")
    of = f"{card.hardware.num_accelerators} {card.hardware.accelerator}"
    if carried:
        row = min(carried, key=lambda row: (view.space.num_accelerators_N[row], -carried[row]))
        return [f"{wanted}: predicted to need {view.space.num_accelerators_N[row]} of {of} ({_label(view, row)})"]
    _find_most(view, carried)
    if not carried:
        return [f"no configuration is predicted to keep {wanted} on {of}, not even {MIN_SHARE:.0%} of this load"]
    return [*_describe_most(view, whole, carried, f"keep {wanted} on {of}"), _describe_ways(view, whole, carried)]


def _describe_most(view: SearchView, whole: Limited, carried: dict[int, float], wanted: str) -> Iterator[str]:
    task, best = task_of(view.card), max(carried, key=lambda row: carried[row])
    shares = (carried[best], *carried[best] * np.median(whole.interval_2n, axis=1))
    most, *ends = (task.describe_load(task.share_load(view.card, share) or view.card) for share in shares)
    interval = " to ".join(end.split()[0] for end in ends)
    yield f"no configuration is predicted to {wanted}; the most is about {most} [{interval}] with {_label(view, best)}"


def _describe_ways(view: SearchView, whole: Limited, carried: dict[int, float]) -> str:
    """Return what would carry the load: the cheapest copies of a configuration, or another limit."""
    sizes = {
        row: math.ceil(1 / share - 1e-9) * int(view.space.num_accelerators_N[row]) for row, share in carried.items()
    }
    row = min(sizes, key=lambda row: (sizes[row], -view.space.num_accelerators_N[row]))
    copies = f"{sizes[row] // view.space.num_accelerators_N[row]} copies of {_label(view, row)}"
    relaxed = " or ".join(_relax(view, whole))
    other = f"or relax {relaxed}" if relaxed else "relaxing one limit alone does not help"
    return f"{sizes[row]} accelerators are predicted to carry it, as {copies}; {other}"


def _look(view: SearchView, share: float, carried: dict[int, float]) -> Limited:
    """Predict this share of the load, and note the rows that carry it."""
    card = task_of(view.card).share_load(view.card, share)
    found = predict_limited(replace(view, card=card or view.card), FEW)
    for row in found.rows[found.over_n <= 0].tolist():
        carried[row] = max(share, carried.get(row, 0.0))
    return found


def _find_most(view: SearchView, carried: dict[int, float]) -> None:
    """Note the largest share of the load that rows carry, to within a step of a bisection."""
    broken, share = 1.0, 0.5
    while not carried and share >= MIN_SHARE:
        _look(view, share, carried)
        broken, share = (share, share / 2) if not carried else (broken, share)
    for _ in range(HALVINGS if carried else 0):
        kept = max(carried.values())
        middle = math.sqrt(kept * broken)
        _look(view, middle, carried)
        broken = broken if middle in carried.values() else middle


def _relax(view: SearchView, whole: Limited) -> Iterator[str]:
    """Yield each limit that alone keeps the load from being carried, with the value that would do."""
    for relaxed in view.objective.constraints:
        if relaxed.is_implied or relaxed.metric not in whole.values:
            continue
        kept: Rows = np.array([
            all(c.excess(float(whole.values[c.metric][n])) == 0 for c in view.objective.constraints
                if c is not relaxed and c.metric in whole.values)
            for n in range(len(whole.rows))
        ])  # fmt: skip
        if kept.any():
            values = whole.values[relaxed.metric][kept]
            best = values.min() if relaxed.at_most is not None else values.max()
            yield f"{relaxed.metric} to {best:.3g} {relaxed.unit or ''}".rstrip()


def _label(view: SearchView, row: int) -> str:
    config = view.space.config(row)
    return " ".join(f"{name}={value}" for name, value in config.items() if meaning_of(name).splits) or str(config)
