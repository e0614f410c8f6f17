"""The report as one HTML page that opens offline: styles, script, charts and data are inside it.

The template engine escapes all text from outside; a content security policy allows no script but ours.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from cclsearch.charts.chart import Chart, page_data, page_script, palette_css, render_png, render_svg
from cclsearch.charts.parts import as_trace_events
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError, require_writable, writing_to
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.templates import open_templates
from cclsearch.core.text import show_number
from cclsearch.core.values import format_knob_value
from cclsearch.core.version import __version__
from cclsearch.record.event import Purpose
from cclsearch.record.trial import TrialState
from cclsearch.report.data import (
    WIDE,
    RankingEntry,
    RunPage,
    compare_frameworks,
    draw_comparisons,
    draw_run,
    find_differences,
    rank_runs,
)
from cclsearch.report.figures import describe_gain, find_shown_metric, show_value
from cclsearch.report.pareto import ParetoPage, axis_label, draw_pareto_page, render_pareto_csv
from cclsearch.report.rows import TrialRow

HERE = Path(__file__).parent
RANKED_BY = ("framework", "objective")
MAX_WINNERS = 6
"""Number of winners whose knobs are compared side by side."""
DATA_OF_RUN = ("provenance", "objective", "work", "hardware", "framework", "best")
DATA_OF_TRIAL = ("number", "config", "proposer", "loss", "metrics", "spread")


@dataclass(frozen=True)
class Cell:
    """One cell of a sortable table; `sort` is None for text."""

    text: str
    sort: float | str | None = None


@dataclass(frozen=True)
class PlacedChart:
    """A chart and the id of its place in the page."""

    place: str
    chart: Chart
    is_wide: bool


def render_page(pages: Sequence[RunPage], *, extra_charts: Sequence[Chart] = (), base: Path | None = None) -> str:
    """The page about one run or several; `extra_charts` (a Pareto front) follow the history.

    `base` is the folder that the page is written to: evidence is linked relative to it. None: no links.
    """
    heading = pages[0].run_id if len(pages) == 1 else f"{len(pages)} runs compared"
    views = [_view_run(page, f"r{n}", extra_charts if len(pages) == 1 else (), base) for n, page in enumerate(pages, 1)]
    rankings = [_view_ranking(entries, n) for n, entries in enumerate(rank_runs(pages))] if len(pages) > 1 else []
    values = {
        "heading": heading,
        "pages": pages,
        "views": views,
        "framework_lines": compare_frameworks(pages),
        "rankings": rankings,
        "tasks": sorted({page.task.name for page in pages}),
        "data_json": Markup(dump_for_script([_as_data(page) for page in pages])),
    }
    charts = [chart for view in (*rankings, *views) for chart in view["charts"]]
    return render_template("page.html.j2", values, charts=charts)


def render_pareto_page(page: ParetoPage) -> str:
    """The page of a Pareto front."""
    facts = [
        ("configurations on the Pareto front", str(len(page.front))),
        ("configurations measured", str(len(page.points))),
        ("trials", str(len(page.growth))),
    ]
    knee = next((point for point in page.points if point.is_knee), None)
    if knee:
        facts.append(("knee of the Pareto front", f"trial {knee.trial}"))
    points = sorted(page.points, key=lambda point: (not point.on_front, point.values))
    values = {"page": page, "points": points, "facts": facts, "number": show_number, "label": axis_label}
    return render_template("pareto.html.j2", values, charts=place_charts(draw_pareto_page(page), "p"))


def place_charts(charts: Sequence[Chart], prefix: str) -> list[PlacedChart]:
    """The charts with places in the page."""
    return [PlacedChart(f"{prefix}-{chart.name}", chart, chart.name in WIDE) for chart in charts]


def render_template(name: str, values: Mapping[str, Any], *, charts: Sequence[PlacedChart], folder: Path = HERE) -> str:
    """Render a template of `folder` or of this one; everything is escaped except our own style and scripts."""
    script = (HERE / "page.js").read_text(encoding="utf-8")
    texts = [script, page_script()] if charts else [script]
    data = dump_for_script(page_data({placed.place: placed.chart for placed in charts}))
    template = open_templates(folder, HERE, autoescape=True).get_template(name)
    return template.render(
        charts=charts,
        palette=Markup(palette_css()),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hashes=[base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts],
        packed_charts=_pack(data) if charts else "",
        packed_script=_pack_script() if charts else "",
        version=__version__,
        **values,
    )


def _pack(text: str) -> str:
    """The text compressed, as base64; the page's script unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@cache
def _pack_script() -> str:
    return _pack(page_script())


def dump_for_script(data: object) -> str:
    """JSON that is safe inside a `<script>` element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _view_ranking(entries: Sequence[RankingEntry], n: int) -> dict[str, Any]:
    """The ranking of one group of comparable runs, the `n`-th of the page from 0."""
    task, page = entries[0].page.task, entries[0].page
    figures = [task.metric(name) for name in task.efficiency]
    columns = [("rank", True), ("run", False), *((name, False) for name in RANKED_BY)]
    columns += [(task.primary_metric.words_with_unit + page.mark, True), ("relative to best", True)]
    columns += [*((metric.words_with_unit, True) for metric in figures), ("configuration", False)]
    compared = entries[:MAX_WINNERS] if len(entries) > 1 else []
    return {
        "id": f"ranking-table-{n + 1}" if n else "ranking-table",
        "title": entries[0].group,
        "columns": columns,
        "rows": [_ranking_cells(entry) for entry in entries],
        "charts": place_charts(draw_comparisons(entries, f"{task.name}-"), f"g{n + 1}"),
        "differences": find_differences(compared),
        "names": [entry.page.run_id for entry in compared],
    }


def _view_run(page: RunPage, prefix: str, extra: Sequence[Chart], base: Path | None) -> dict[str, Any]:
    columns, rows = _trial_table(page)
    pair = (("Best", page.best_trial), ("Baseline", page.baseline_trial))
    own = place_charts(draw_run(page), prefix)
    place = _find_place(page, base)
    traced = next((t.evidence for t in page.trials if page.step and t.number == page.step.trial), "")
    trace = f"{traced}/trace"
    scripts = {"Launch it by hand": page.launch.removeprefix("launch by hand:\n"), "Job script": page.job_script}
    return {
        "charts": [*own[:1], *place_charts(extra, prefix), *own[1:]],
        "headline": _describe_result(page),
        "scripts": [(title, text) for title, text in scripts.items() if text],
        "columns": columns,
        "rows": [{**row, "links": _link_files(row["trial"], place)} for row in rows],
        "states": sorted({trial.kind for trial in page.trials}),
        "proposers": sorted({trial.by for trial in page.trials}),
        "comparison": _compare_two(page),
        "diagnoses": [
            (f"{label} (trial {trial.number})", trial.diagnosis) for label, trial in pair if trial and trial.diagnosis
        ],
        "file_name": "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in page.run_id),
        "trace_json": Markup(dump_for_script(as_trace_events(page.step.lanes))) if page.step else "",
        "trace_place": trace,
        "trace_link": f"{place}/{trace}" if place is not None else "",
    }


def _describe_result(page: RunPage) -> str:
    """The winner in one line: `Trial 6: step time 0.5 s (recorded), 2x faster than trial 1, the first ranked one`."""
    best, baseline, metric = page.best_trial, page.baseline_trial, page.metric
    if best is None:
        return ""
    figure = f": {metric.words} {show_value(metric, best.value)}{page.mark}" if best.value else ""
    if not page.is_by_primary and best.score is not None:
        figure = f": {page.score_label} {show_number(best.score)}{page.mark}{figure.replace(':', ',', 1)}"
    compared = ""
    if baseline is not None and baseline.number != best.number and best.value and baseline.value:
        gain = describe_gain(metric, baseline.value, best.value)
        than = "as" if gain.startswith("not") else "than"
        what = "your baseline" if baseline.purpose is Purpose.BASELINE else "the first ranked one"
        compared = f", {gain} {than} trial {baseline.number}, {what}"
    return f"Best: trial {best.number}{figure}{compared}"


def _find_place(page: RunPage, base: Path | None) -> str | None:
    """The run's folder as a link from the page; None if it cannot be one."""
    if base is None or page.folder is None:
        return None
    try:
        return quote(Path(os.path.relpath(page.folder, base)).as_posix())
    except ValueError:  # on another drive
        return None


def _link_files(trial: TrialRow, place: str | None) -> list[tuple[str, str]]:
    if place is None or not trial.files:
        return []
    return [(name, f"{place}/{quote(trial.evidence)}/{quote(name)}") for name in trial.files]


def _trial_table(page: RunPage) -> tuple[list[tuple[str, bool]], list[dict[str, Any]]]:
    knobs = list(dict.fromkeys(knob for trial in page.trials for knob in trial.config))
    task, metric = page.task, page.metric
    named = dict.fromkeys((*task.efficiency, PEAK_MEMORY, *task.causes))
    shown = [task.metric(name) for name in named if any(name in trial.metrics for trial in page.trials)]
    trials, expected = page.trials, [trial.expected.get(metric.name) for trial in page.trials]
    spreads = [trial.spread for trial in trials]
    percent = "{:.1%}".format
    figures: list[tuple[str, bool, list[float | None], Callable[[float], str]]] = [
        (metric.words_with_unit, True, [trial.metrics.get(metric.name) for trial in trials], show_number),
        (page.score_label, not page.is_by_primary, [trial.score for trial in trials], show_number),
        (f"expected ({metric.unit})" if metric.unit else "expected", any(expected), expected, show_number),
        ("spread", any(spread is not None for spread in spreads), spreads, percent),
        ("violation", bool(page.constraints), [trial.violation for trial in trials], percent),
    ]
    for other in shown:
        values = [trial.metrics.get(other.name) for trial in trials]
        figures.append((other.heading or other.words_with_unit, True, values, show_number))
    columns = [
        *((knob, [_value_cell(trial.config.get(knob)) for trial in trials]) for knob in knobs),
        ("state", [_state_cell(trial) for trial in trials]),
        *((name, [_number_cell(v, show) for v in values]) for name, is_shown, values, show in figures if is_shown),
        ("proposed by", [Cell(trial.by) for trial in trials]),
    ]
    rows = [{"trial": trial, "cells": [cells[n] for _, cells in columns]} for n, trial in enumerate(trials)]
    return [("trial", False), *((name, all(cell.sort is not None for cell in cells)) for name, cells in columns)], rows


def _state_cell(trial: TrialRow) -> Cell:
    rules = ", ".join(check.rule for check in trial.checks if check.ok is False)
    why = trial.failure_kind or (rules if trial.state is TrialState.REFUSED else "")
    state = f"{trial.kind}: {why}" if why else trial.kind
    return Cell(state if trial.purpose is Purpose.SEARCH else f"{state} ({trial.purpose.value})")


def _compare_two(page: RunPage) -> list[tuple[str, str, str, str]]:
    best, baseline, task = page.best_trial, page.baseline_trial, page.task
    if best is None or baseline is None or best.number == baseline.number:
        return []
    compared = (task.primary, *task.highlights, *task.compared)
    names = [name for name in compared if name in best.metrics and name in baseline.metrics]
    both = [(find_shown_metric(task, name), best.metrics[name], baseline.metrics[name]) for name in names]
    return [
        (metric.words, show_value(metric, ours), show_value(metric, theirs), f"{ours / theirs:.3g}x" if theirs else "")
        for metric, ours, theirs in both
    ]


def _ranking_cells(entry: RankingEntry) -> list[Cell]:
    page, trial = entry.page, entry.trial
    return [
        Cell(str(entry.rank), entry.rank),
        Cell(f"{page.run_id} [{', '.join(page.tags)}]" if page.tags else page.run_id),
        *(Cell(getattr(page, name)) for name in RANKED_BY),
        _number_cell(entry.value),
        Cell(f"{entry.ratio:.3f}x", entry.ratio),
        *(_number_cell(trial.metrics.get(name)) for name in page.task.efficiency),
        Cell(trial.config_text),
    ]


def _number_cell(value: float | None, show: Callable[[float], str] = show_number) -> Cell:
    return Cell("", "") if value is None else Cell(show(value), value)


def _value_cell(value: object) -> Cell:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell("" if value is None else format_knob_value(value))
    return Cell(show_number(value), float(value))


def _as_data(page: RunPage) -> dict[str, Any]:
    """The data in the page for programs that read it."""
    return {
        "run": page.run_id,
        **{key: getattr(page, key) for key in DATA_OF_RUN},
        "trials": [{key: getattr(t, key) for key in DATA_OF_TRIAL} | {"state": t.kind} for t in page.trials],
    }


CHARTS_FOLDER = "charts"


def write_report(
    pages: Sequence[RunPage], path: Path, *, png: bool = True, dark: bool = False, extra: Sequence[Chart] = ()
) -> list[Path]:
    """Write the page to `path` and, with `png`, every chart to `charts/` in the same folder; returns the files written.

    Raises UserError if the folder is not writable.
    """
    written = [write_text(path, render_page(pages, extra_charts=extra, base=path.parent))]
    if not png:
        return written
    charts = list(extra)
    for page in pages:
        prefix = "" if len(pages) == 1 else f"{safe_stem(page.run_id)}-"
        charts += [replace(chart, name=prefix + chart.name) for chart in draw_run(page)]
    if len(pages) > 1:
        for n, entries in enumerate(rank_runs(pages), 1):
            charts += draw_comparisons(entries, f"compared-{n}-")
    return written + write_pictures(charts, path.parent / CHARTS_FOLDER, dark=dark)


def write_pareto_page(page: ParetoPage, folder: Path, *, png: bool = True, dark: bool = False) -> list[Path]:
    """Write `pareto.html`, `pareto.csv` and, with `png`, the charts to `charts/`; returns the files written."""
    written = [
        write_text(folder / "pareto.html", render_pareto_page(page)),
        write_text(folder / "pareto.csv", render_pareto_csv(page)),
    ]
    return written + (write_pictures(draw_pareto_page(page), folder / CHARTS_FOLDER, dark=dark) if png else [])


def write_pictures(charts: Sequence[Chart], folder: Path, *, dark: bool = False) -> list[Path]:
    """Write each chart as a PNG of its name; returns the files. Raises UserError if that is impossible."""
    return [write_picture(chart, folder / f"{chart.name}.png", dark=dark) for chart in charts]


def write_picture(chart: Chart, path: Path, *, dark: bool = False) -> Path:
    """Write a chart as a PNG or, if that is the ending of the path, as SVG. Raises UserError if that is impossible."""
    render = render_svg if path.suffix.lower() == ".svg" else render_png
    return write_text(path, render(chart, dark=dark))


def check_picture(path: Path | None) -> None:
    """Raise UserError if the file of `--picture` does not end in .svg or .png, or cannot be written."""
    if path is not None and path.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"--picture {path}: the file must end in .svg or .png")
    if path is not None:
        require_writable(path, "--picture")


def write_text(path: Path, text: str | bytes) -> Path:
    """Write a file, creating its folder if needed; returns its path. Raises UserError if that is impossible."""
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path


def safe_stem(name: str) -> str:
    """The name reduced to letters, digits, `.`, `_` and `-`, so that it is never a path."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).lstrip(".-") or "run"
