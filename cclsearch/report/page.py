"""The report as one HTML page that opens offline: styles, script, charts and data are inside it.

The template engine escapes all text from outside; a content security policy allows no script but ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cclsearch import __version__
from cclsearch.core.values import format_knob_value
from cclsearch.draw.axes import show_number
from cclsearch.draw.scene import Scene
from cclsearch.draw.svg import palette_css, render_svg
from cclsearch.report.charts import draw_causes, draw_prediction, draw_progress, draw_sensitivity
from cclsearch.report.compare import RankingEntry, compare_frameworks, draw_against_step_time, draw_bests, rank_runs
from cclsearch.report.data import RunPage, TrialRow
from cclsearch.report.pareto import ParetoPage, draw_pareto_page

HERE = Path(__file__).parent
RANKING_COLUMNS = (
    "rank", "run", "model", "hardware", "framework", "provenance", "step time (s)", "relative to best",
    "tokens/s per accelerator", "MFU", "objective", "configuration",
)  # fmt: skip
FILTERS = ("model", "hardware", "framework", "provenance")
COMPARED = (
    "step_time_s", "tokens_per_s", "tokens_per_s_per_accelerator", "mfu", "peak_memory_gib", "overlap", "compute_frac",
    "exposed_comm_frac", "idle_frac", "comm_wait_frac", "compute_imbalance", "pipeline_bubble", "num_accelerators",
)  # fmt: skip
"""Metrics that the comparison of best and baseline shows if both trials have them, in this order."""


@dataclass(frozen=True)
class Cell:
    """One cell of a sortable table; `sort` is None for text."""

    text: str
    sort: float | str | None = None


def render_page(pages: Sequence[RunPage], *, extra_charts: Sequence[Scene] = ()) -> str:
    """The page about one run or several; `extra_charts` (a Pareto front) come first."""
    ranking = rank_runs(pages)
    heading = pages[0].run_id if len(pages) == 1 else f"{len(pages)} runs compared"
    return render_template(
        "page.html.j2",
        heading=heading,
        pages=pages,
        views=[_view_run(page, f"r{n}", extra_charts if len(pages) == 1 else ()) for n, page in enumerate(pages, 1)],
        framework_lines=compare_frameworks(pages),
        ranking=[{"cells": _ranking_cells(s), "filters": _ranking_keys(s)} for s in ranking],
        ranking_columns=RANKING_COLUMNS,
        ranking_filters=[(name, sorted({dict(_ranking_keys(s))[name] for s in ranking})) for name in FILTERS],
        comparison_charts=[*extra_charts, *draw_comparisons(pages)] if len(pages) > 1 else [],
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
    return render_template(
        "pareto.html.j2", page=page, points=points, facts=facts, charts=draw_pareto_page(page), number=show_number
    )


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
    by_score = page.score_label.split(" ")[0] != "step_time_s"
    scenes = [
        draw_progress(page),
        draw_progress(page, by_score=True) if by_score else None,
        draw_causes(page),
        draw_sensitivity(page),
        draw_prediction(page),
        draw_against_step_time([page], "overlap", "overlap"),
        draw_against_step_time([page], "mfu", "MFU"),
    ]
    return [scene for scene in scenes if scene is not None]


def draw_comparisons(pages: Sequence[RunPage]) -> list[Scene]:
    """The charts that the data of several runs allow."""
    scenes = [
        draw_bests(pages),
        draw_against_step_time(pages, "overlap", "overlap"),
        draw_against_step_time(pages, "mfu", "MFU"),
    ]
    return [scene for scene in scenes if scene is not None]


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


def _view_run(page: RunPage, prefix: str, extra: Sequence[Scene]) -> dict[str, Any]:
    columns, rows = _trial_table(page)
    best, baseline = page.best_trial, page.baseline_trial
    return {
        "charts": [replace(scene, name=f"{prefix}-{scene.name}") for scene in (*extra, *draw_run(page))],
        "columns": columns,
        "rows": rows,
        "states": sorted({trial.state for trial in page.trials}),
        "proposers": sorted({trial.proposer for trial in page.trials}),
        "comparison": _compare_two(best, baseline) if best and baseline and best.number != baseline.number else [],
        "diagnoses": [
            (f"{label} (trial {trial.number})", trial.diagnosis)
            for label, trial in (("Best", best), ("Baseline", baseline))
            if trial and trial.diagnosis
        ],
    }


def _trial_table(page: RunPage) -> tuple[list[tuple[str, bool]], list[dict[str, Any]]]:
    knobs = list(dict.fromkeys(knob for trial in page.trials for knob in trial.config))
    shown = [
        (label, name)
        for label, name in (
            ("tokens/s per accel.", "tokens_per_s_per_accelerator"),
            ("MFU", "mfu"),
            ("memory (GiB)", "peak_memory_gib"),
            ("overlap", "overlap"),
        )
        if any(name in trial.metrics for trial in page.trials)
    ]
    has_expected = any(trial.expected_step_time_s for trial in page.trials)
    by_score = page.score_label.split(" ")[0] != "step_time_s"
    has_spread = any(trial.spread is not None for trial in page.trials)
    columns = ["trial", *knobs, "state", "step time (s)", *([page.score_label] if by_score else [])]
    columns += [*(["expected (s)"] if has_expected else []), *(["spread"] if has_spread else [])]
    columns += [*(label for label, _ in shown), "proposed by"]
    rows: list[dict[str, Any]] = []
    for trial in page.trials:
        cells = [_value_cell(trial.config.get(knob)) for knob in knobs]
        state = f"{trial.state}: {trial.failure_kind}" if trial.failure_kind else trial.state
        cells.append(Cell(f"{state} (confirmation)" if trial.purpose == "confirmation" else state))
        cells.append(_number_cell(trial.metrics.get("step_time_s")))
        if by_score:
            cells.append(_number_cell(trial.score))
        if has_expected:
            cells.append(_number_cell(trial.expected_step_time_s))
        if has_spread:
            cells.append(Cell(f"{trial.spread:.1%}", trial.spread) if trial.spread is not None else Cell("", ""))
        cells += [_number_cell(trial.metrics.get(name)) for _, name in shown]
        rows.append({"trial": trial, "cells": [*cells, Cell(trial.proposer)]})
    numeric = [all(row["cells"][n].sort is not None for row in rows) for n in range(len(columns) - 1)]
    return list(zip(columns, [False, *numeric], strict=True)), rows


def _compare_two(best: TrialRow, baseline: TrialRow) -> list[tuple[str, str, str, str]]:
    names = [name for name in COMPARED if name in best.metrics and name in baseline.metrics]
    rows = []
    for name in names:
        ours, theirs = best.metrics[name], baseline.metrics[name]
        rows.append((name, show_number(ours), show_number(theirs), f"{ours / theirs:.3g}x" if theirs else ""))
    return rows


def _ranking_cells(entry: RankingEntry) -> list[Cell]:
    page, trial = entry.page, entry.trial
    return [
        Cell(str(entry.rank), entry.rank),
        Cell(page.run_id),
        Cell(page.model),
        Cell(page.hardware),
        Cell(page.framework),
        Cell(page.provenance),
        _number_cell(trial.step_time_s),
        Cell(f"{entry.ratio:.3f}x", entry.ratio),
        _number_cell(trial.metrics.get("tokens_per_s_per_accelerator")),
        _number_cell(trial.metrics.get("mfu")),
        Cell(page.objective),
        Cell(trial.config_text),
    ]


def _ranking_keys(entry: RankingEntry) -> list[tuple[str, str]]:
    page = entry.page
    values = (page.model, page.hardware, page.framework, page.provenance)
    return list(zip(FILTERS, values, strict=True))


def _number_cell(value: float | None) -> Cell:
    return Cell("", "") if value is None else Cell(show_number(value), value)


def _value_cell(value: object) -> Cell:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell("" if value is None else format_knob_value(value))
    return Cell(show_number(value), float(value))


def _as_data(page: RunPage) -> dict[str, Any]:
    """The data in the page for programs that read it."""
    return {
        "run": page.run_id,
        "provenance": page.provenance,
        "objective": page.objective,
        "work": page.work,
        "hardware": page.hardware,
        "framework": page.framework,
        "best": page.best,
        "trials": [
            {
                k: v
                for k, v in asdict(trial).items()
                if k in ("number", "config", "state", "proposer", "loss", "metrics", "spread")
            }
            for trial in page.trials
        ],
    }
