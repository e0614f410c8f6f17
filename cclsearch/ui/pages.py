"""The pages of each address on the runs, and the table of trials: filtered, sorted and cut into pages by the server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment
from markupsafe import Markup
from starlette.requests import Request

from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import draw_curves
from cclsearch.charts.trials import Axis, draw_history, varied_knobs
from cclsearch.core.errors import UserError
from cclsearch.core.numbers import read_whole
from cclsearch.core.templates import open_templates
from cclsearch.core.values import format_knob_value
from cclsearch.core.version import __version__
from cclsearch.nightly.run import list_series, read_summaries
from cclsearch.nightly.summary import NightSummary, draw_series, show_best
from cclsearch.nightly.window import nights_folder
from cclsearch.propose.events import LlmTurn, leave_out_outdated
from cclsearch.record.trial import Trial, TrialState
from cclsearch.report.figures import describe_metric, find_figure
from cclsearch.report.progress import format_duration
from cclsearch.report.rows import TrialRow, make_detailed_row
from cclsearch.report.terminal import result_text
from cclsearch.run.annotations import read_annotations
from cclsearch.run.folder import Run
from cclsearch.run.phase import read_phase
from cclsearch.tasks.base import task_of
from cclsearch.ui.evidence import TraceMetrics, list_files
from cclsearch.ui.guard import Permissions, clean
from cclsearch.ui.leaderboard import Normalization, make_columns, make_groups, name_unit, read_prices
from cclsearch.ui.run_index import RunEntry, RunIndex, RunView, use_sound
from cclsearch.ui.searches import SearchStarter, list_choices

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


HERE = Path(__file__).parent
MAX_COMPARED = 12
LAST_NOTES = 8
COMPARE_READ_S, BOARD_READ_S = 2.0, 3.0
"""Seconds for which one request for a comparison or the leaderboard reads ledgers; the page counts the unread ones."""


@cache
def _environment() -> Environment:
    environment = open_templates(HERE / "templates", autoescape=True, finalize=_make_safe)
    environment.globals.update(
        version=__version__, query=_query, duration=format_duration, segment=partial(quote, safe="")
    )
    environment.globals.update(unit_of=name_unit, day=_day, show_best=show_best)
    return environment


def _make_safe(value: object) -> object:
    """Make a template's value one line without secrets; numbers and our own markup stay unchanged."""
    return value if isinstance(value, Markup | int | float) else clean(str(value))


def _query(**parts: object) -> str:
    return urlencode({key: value for key, value in parts.items() if value not in ("", None)})


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else ""


class Pages:
    """Renders each page; every method may run in any thread."""

    def __init__(self, index: RunIndex, starter: SearchStarter, allowed: Permissions) -> None:
        self._index, self._starter, self._allowed = index, starter, allowed
        self._traces = TraceMetrics()

    def _render(self, template: str, title: str, **values: object) -> str:
        return _environment().get_template(template).render(title=title, allowed=self._allowed, **values)

    @staticmethod
    def render_error(text: str) -> str:
        """Return the page with an error."""
        return _environment().get_template("error.html.j2").render(
            title="Not found", allowed=Permissions(), message=text
        )  # fmt: skip

    def runs(self, request: Request) -> str:
        """The list of runs."""
        found, words = self._index.list_runs(), request.query_params.get("q", "")[:200]
        shown = [entry for entry in found.entries if all(word in entry.text for word in words.lower().split())]
        tags = sorted({tag for entry in found.entries for tag in entry.tags})
        row = _environment().get_template("run_row.html.j2")
        rows, bad = use_sound(shown, lambda runs: [Markup(row.render(run=run)) for run in runs])
        errors = {**found.errors, **{entry.name: why for entry, why in bad}}
        return self._render(
            "runs.html.j2", "Runs", rows=rows, words=words, tags=tags, errors=errors,
            num_all=len(found.entries) + len(found.errors), num_unread=found.num_unread,
        )  # fmt: skip

    def run(self, request: Request) -> str:
        """One run: its result so far, the chart, and the table of its trials."""
        view = self._index.view(request.path_params["run"])
        with view.lock:
            entry, run, query = view.entry(), view.run, TableQuery.read(request.query_params)
            notes = [e for e in leave_out_outdated(run.state.reported) if not isinstance(e, LlmTurn)][-LAST_NOTES:]
            running = [(trial.number, _describe_running(run, trial)) for trial in run.state.unfinished[:20]]
            return self._render(
                "run.html.j2", entry.name, run=entry, page=choose_page(view.rows.values(), query), table=query,
                knobs=varied_knobs([row.config for row in view.rows.values()]), knob_key=KNOB, states=list(TrialState),
                notes=notes[::-1], people=read_annotations(view.folder).describe(),
                running=running if run.is_running else [], share=None if view.is_complete else view.share_read,
            )  # fmt: skip

    def run_chart(self, request: Request) -> tuple[Mapping[str, Chart], str]:
        """The chart of a run."""
        view = self._index.view(request.path_params["run"])
        with view.lock:
            entry, rows = view.entry(), list(view.rows.values())
        chart, note = draw_run(entry, rows)
        return ({"progress": chart} if chart else {}), note

    def _find_trial(self, request: Request) -> tuple[RunView, Trial]:
        view = self._index.view(request.path_params["run"])
        return view, view.find_trial(request.path_params["trial"])

    def trial(self, request: Request) -> str:
        """One trial with its evidence."""
        view, trial = self._find_trial(request)
        run, task = view.run, task_of(view.run.spec.card)
        row = make_detailed_row(run, trial, find_figure(run.spec))
        return self._render(
            "trial.html.j2", f"Trial {trial.number} of {view.folder.name}", run=view.folder.name, trial=row,
            provenance=run.spec.provenance.value, result=result_text(trial, find_figure(run.spec), 300),
            metrics=[describe_metric(task, name, value) for name, value in sorted(row.metrics.items())],
            diagnosed_unit=task.diagnosed_unit, files=list_files(run, trial), has_traces="trace" in row.files,
            people=[note.text for note in read_annotations(view.folder).notes if note.trial == trial.number],
        )  # fmt: skip

    def trial_metrics(self, request: Request) -> str:
        """The metrics of CCL-Bench's dashboard, from the trial's traces."""
        view, trial = self._find_trial(request)
        found = self._traces.measure(view.run, trial)
        title = f"Metrics of trial {trial.number} of {view.folder.name}"
        return self._render("metrics.html.j2", title, run=view.folder.name, trial=trial, metrics=found)

    def _find_compared(self, request: Request) -> list[RunView]:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_COMPARED]
        until_s = time.monotonic() + COMPARE_READ_S
        return [self._index.view(name, max(0.05, until_s - time.monotonic())) for name in names]

    def compare(self, request: Request) -> str:
        """Several runs beside each other, and two of their trials."""
        views = self._find_compared(request)
        entries = [view.entry() for view in views]
        pair = [self._pick(views, request.query_params.get(side, "")) for side in ("a", "b")]
        chosen = [each for each in pair if each is not None]
        params = request.query_params
        return self._render(
            "compare.html.j2", "Compare runs", runs=entries, names=self._index.list_names(),
            same_work=len({(e.spec.card.task, e.work) for e in entries}) < 2,
            same_origin=len({e.provenance for e in entries}) < 2,
            num_charts=len(_group_by_figure(entries)), a=params.get("a", ""), b=params.get("b", ""),
            differences=_list_differences(*chosen) if len(chosen) == 2 else [], both=len(chosen) == 2,
            share=next((view.share_read for view in views if not view.is_complete), None),
            address=urlencode([("run", entry.name) for entry in entries]),
        )  # fmt: skip

    @staticmethod
    def _pick(views: list[RunView], text: str) -> tuple[RunView, Trial] | None:
        """The trial of `run/7`; None if the text is empty."""
        name, _, number = text.strip().rpartition("/")
        if not text.strip():
            return None
        view = next((view for view in views if view.folder.name == name), None)
        if view is None or not number.isascii() or not number.isdecimal() or len(number) > 8:
            raise UserError(f"there is no trial {text!r} in the compared runs: write RUN/NUMBER")
        return view, view.find_trial(int(number))

    def compare_charts(self, request: Request) -> tuple[Mapping[str, Chart], str]:
        """Best-so-far curves over each other: one chart for each figure that the runs optimize."""
        views = {view.folder.name: view for view in self._find_compared(request)}
        groups = []
        for group in _group_by_figure([view.entry() for view in views.values()]):
            groups.append([(entry, list(views[entry.name].rows.values())) for entry in group])
        return draw_compared(groups)

    def leaderboard(self, request: Request) -> str:
        """The best of each workload, framework and hardware."""
        params = request.query_params
        found = self._index.list_runs(BOARD_READ_S)
        entries = [entry for entry in found.entries if entry.best is not None]
        columns = make_columns(entries)
        accelerators = sorted({entry.spec.card.hardware.accelerator for entry in entries})
        chosen = next((c for c in columns if c.name == params.get("metric")), columns[0])
        names = {view.value: view for view in Normalization}
        view_as = names.get(params.get("view", ""), Normalization.MEASURED)
        prices = read_prices(params, accelerators)
        known = self._traces.known
        groups, _ = use_sound(entries, lambda each: make_groups(each, columns, chosen, view_as, prices, known))
        shown = [
            c
            for c in columns
            if params.get("all") or any(r.cells[c.name].value is not None for g in groups for r in g.rows)
        ]
        shown = list(dict.fromkeys([chosen, *shown]))
        return self._render(
            "leaderboard.html.j2", "Leaderboard", groups=groups, columns=columns, shown=shown, chosen=chosen,
            views=list(Normalization), view_as=view_as, accelerators=accelerators, prices=prices,
            show_all=bool(params.get("all")), parameters=dict(params), num_unread=found.num_unread,
        )  # fmt: skip

    def nights(self, request: Request) -> str:
        """The series of nights."""
        runs = self._index.runs
        found = {name: read_summaries(nights_folder(runs, name)) for name in list_series(runs)}
        shown = {name: nights for name, nights in found.items() if nights}
        return self._render("nights.html.j2", "Nights", series=shown)

    def _read_series(self, request: Request) -> list[NightSummary]:
        """The nights of a series, the oldest first; raises UserError if there is none of exactly that name."""
        name, runs = request.path_params["series"], self._index.runs
        if name not in list_series(runs):
            raise UserError(f"there are no nights {name!r} here")
        return read_summaries(nights_folder(runs, name))

    def series(self, request: Request) -> str:
        """One series of nights, the latest first."""
        name, nights, known = request.path_params["series"], self._read_series(request), set(self._index.list_names())
        return self._render("series.html.j2", f"Nights {name}", name=name, nights=nights[::-1], known=known)

    def series_charts(self, request: Request) -> tuple[Mapping[str, Chart], str]:
        """The history of each job of a series."""
        return draw_series(self._read_series(request)), ""

    def start(self, request: Request) -> str:
        """Return the form of a new search, and the searches that this server started."""
        return self._render("start.html.j2", "Start a search", choices=list_choices(), started=self._starter.started)


def _describe_running(run: Run, trial: Trial) -> str:
    waited = f", {format_duration(time.time() - trial.attempt_s)}" if trial.attempt_s is not None else ""
    return f"{read_phase(run.folder, trial)}{waited}"


def _group_by_figure(entries: list[RunEntry]) -> list[list[RunEntry]]:
    """Entries that one axis can show, in order."""
    groups: dict[tuple[str, bool], list[RunEntry]] = {}
    for entry in entries:
        metric = entry.figure.metric
        groups.setdefault((metric.words_with_unit, metric.greater_is_better), []).append(entry)
    return list(groups.values())


def _list_differences(one: tuple[RunView, Trial], other: tuple[RunView, Trial]) -> list[tuple[str, str, str, bool]]:
    """Facts about two trials: name, both values, and whether they differ; the differing ones first."""
    found: dict[str, list[str]] = {}

    def add(name: str, side: int, text: str) -> None:
        found.setdefault(name, ["", ""])[side] = text

    for side, (view, trial) in enumerate((one, other)):
        spec, task = view.run.spec, task_of(view.run.spec.card)
        add("result", side, result_text(trial, find_figure(spec), 200))
        add("workload", side, spec.workload)
        add("framework", side, spec.framework)
        add("hardware", side, view.entry().hardware)
        add("figures are", side, spec.provenance.value)
        add("proposed by", side, trial.proposer)
        for knob, value in trial.config.items():
            add(f"knob {knob}", side, format_knob_value(value))
        for name, value in sorted((trial.outcome.metrics if trial.outcome else {}).items()):
            words, _, shown = describe_metric(task, name, value).partition(": ")
            add(words, side, shown)
        for verdict in trial.outcome.verdicts if trial.outcome else ():
            add(f"rule {verdict.rule}", side, {True: "ok", False: "violated", None: "not checked"}[verdict.ok])
    rows: list[tuple[str, str, str, bool]] = [(name, a, b, a != b) for name, (a, b) in found.items()]
    return sorted(rows, key=lambda row: not row[3])
