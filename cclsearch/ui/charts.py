"""The charts of the pages: the history of a run, and best-so-far curves of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import draw_curves
from cclsearch.charts.trials import Axis, draw_history
from cclsearch.report.rows import TrialRow
from cclsearch.ui.run_index import RunEntry

MAX_POINTS = 600
"""Trials that a chart draws; of more, evenly chosen ones and each improvement."""


def draw_run(entry: RunEntry, rows: Sequence[TrialRow]) -> tuple[Chart | None, str]:
    """Return the history of a run's read part, and a note if not all trials are drawn."""
    kept = thin(rows, entry.figure.metric.greater_is_better)
    points = [row.as_point(entry.best.number if entry.best else None, row.figure) for row in kept]
    best = f"; best: trial {entry.best.number} with {entry.best_text}" if entry.best else ""
    chart = draw_history(points, _axis_of(entry), summary=f"{entry.counts}{best}")
    is_thinned = len(kept) < len(rows)
    note = f"{len(kept):,} of {len(rows):,} trials are drawn, each improvement among them" if is_thinned else ""
    return chart, note


def draw_compared(
    groups: Sequence[Sequence[tuple[RunEntry, Sequence[TrialRow]]]],
) -> tuple[dict[str, Chart], str]:
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
