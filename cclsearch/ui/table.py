"""The table of trials of a run: filtered, sorted and cut into pages by the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

from cclsearch.record.trial import TrialState
from cclsearch.report.rows import TrialRow

PAGE_ROWS = 100
"""Number of trials on one page."""
MAX_PAGE = 10**6
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
            page=min(int(page), MAX_PAGE) if page.isascii() and page.isdecimal() and len(page) < 8 and int(page) else 1,
        )

    def change(self, **parts: object) -> dict[str, object]:
        """The parameters of an address with other parts, such as `sort`; the defaults are left out."""
        own = {"q": self.words, "state": self.state, "sort": self.sort, "down": int(self.is_down), "page": self.page}
        default = {"q": "", "state": "", "sort": NUMBER, "down": 1, "page": 1}
        return {key: value for key, value in {**own, **parts}.items() if value != default.get(key)}


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
