"""Describe what corrections and doubts of the model change: weights, predictions, the next choice, and the odds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.propose.agent.tools.configs import format_config
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.acquisition import expected_improvement, incumbent
from cclsearch.propose.bayes.corrections import collect_corrections, find_doubted, find_memory_crashes
from cclsearch.propose.bayes.mixture import weigh_labels
from cclsearch.propose.bayes.snapshot import find_gain_left, find_p_improvement
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.propose.events import LlmTurn


def describe_corrections(view: SearchView, posterior: CandidatePosterior) -> tuple[str, ...]:
    """Return each correction that counts with its weight, each doubted trial and crash, and the change by all."""
    models, lines = posterior.models, []
    for one in collect_corrections(view):
        found = [
            f"{what} of {_count(variant.shift_N)} {_range(np.exp(variant.shift_N))}, weight {weight:.2f}"
            for what, variants, shares in (
                (view.primary.words, models.variants, models.primary.shares),
                ("memory", models.memory_variants, models.feasibility.shares),
            )
            for variant in variants
            if variant.labels == (one.label,)
            for weight in (weigh_labels(shares).get(one.label, 0.0),)
        ]
        lines.append(f"{one.label}: {'; '.join(found) or 'changes nothing now'}")
    lines += [f"trial {n} is doubted: it counts little" for n in sorted(find_doubted(view))]
    lines += [f"trial {n} counts as out of memory" for n in sorted(find_memory_crashes(view))]
    plain = fit_posterior(_without_lessons(view)) if lines else None
    return (*lines, f"without these -> with them: {compare(view, plain, posterior)}") if plain else tuple(lines)


def _count(shift_N: NDArray[np.float64]) -> str:
    return f"{np.count_nonzero(shift_N)} of {len(shift_N)} configurations"


def _without_lessons(view: SearchView) -> SearchView:
    """Return the view without corrections, doubts and causes of crashes."""
    blank = {"corrections": (), "doubts": (), "memory_crashes": ()}
    events = (event.model_copy(update=blank) if isinstance(event, LlmTurn) else event for event in view.events)
    return replace(view, events=tuple(events))


def compare(view: SearchView, before: CandidatePosterior, after: CandidatePosterior) -> str:
    """Return what changes from one posterior to the other: predictions, memory, next choice and odds."""
    _, here, there = np.intersect1d(after.rows_m, before.rows_m, return_indices=True)
    ratio = np.exp(view.primary.sign * (after.log_cost_m[here] - before.log_cost_m[there]))
    parts = [f"{view.primary.words} {_range(ratio)}"]
    fits = [float(each.p_fits_m.mean()) for each in (before, after)]
    if view.predictor.memory is not None:
        memory = after.memory_gib_m[here] / before.memory_gib_m[there]
        parts.append(f"memory {_range(memory)}, mean P(fits) {fits[0]:.2f} -> {fits[1]:.2f}")
    first = [_name_next(view, each) for each in (before, after)]
    parts.append(f"first choice {first[0]} -> {first[1]}" if first[0] != first[1] else f"first choice {first[0]} stays")
    if before.best is not None and after.best is not None:
        odds = [f"{find_p_improvement(each):.2f}" for each in (before, after)]
        gain = [f"{find_gain_left(each, view.budget_left):.2%}" for each in (before, after)]
        parts.append(f"P(any beats the best) {' -> '.join(odds)}, expected gain of the trials left {' -> '.join(gain)}")
    return "; ".join(parts)


def _name_next(view: SearchView, posterior: CandidatePosterior) -> str:
    promise_m = expected_improvement(posterior, incumbent(posterior)) * posterior.p_valid_m
    return f"({format_config(view.space, view.space.config(int(posterior.rows_m[int(np.argmax(promise_m))])))})"


def _range(ratio_m: NDArray[np.float64]) -> str:
    """`x0.95 to x1.02`: the least and the largest ratio."""
    least, most = f"x{ratio_m.min():.2f}", f"x{ratio_m.max():.2f}"
    return least if least == most else f"{least} to {most}"
