"""Judge whether an untried configuration is likely to win, and which measured one is worth running again."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from cclsearch.propose.base import Note, SearchView
from cclsearch.propose.bayes.candidates import direct_term
from cclsearch.propose.bayes.ensemble import predict_without
from cclsearch.propose.bayes.snapshot import NEGLIGIBLE, NO_CHANCE, find_p_improvement
from cclsearch.propose.bayes.surrogate import CandidatePosterior
from cclsearch.propose.events import NOTHING_LEFT
from cclsearch.stats.noise import MIN_MAJORITY, estimate_noise, find_largest_gap, measure_gap

SUSPICIOUS = 4.0
"""Standard deviations from the other trials' prediction from which a value is suspicious."""
MAX_CHECKED = 1
"""Trials, apart from the best, that are predicted without themselves for each proposal: those predicted worst."""
# Fewer do not show the surrogate's error: they count less than its prior, of 4 degrees of freedom.
MIN_TRIALS = 5
"""Measured trials before one of them is suspicious, before a search ends, or an LLM ends it (failed ones too)."""
LIKELY = 0.1
"""A suspiciously slow trial is repeated if its configuration, by the other trials, wins at least so probably."""


class Repeat(NamedTuple):
    """A measured configuration to run again."""

    row: int
    why: str


def find_outlook(view: SearchView, posterior: CandidatePosterior) -> str | None:
    """Return that no untried configuration is likely to win, in words; None if one is, or with too few trials."""
    num_measured = len(posterior.models.primary.most_likely.rows_n)
    if posterior.best is None or num_measured < MIN_TRIALS or (chance := find_p_improvement(posterior)) >= NO_CHANCE:
        return None
    return (
        f"no untried configuration is likely to beat the best by {NEGLIGIBLE:.0%} (a chance of {chance:.1%} over all)"
    )


def make_note(view: SearchView, outlook: str) -> Note | None:
    """Return the note on that outlook; None if the ledger has one."""
    if any(isinstance(event, Note) and event.topic == NOTHING_LEFT for event in view.events):
        return None
    return Note(
        topic=NOTHING_LEFT,
        text=f"{outlook}: the remaining trials make sure; Ctrl-C ends the search here, as --stop-early does by itself",
    )


def find_repeat(view: SearchView, posterior: CandidatePosterior, outlook: str | None) -> Repeat | None:
    """Return the row to run once more: a trial that the others contradict, or the best if nothing else may win.

    Only a row with two contradicting results, of which the better one would win, runs a third time. None if no run can
    be repeated, or nothing is worth it.
    """
    if not view.can_repeat or view.objective.is_multi:
        return None
    runs = Counter(o.row for o in view.observations if o.row is not None)
    ranked = [(o.loss, o.trial, o.row) for o in view.observations if o.loss is not None and o.row is not None]
    if (found := _find_contradicting(view, ranked)) is not None:
        return found
    once = [(loss, trial, row) for loss, trial, row in ranked if runs[row] == 1 and row not in view.pending]
    if not once:
        return None
    _, trial, row = min(ranked)
    found = _find_suspicious(posterior, [r for _, _, r in once], row)
    if found is None and outlook is not None and runs[row] == 1 and row not in view.pending:
        return Repeat(row, f"{outlook}; repeats the best, trial {trial}, to make sure of it")
    return found


def _find_contradicting(view: SearchView, ranked: Sequence[tuple[float, int, int]]) -> Repeat | None:
    """Return the row with two contradicting runs, of which the better one would win; None if there is none."""
    losses: dict[int, list[float]] = defaultdict(list)
    for loss, _, row in ranked:
        losses[row].append(loss)
    for row, own in losses.items():
        others = [values for other, values in losses.items() if other != row]
        if (
            len(own) != MIN_MAJORITY - 1
            or row in view.pending
            or min(own) > min(map(np.mean, others), default=math.inf)
        ):
            continue
        if measure_gap(*own) > find_largest_gap(estimate_noise(others)):
            trials = " and ".join(str(trial) for _, trial, other in ranked if other == row)
            return Repeat(row, f"its trials {trials} differ by more than the noise: a third run decides")
    return None


def _find_suspicious(posterior: CandidatePosterior, once: list[int], best_row: int) -> Repeat | None:
    """Return the most suspicious of the rows that ran once and matter; None if none is."""
    models = posterior.models
    ensemble, fit = models.primary, models.primary.most_likely
    if len(fit.rows_n) < MIN_TRIALS or direct_term(models) is None or best_row not in fit.rows_n:
        return None
    target = float(fit.value_n[fit.rows_n == best_row].min()) - NEGLIGIBLE
    order = np.argsort(-np.abs(ensemble.leave_one_out_error()), kind="stable")
    rows = [int(row) for row in fit.rows_n[order] if row in once and row != best_row][:MAX_CHECKED]
    doubted = {o.row for o in models.view.observations if o.trial in models.doubted and o.row in once}
    found: list[tuple[float, Repeat]] = []
    for row in dict.fromkeys([*([best_row] if best_row in once else []), *rows, *sorted(doubted)]):
        mean, sd = predict_without(row, ensemble, models.view.observations, models.earlier)
        error = float(fit.value_n[fit.rows_n == row][0]) - mean
        would_win = float(ndtr((target - mean) / sd)) >= LIKELY
        least = 0.0 if row in doubted else SUSPICIOUS * sd
        if abs(error) > least and (would_win if error > 0 else row == best_row):
            how = f"{math.exp(abs(error)):.1f} times {'worse' if error > 0 else 'better'} than the other trials predict"
            found.append((abs(error) / sd, Repeat(row, f"its result is {how}: measured once more")))
    return max(found)[1] if found else None
