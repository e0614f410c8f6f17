"""The trials of runs: a table, filtered, sorted and cut into pages by the server, and charts of their history."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import draw_curves
from cclsearch.charts.trials import Axis, draw_history
from cclsearch.core.numbers import read_whole
from cclsearch.record.trial import TrialState
from cclsearch.report.rows import TrialRow
from cclsearch.ui.run_index import RunEntry

PAGE_ROWS = 100
"""Number of trials on one page."""
MAX_PAGE = 10**6
MAX_POINTS = 600
"""Trials that a chart draws; of more, evenly chosen ones and each improvement."""
NUMBER = "trial"
"""Key of the column that a table is sorted by at first."""
KNOB = "knob."
"""Prefix of the key of a knob's column; the other keys are `trial`, `value`, `result`, `time` and `by`."""


@dataclass(frozen=True)
class TableQuery:
    """Rows of a page, and their order."""

    words: str = ""
    """All of these words must be in a row."""
    state: str = ""
    """A `TrialState`; empty for all."""
    sort: str = NUMBER
    is_down: bool = True
    page: int = 1

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> TableQuery:
        """The query in the parameters of an address; invalid parts are left out."""
        page = parameters.get("page", "")
        state = parameters.get("state", "")
        return cls(
            words=parameters.get("q", "")[:200],
            state=state if state in set(TrialState) else "",
            sort=parameters.get("sort", NUMBER)[:100],
            is_down=parameters.get("down", "1") != "0",
            page=_read_page(page),
        )

    def change(self, **parts: object) -> dict[str, object]:
        """The parameters of an address with other parts, such as `sort`; the defaults are left out."""
        own = {"q": self.words, "state": self.state, "sort": self.sort, "down": int(self.is_down), "page": self.page}
        default = {"q": "", "state": "", "sort": NUMBER, "down": 1, "page": 1}
        return {key: value for key, value in {**own, **parts}.items() if value != default.get(key)}


def _read_page(text: str) -> int:
    try:
        return read_whole(text, 1, MAX_PAGE)
    except ValueError:
        return 1


@dataclass(frozen=True)
class TablePage:
    """The rows of one page, and how many there are."""

    rows: tuple[TrialRow, ...]
    num_found: int
    num_pages: int
    page: int
    first: int
    """Number of the first row among those found, from 1; 0 if none was found."""


def choose_page(rows: Iterable[TrialRow], query: TableQuery) -> TablePage:
    """The page of the rows that the query describes; a page beyond the last is the last."""
    words = query.words.lower().split()
    found = [
        row for row in rows if (not query.state or row.state == query.state) and all(word in row.text for word in words)
    ]
    _sort(found, query)
    num_pages = max(1, -(-len(found) // PAGE_ROWS))
    page = min(query.page, num_pages)
    start = (page - 1) * PAGE_ROWS
    shown = tuple(found[start : start + PAGE_ROWS])
    return TablePage(shown, len(found), num_pages, page, start + 1 if shown else 0)


def _sort(rows: list[TrialRow], query: TableQuery) -> None:
    """Sort in place; rows without a value come last in both directions, equal ones by number."""
    rows.sort(key=attrgetter("number"))
    key = _key_of(query.sort)
    present = [(value, row) for row in rows if (value := key(row)) is not None]
    missing = [row for row in rows if key(row) is None] if len(present) < len(rows) else []
    is_number = all(type(value) in (int, float) for value, _ in present)
    present.sort(key=itemgetter(0) if is_number else lambda pair: _rank(pair[0]), reverse=query.is_down)
    rows[:] = [row for _, row in present] + missing


def _key_of(column: str) -> Callable[[TrialRow], Any]:
    """Return the key that sorts a column; None for a row without a value."""
    if column.startswith(KNOB):
        name = column.removeprefix(KNOB)
        return lambda row: row.config.get(name)
    attribute = {"value": "figure", "time": "seconds", "result": "state", "by": "by"}.get(column, "number")
    return attrgetter(attribute)


def _rank(value: object) -> tuple[bool, float, str]:
    """Numbers before texts."""
    return (False, float(value), "") if isinstance(value, int | float) else (True, 0.0, str(value))


def draw_run(entry: RunEntry, rows: Sequence[TrialRow]) -> tuple[Chart | None, str]:
    """Return the history of a run's read part, and a note if not all trials are drawn."""
    kept = thin(rows, entry.figure.metric.greater_is_better)
    points = [row.as_point(entry.best.number if entry.best else None, row.figure) for row in kept]
    best = f"; best: trial {entry.best.number} with {entry.best_text}" if entry.best else ""
    chart = draw_history(points, _axis_of(entry), summary=f"{entry.counts}{best}")
    is_thinned = len(kept) < len(rows)
    note = f"{len(kept):,} of {len(rows):,} trials are drawn, each improvement among them" if is_thinned else ""
    return chart, note


def draw_compared(groups: Sequence[Sequence[tuple[RunEntry, Sequence[TrialRow]]]]) -> tuple[dict[str, Chart], str]:
    """Best-so-far curves over each other: one chart for each group, whose runs optimize the same figure."""
    charts = {}
    for place, group in enumerate(groups):
        named = []
        for entry, rows in group:
            points = [row.as_point(None, row.figure) for row in thin(rows, entry.figure.metric.greater_is_better)]
            named.append((entry.name + entry.provenance.mark, points))
        axis = replace(_axis_of(group[0][0]), title=group[0][0].figure.metric.words_with_unit)
        if (chart := draw_curves(named, axis, name=f"curves{place}")) is not None:
            charts[f"curves{place}"] = chart
    return charts, "" if charts else "Curves need two runs with a best trial that optimize the same figure."


def thin(rows: Sequence[TrialRow], greater_is_better: bool) -> Sequence[TrialRow]:
    """Return about `MAX_POINTS` of the rows, evenly chosen, and each improvement."""
    if len(rows) <= MAX_POINTS:
        return rows
    sign, step = -1.0 if greater_is_better else 1.0, -(-len(rows) // MAX_POINTS)
    kept, best = [], math.inf
    for place, row in enumerate(rows):
        cost = sign * row.score if row.score is not None else math.inf
        if cost < best or place % step == 0:
            kept.append(row)
        best = min(best, cost)
    return kept


def _axis_of(entry: RunEntry) -> Axis:
    metric = entry.figure.metric
    return Axis(metric.words, metric.words_with_unit + entry.provenance.mark, metric.greater_is_better)
