"""Effects of one knob alone between trials, untested values, and the number of knobs in which rows differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import format_knob_value
from cclsearch.propose.agent.tools.configs import format_config, free_knobs
from cclsearch.propose.base import Observation, SearchView
from cclsearch.space.knobs import canonical_name, list_degrees
from cclsearch.space.table import Space

MAX_PAIRS = 3
"""Number of shown pairs of one knob, those with the best trials first."""
MAX_TRIALS = 40
"""Trials that are compared with each other: the best ones."""
LAYOUT = "degrees of parallelism"
"""They count as one change: their product is fixed."""


def change_lines(view: SearchView) -> list[str]:
    """Return the effect of each knob alone between pairs of trials, a line each."""
    measured = [o for o in view.observations if o.row is not None and o.value(view.primary.name)]
    if not measured:
        return []
    ranked = sorted(measured, key=lambda o: (o.loss is None, o.loss or 0.0))[:MAX_TRIALS]
    pairs: dict[str, list[str]] = {}
    for one, other in combinations(ranked, 2):
        changed = _find_change(view, one.row or 0, other.row or 0)
        if changed and len(pairs.setdefault(changed, [])) < MAX_PAIRS:
            pairs[changed].append(_describe_pair(view, changed, one, other))
    return [f"{name}: {'; '.join(found)}" for name, found in pairs.items()]


def _find_change(view: SearchView, row: int, other: int) -> str:
    """Return the knob in which two rows differ, `LAYOUT` if only in degrees; empty if in more, or in none."""
    space = view.space
    differing = (space.masked_NK[row] != space.masked_NK[other]).nonzero()[0]
    names = {_name(space.knobs[column].name) for column in differing}
    return names.pop() if len(names) == 1 else ""


def count_changes(space: Space, row: int) -> NDArray[np.int64]:
    """(N,) in how many knobs with an effect each row differs from this one; degrees of parallelism count as one."""
    differs_NK = space.masked_NK != space.masked_NK[row]
    is_layout_K = _find_degrees(space)
    return np.asarray(differs_NK[:, ~is_layout_K].sum(axis=1) + differs_NK[:, is_layout_K].any(axis=1))


def has_degrees(space: Space) -> bool:
    """Whether several knobs that vary are degrees of parallelism, which count as one change."""
    return sum(_name(knob.name) == LAYOUT and len(knob.choices) > 1 for knob in space.knobs) > 1


def _find_degrees(space: Space) -> NDArray[np.bool_]:
    return np.array([_name(knob.name) == LAYOUT for knob in space.knobs], dtype=bool)


def _name(knob: str) -> str:
    return LAYOUT if canonical_name(knob) in list_degrees() else knob


def _describe_pair(view: SearchView, changed: str, one: Observation, other: Observation) -> str:
    """`2 -> 4: step x0.951 (trials 3, 5: tp=2 pp=1)`: the change to the better trial, and what they share."""
    metric = view.primary
    ratio = (one.value(metric.name) or 0.0) / (other.value(metric.name) or 1.0)
    old, new = (_values(view, changed, o) for o in (other, one))
    shared = {name: value for name, value in view.space.masked_config(one.row or 0).items() if _name(name) != changed}
    same = format_config(view.space, shared)
    return f"{old} -> {new}: {metric.short or metric.words} x{ratio:.3f} (trials {other.trial}, {one.trial}: {same})"


def _values(view: SearchView, changed: str, o: Observation) -> str:
    config = view.space.masked_config(o.row or 0)  # with knobs that were added since, and as equal runs have them
    if changed != LAYOUT:
        return format_knob_value(config[changed])
    return format_config(view.space, {name: value for name, value in config.items() if _name(name) == LAYOUT})


def find_unseen_values(view: SearchView) -> list[tuple[int, int]]:
    """Return the column of a knob and the code of each value that no finished or running trial had, in effect.

    Degrees of parallelism come first.
    """
    space = view.space
    rows: Sequence[int] = [o.row for o in view.observations if o.row is not None] + sorted(view.pending)
    found = []
    for column, knob in enumerate(space.knobs):
        if knob not in free_knobs(space):
            continue
        codes_N, idle_N = space.codes_NK[:, column], space.is_idle_N(column)
        known = set(codes_N[rows][~idle_N[rows]].tolist())  # without effect, a value is not tried
        found += [(column, code) for code in sorted(set(codes_N[~idle_N].tolist()) - known)]
    return sorted(found, key=lambda value: _name(space.knobs[value[0]].name) != LAYOUT)
