"""The most promising candidate of each value that no trial has had: the effect of trying it."""

from __future__ import annotations

from cclsearch.core.values import format_knob_value
from cclsearch.propose.agent.prompt.knob_effects import find_unseen_values
from cclsearch.propose.agent.prompt.row_facts import RowFacts
from cclsearch.propose.agent.prompt.surrogate_table import PLAUSIBLE, SurrogateTable
from cclsearch.propose.agent.prompt.tables import candidate_lines
from cclsearch.propose.base import SearchView

MAX_UNTRIED = 10
"""Configurations that are listed, one of each value, or of several."""


def untried_lines(view: SearchView, table: SurrogateTable, facts: RowFacts) -> list[str]:
    """Return, for each value without a trial, the candidate with it that is likeliest to win, a line each.

    Values that share their best candidate share its line. The likeliest come first; values without a chance are named.
    """
    values: dict[int, list[str]] = {}
    without: list[str] = []
    for column, code in find_unseen_values(view):
        knob = view.space.knobs[column]
        name = f"{knob.name}={format_knob_value(knob.choices[code])}"
        row = _find_best(view, table, column, code)
        if row is None or (table.wins_N is not None and table.wins_N[row] < PLAUSIBLE):
            without.append(name)
        else:
            values.setdefault(row, []).append(name)
    rows = table.sort_by_chance(values, view.primary.sign)[:MAX_UNTRIED]
    rest = [f"without a chance of {PLAUSIBLE:.0%} to win: {', '.join(without)}"] if without else []
    if not rows:
        return rest
    head, *lines = candidate_lines(view, table, rows, len(rows), facts)
    named = [f"{', '.join(values[row])}: {line}" for row, line in zip(rows, lines, strict=True)]
    left = [name for row, names in values.items() if row not in rows for name in names]
    return [f"value: {head}", *named, *([f"further values that may win: {', '.join(left)}"] if left else []), *rest]


def _find_best(view: SearchView, table: SurrogateTable, column: int, code: int) -> int | None:
    """The candidate with this value, in effect, that is likeliest to win; None if none may fit."""
    has_N = (view.space.codes_NK[:, column] == code) & ~view.space.is_idle_N(column)
    return next((row for row in table.likeliest if has_N[row]), None)
