"""Describe how the beliefs and doubts of the model's latest turn changed the surrogate's predictions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cclsearch.propose.agent.memory.history import past_turns
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.prior_hints import (
    collect_hints,
    find_doubted,
    find_memory_value,
    find_value,
    name_ways,
    without_latest,
)
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior

Floats = NDArray[np.float64]


def describe_effects(view: SearchView, posterior: CandidatePosterior) -> dict[str, str]:
    """Return each belief and doubted trial (`trial 3`) of the latest turn -> the change by all of them together.

    The predictions are compared with a fit without this turn's. A belief about a value that every measured trial has
    also lowers the level of all others: measurements stay.
    """
    turns = past_turns(view.events)
    named = turns[-1].beliefs.keys() & collect_hints(view).keys() if turns else set()
    doubted = sorted(find_doubted(view).intersection(turns[-1].doubts)) if turns else []
    plain = fit_posterior(without_latest(view)) if named or doubted else None
    if plain is None:
        return {}
    rows, here, there = np.intersect1d(posterior.rows_m, plain.rows_m, return_indices=True)
    ratio = np.exp(view.primary.sign * (posterior.log_cost_m[here] - plain.log_cost_m[there]))
    memory = posterior.memory_gib_m[here] / plain.memory_gib_m[there]
    fits = f"mean P(fits) {plain.p_fits_m[there].mean():.2f} -> {posterior.p_fits_m[here].mean():.2f}"
    of_memory = {*view.predictor.memory_hint_parts, *name_ways(view.predictor.memory)}
    found = {f"trial {trial}": f"{view.primary.words} {_range(ratio)}; {fits}" for trial in doubted}
    for part in sorted(named):
        if (value := find_value(view.space, part)) is not None:
            found[part] = _compare(view, rows, ratio, value, view.primary.words)
        elif (value := find_memory_value(view.space, part)) is not None:
            found[part] = _compare(view, rows, memory, value, "memory")
        else:
            found[part] = fits if part in of_memory else f"{view.primary.words} {_range(ratio)}"
    return found


def _compare(view: SearchView, rows: NDArray[np.int64], ratio_m: Floats, value: tuple[int, int], what: str) -> str:
    """Return the change for candidates with a value, in effect, and for the others."""
    column, code = value
    has_N = (view.space.codes_NK[:, column] == code) & ~view.space.is_idle_N(column)
    own, others = ratio_m[has_N[rows]], ratio_m[~has_N[rows]]
    text = f"{what} of the candidates with it {_range(own)}, of the others {_range(others)}"
    measured = [o.row for o in view.observations if o.row is not None and o.value(view.primary.name)]
    return text + ("; every measured trial has it" if measured and has_N[measured].all() else "")


def _range(ratio_m: Floats) -> str:
    """`x0.95 to x1.02`: the least and the largest ratio."""
    if not len(ratio_m):
        return "(none)"
    least, most = f"x{ratio_m.min():.2f}", f"x{ratio_m.max():.2f}"
    return least if least == most else f"{least} to {most}"
