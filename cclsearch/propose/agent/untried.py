"""The most promising candidate of each value that no trial has had: what trying it would mean."""

from __future__ import annotations

from cclsearch.core.values import format_knob_value
from cclsearch.propose.agent.changes import find_unseen_values
from cclsearch.propose.agent.row_facts import RowFacts
from cclsearch.propose.agent.surrogate_table import SurrogateTable
from cclsearch.propose.agent.tables import candidate_lines
from cclsearch.propose.base import SearchView

MAX_UNTRIED = 10
"""Configurations that are listed, one of each value, or of several."""


def untried_lines(view: SearchView, table: SurrogateTable, facts: RowFacts) -> list[str]:
    """Return, for each value without a trial, the candidate with it that is likeliest to win, a line each.

    Values that share their best candidate share its line. Then the values that no candidate has that may fit.
    """
    values: dict[int, list[str]] = {}
    without: list[str] = []
    for column, code in find_unseen_values(view):
        knob = view.space.knobs[column]
        name = f"{knob.name}={format_knob_value(knob.choices[code])}"
        row = _find_best(view, table, column, code)
        if row is None:
            without.append(name)
        else:
            values.setdefault(row, []).append(name)
    if not values:
        return []
    rows = list(values)[:MAX_UNTRIED]
    head, *lines = candidate_lines(view, table, rows, len(rows), facts)
    named = [f"{', '.join(values[row])}: {line}" for row, line in zip(rows, lines, strict=True)]
    left = sum(len(names) for names in values.values()) - sum(len(values[row]) for row in rows)
    rest = [f"({left} more values)"] if left else []
    rest += [f"no candidate that may fit has {', '.join(without)}"] if without else []
    return [f"value: {head}", *named, *rest]


def _find_best(view: SearchView, table: SurrogateTable, column: int, code: int) -> int | None:
    """The candidate with this value, in effect, that is likeliest to win; None if none may fit."""
    has_N = (view.space.codes_NK[:, column] == code) & ~view.space.is_idle_N(column)
    return next((row for row in table.likeliest if has_N[row]), None)
