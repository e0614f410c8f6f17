"""The charts of one run and of several: from the report's data to `cclsearch.charts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import draw_bests, draw_curves
from cclsearch.charts.knobs import draw_contour, draw_importance, draw_parallel, draw_slice
from cclsearch.charts.parts import StackedBar, draw_parts, draw_timeline
from cclsearch.charts.trials import (
    FAILED,
    Axis,
    TrialPoint,
    draw_against,
    draw_history,
    draw_neighbors,
    draw_prediction,
    draw_strip,
    rank_correlation,
)
from cclsearch.report.data import RankingEntry, RunPage

WIDE = ("progress", "score", "strip", "parallel", "timeline")
"""Charts that take the whole width of a page."""
SAME = 0.995
"""Rank correlation from which one metric is a function of the other, so that a chart of both shows nothing."""


def name_axis(page: RunPage) -> Axis:
    """The task's primary metric as an axis."""
    metric = page.metric
    return Axis(metric.words, metric.axis_label + page.mark, metric.greater_is_better)


def make_points(page: RunPage, *, by_score: bool = False) -> list[TrialPoint]:
    """The trials of a run as charts show them: by primary metric, or by the objective's score."""
    if by_score:
        return [replace(row.as_point(page.best, row.score), spread=None) for row in page.trials]
    name = page.metric.name
    return [
        row.as_point(page.best, None if row.kind == FAILED else row.metrics.get(name), row.expected.get(name))
        for row in page.trials
    ]


def draw_run(page: RunPage) -> list[Chart]:
    """The charts that the data of one run allow."""
    points, axis = make_points(page), name_axis(page)
    important = sorted(page.importance, key=lambda knob: -page.importance[knob])
    interval = page.interval if page.is_by_primary else None
    own = [(page.run_id, point) for point in points]
    charts = [
        draw_history(points, axis, summary=summarize(page), interval=interval),
        None if page.is_by_primary else _draw_score(page),
        draw_strip(points),
        draw_parallel(points, axis),
        draw_importance(page.importance, axis),
        draw_slice(points, axis, first=important[0] if important else None),
        draw_contour(points, axis, first=important[:2]),
        draw_prediction(points, axis),
        draw_neighbors(page.neighbors, axis),
        _draw_causes(page),
        *(_draw_against(own, cause, page.task.metric(cause).words, axis) for cause in page.task.causes),
        *_draw_step(page),
    ]
    return [chart for chart in charts if chart is not None]


def _draw_score(page: RunPage) -> Chart | None:
    axis = Axis(page.score_label, page.score_label + page.mark, page.greater_is_better)
    chart = draw_history(make_points(page, by_score=True), axis, summary=summarize(page))
    return replace(chart, name="score") if chart else None


def _draw_against(points: Sequence[tuple[str, TrialPoint]], cause: str, words: str, axis: Axis) -> Chart | None:
    """The figure against a cause, unless one is a function of the other."""
    pairs = [(p.metrics[cause], p.value) for _, p in points if p.counts and p.value and cause in p.metrics]
    if len(pairs) < 3 or abs(rank_correlation(pairs)) > SAME:
        return None
    return draw_against(points, cause, words, axis)


def _draw_causes(page: RunPage) -> Chart | None:
    """Seconds by cause of the best trial and the baseline."""
    pair = {"best": page.best_trial, "baseline": page.baseline_trial}
    rows = {t.number: (label, t) for label, t in reversed(pair.items()) if t is not None and t.seconds_by_cause}
    bars = [StackedBar(f"{label} (trial {t.number})", t.seconds_by_cause) for label, t in reversed(rows.values())]
    title = f"{page.metric.title if page.metric.is_time else 'Time'} by cause"
    return draw_parts(bars, f"seconds of a {page.task.diagnosed_unit}", name="causes", title=title)


def _draw_step(page: RunPage) -> list[Chart | None]:
    """The best trial's step: seconds by cause of every rank, and its timeline."""
    step = page.step
    if step is None:
        return []
    title = f"Trial {step.trial}: one step by rank" + (
        f" (the others wait for rank {step.worst_rank})" if step.waits else ""
    )
    bars = [StackedBar(f"rank {rank}", parts) for rank, parts in step.seconds_by_rank.items()]
    timeline = draw_timeline(step.lanes)
    named = replace(timeline, title=f"Trial {step.trial}: timeline of one step") if timeline else None
    return [draw_parts(bars, "seconds", name="ranks", title=title), named]


def summarize(page: RunPage) -> str:
    """Counts of the trials by state, and the best one."""
    best = page.best_trial
    if best is None:
        return f"{page.counts}."
    figure = "" if best.value is None else f" with {best.value:.4g} {page.metric.shown_unit}".rstrip() + page.mark
    return f"{page.counts}. The best is trial {best.number}{figure}: {best.config_text}."


def draw_comparisons(entries: Sequence[RankingEntry], name: str) -> list[Chart]:
    """The charts of one group of comparable runs: their bests, and their curves over each other."""
    if len(entries) < 2:
        return []
    pages = [entry.page for entry in entries]
    axis = name_axis(pages[0])
    bests = [(f"{e.page.run_id} · {e.page.framework}", e.value, e.trial.config_text) for e in entries]
    curves = [(page.run_id, make_points(page)) for page in pages]
    ranked = draw_bests(bests, axis, entries[0].group, name=f"{name}bests")
    found = [ranked, draw_curves(curves, axis, name=f"{name}curves")]
    every = [(run, point) for run, points in curves for point in points]
    for cause in pages[0].task.causes:
        chart = _draw_against(every, cause, pages[0].task.metric(cause).words, axis)
        found.append(replace(chart, name=f"{name}{chart.name}") if chart else None)
    return [chart for chart in found if chart is not None]
