"""The trials of a run as a table: one line each, filtered, sorted and cut into pages by the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

from cclsearch.core.values import Value, format_knob_value
from cclsearch.record.trial import Trial, TrialState, find_state
from cclsearch.report.objective_figure import ObjectiveFigure
from cclsearch.report.terminal import SOURCES, result_text
from cclsearch.ui.text import clean

PAGE_ROWS = 100
"""Trials of one page: what a browser draws at once, however many a run has."""
MAX_PAGE = 10**6
NUMBER = "trial"
"""Key of the column that a table is sorted by at first."""
KNOB = "knob."
"""What the key of a knob's column begins with; the others are `trial`, `value`, `result`, `time` and `by`."""


@dataclass(frozen=True, slots=True)
class TrialLine:
    """One trial as tables and charts show it. All text is plain and without secrets."""

    number: int
    config: Mapping[str, Value]
    by: str
    purpose: str
    state: TrialState
    value: float | None
    """The figure of the objective as measured, also of a trial that is not ranked; None if it has none."""
    is_ranked: bool
    result: str
    reason: str
    """Why it is not ranked; empty if it is, or runs."""
    seconds: float | None
    """From the submission to the end of all ended attempts; None if none ended."""
    spread: float | None
    text: str
    """What a filter looks in: all columns, in lower case."""

    def cell(self, knob: str) -> str:
        """The value of a knob as tables print it; empty if the trial has none."""
        return clean(format_knob_value(self.config[knob])) if knob in self.config else ""


def make_line(trial: Trial, figure: ObjectiveFigure) -> TrialLine:
    """The line of a trial."""
    outcome, state = trial.outcome, find_state(trial)
    reason = ""
    if outcome is not None and outcome.failure is not None:
        reason = clean(outcome.failure.message)
    elif outcome is not None and outcome.admission is not None and trial.loss is None:
        reason = clean("; ".join(outcome.admission.reasons))
    by, result = clean(SOURCES.get(trial.proposer, trial.proposer)), clean(result_text(trial, figure))
    knobs = " ".join(f"{clean(knob)}={clean(format_knob_value(value))}" for knob, value in trial.config.items())
    text = f"{trial.number} {knobs} {by} {trial.purpose} {state} {result} {reason}"
    return TrialLine(
        number=trial.number,
        config=dict(trial.config),
        by=by,
        purpose=trial.purpose.value,
        state=state,
        value=figure.value(trial),
        is_ranked=trial.loss is not None,
        result=result,
        reason=reason,
        seconds=sum(end_s - start_s for start_s, end_s in trial.spans) if trial.spans else None,
        spread=outcome.spread if outcome else None,
        text=text.lower(),
    )


@dataclass(frozen=True)
class TableQuery:
    """Which lines a page shows, and in what order."""

    words: str = ""
    """All of these words must be in a line."""
    state: str = ""
    """A `TrialState`; empty for all."""
    sort: str = NUMBER
    is_down: bool = True
    page: int = 1

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> TableQuery:
        """The query in the parameters of an address; what is not valid there is left out."""
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
    """The lines of one page, and how many there are."""

    lines: tuple[TrialLine, ...]
    num_found: int
    num_pages: int
    page: int
    first: int
    """Number of the first line among those found, from 1; 0 if none was found."""


def choose_page(lines: Iterable[TrialLine], query: TableQuery) -> TablePage:
    """The page of the lines that the query describes; a page beyond the last is the last."""
    words = query.words.lower().split()
    found = [
        line
        for line in lines
        if (not query.state or line.state == query.state) and all(word in line.text for word in words)
    ]
    _sort(found, query)
    num_pages = max(1, -(-len(found) // PAGE_ROWS))
    page = min(query.page, num_pages)
    start = (page - 1) * PAGE_ROWS
    shown = tuple(found[start : start + PAGE_ROWS])
    return TablePage(shown, len(found), num_pages, page, start + 1 if shown else 0)


def _sort(lines: list[TrialLine], query: TableQuery) -> None:
    """Sort in place; lines without a value come last in both directions, equal ones by number."""
    lines.sort(key=attrgetter("number"))
    key = _key_of(query.sort)
    present = [(value, line) for line in lines if (value := key(line)) is not None]
    missing = [line for line in lines if key(line) is None] if len(present) < len(lines) else []
    is_number = all(type(value) in (int, float) for value, _ in present)
    present.sort(key=itemgetter(0) if is_number else lambda pair: _rank(pair[0]), reverse=query.is_down)
    lines[:] = [line for _, line in present] + missing


def _key_of(column: str) -> Callable[[TrialLine], Any]:
    """What a column is sorted by; None for a line that has nothing in it."""
    if column.startswith(KNOB):
        name = column.removeprefix(KNOB)
        return lambda line: line.config.get(name)
    attribute = {"value": "value", "time": "seconds", "result": "state", "by": "by"}.get(column, "number")
    return attrgetter(attribute)


def _rank(value: object) -> tuple[bool, float, str]:
    """Numbers before texts."""
    return (False, float(value), "") if isinstance(value, int | float) else (True, 0.0, str(value))
