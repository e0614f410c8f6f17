"""The report as one HTML page that opens offline: styles, script, charts and data are inside it.

The template engine escapes all text from outside; a content security policy allows no script but ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cclsearch import __version__
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.values import format_knob_value
from cclsearch.draw.axes import show_number
from cclsearch.draw.scene import Scene
from cclsearch.draw.svg import palette_css, render_svg
from cclsearch.record.event import Purpose
from cclsearch.report.charts import draw_causes, draw_prediction, draw_progress, draw_sensitivity
from cclsearch.report.compare import (
    RankingEntry,
    compare_frameworks,
    draw_against,
    draw_bests,
    rank_runs,
    split_by_task,
)
from cclsearch.report.data import NOT_ADMITTED, RunPage, TrialRow
from cclsearch.report.figures import find_shown_metric, show_value
from cclsearch.report.pareto import ParetoPage, axis_label, draw_pareto_page

HERE = Path(__file__).parent
FILTERS = ("model", "hardware", "framework", "provenance")
DATA_OF_RUN = ("provenance", "objective", "work", "hardware", "framework", "best")
DATA_OF_TRIAL = ("number", "config", "proposer", "state", "loss", "metrics", "spread")


@dataclass(frozen=True)
class Cell:
    """One cell of a sortable table; `sort` is None for text."""

    text: str
    sort: float | str | None = None


def render_page(pages: Sequence[RunPage], *, extra_charts: Sequence[Scene] = ()) -> str:
    """The page about one run or several; `extra_charts` (a Pareto front) come first."""
    heading = pages[0].run_id if len(pages) == 1 else f"{len(pages)} runs compared"
    return render_template(
        "page.html.j2",
        heading=heading,
        pages=pages,
        views=[_view_run(page, f"r{n}", extra_charts if len(pages) == 1 else ()) for n, page in enumerate(pages, 1)],
        framework_lines=compare_frameworks(pages),
        rankings=[_view_ranking(same, n) for n, same in enumerate(split_by_task(pages))] if len(pages) > 1 else [],
        data_json=Markup(dump_for_script([_as_data(page) for page in pages])),
    )


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
    charts, words = draw_pareto_page(page), {"number": show_number, "label": axis_label}
    return render_template("pareto.html.j2", page=page, points=points, facts=facts, charts=charts, **words)


def render_template(name: str, **values: Any) -> str:
    """Render a template of this folder; everything is escaped except our own style, script and charts."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (HERE / "page.js").read_text(encoding="utf-8")
    return environment.get_template(name).render(
        figure=_figure,
        palette=Markup(palette_css()),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        **values,
    )


def draw_run(page: RunPage) -> list[Scene]:
    """The charts that the data of one run allow."""
    scenes = [
        draw_progress(page),
        None if page.is_by_primary else draw_progress(page, by_score=True),
        draw_causes(page),
        draw_sensitivity(page),
        draw_prediction(page),
        *(draw_against([page], cause) for cause in page.task.causes),
    ]
    return [scene for scene in scenes if scene is not None]


def draw_comparisons(pages: Sequence[RunPage]) -> list[Scene]:
    """The charts that the data of several runs allow, task by task."""
    scenes: list[Scene] = []
    for n, same in enumerate(split_by_task(pages)):
        drawn = [draw_bests(same), *(draw_against(same, cause) for cause in same[0].task.causes)]
        prefix = f"{same[0].task.name}-" if n else ""
        scenes += [replace(scene, name=prefix + scene.name) for scene in drawn if scene is not None]
    return scenes


def dump_for_script(data: object) -> str:
    """JSON that is safe inside a `<script>` element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _figure(chart: Scene) -> Markup:
    region = '<div class="scroll" tabindex="0" role="region" aria-label="{}">{}</div>'
    return Markup(f"<figure><figcaption>{{}}</figcaption>{region}</figure>").format(
        chart.title, chart.title, Markup(render_svg(chart))
    )


def _view_ranking(pages: Sequence[RunPage], n: int) -> dict[str, Any]:
    """The ranking of one task's runs, the `n`-th of the page from 0."""
    task, ranking = pages[0].task, rank_runs(pages)
    columns = ["rank", "run", *FILTERS, task.primary_metric.words_with_unit, "relative to best"]
    columns += [task.metric(name).words_with_unit for name in task.efficiency]
    return {
        "task": task.name,
        "id": f"ranking-table-{n + 1}" if n else "ranking-table",
        "columns": [*columns, "objective", "configuration"],
        "rows": [
            {"cells": _ranking_cells(entry), "filters": [(name, getattr(entry.page, name)) for name in FILTERS]}
            for entry in ranking
        ],
        "filters": [(name, sorted({getattr(entry.page, name) for entry in ranking})) for name in FILTERS],
        "charts": draw_comparisons(pages),
    }


def _view_run(page: RunPage, prefix: str, extra: Sequence[Scene]) -> dict[str, Any]:
    columns, rows = _trial_table(page)
    pair = (("Best", page.best_trial), ("Baseline", page.baseline_trial))
    return {
        "charts": [replace(scene, name=f"{prefix}-{scene.name}") for scene in (*extra, *draw_run(page))],
        "columns": columns,
        "rows": rows,
        "states": sorted({trial.state for trial in page.trials}),
        "proposers": sorted({trial.proposer for trial in page.trials}),
        "comparison": _compare_two(page),
        "diagnoses": [
            (f"{label} (trial {trial.number})", trial.diagnosis) for label, trial in pair if trial and trial.diagnosis
        ],
    }


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
        ("proposed by", [Cell(trial.proposer) for trial in trials]),
    ]
    rows = [{"trial": trial, "cells": [cells[n] for _, cells in columns]} for n, trial in enumerate(trials)]
    return [("trial", False), *((name, all(cell.sort is not None for cell in cells)) for name, cells in columns)], rows


def _state_cell(trial: TrialRow) -> Cell:
    rules = ", ".join(check.rule for check in trial.checks if check.ok is False)
    why = trial.failure_kind or (rules if trial.state == NOT_ADMITTED else "")
    state = f"{trial.state}: {why}" if why else trial.state
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
        *(Cell(getattr(page, name)) for name in FILTERS),
        _number_cell(entry.value),
        Cell(f"{entry.ratio:.3f}x", entry.ratio),
        *(_number_cell(trial.metrics.get(name)) for name in page.task.efficiency),
        Cell(page.objective),
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
        "trials": [{key: getattr(trial, key) for key in DATA_OF_TRIAL} for trial in page.trials],
    }
