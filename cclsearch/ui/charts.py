"""The charts of the pages: the history of a run, best-so-far curves of several, and nights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import draw_curves
from cclsearch.charts.nights import NightPoint, draw_nights
from cclsearch.charts.trials import (
    BEST,
    CONFIRMED,
    ENDED_EARLY,
    FAILED,
    NOT_ADMITTED,
    RANKED,
    RUNNING,
    Axis,
    TrialPoint,
    draw_history,
)
from cclsearch.core.values import Provenance, format_config
from cclsearch.nightly.summary import NightSummary
from cclsearch.record.event import Purpose
from cclsearch.record.trial import TrialState
from cclsearch.ui.book import RunEntry
from cclsearch.ui.table import TrialLine

MAX_POINTS = 600
"""Trials that a chart draws; of more, evenly chosen ones and each improvement."""
_KINDS = {
    TrialState.ADMITTED: RANKED,
    TrialState.REFUSED: NOT_ADMITTED,
    TrialState.PRUNED: ENDED_EARLY,
    TrialState.UNFINISHED: RUNNING,
}


def draw_run(entry: RunEntry, lines: Sequence[TrialLine]) -> tuple[Chart | None, str]:
    """The history of a run as far as it was read, and a note if not all trials are drawn."""
    kept = thin(lines, entry.greater_is_better)
    points = [_make_point(line, entry.best.number if entry.best else None) for line in kept]
    best = f"; best: trial {entry.best.number} with {entry.best_text}" if entry.best else ""
    chart = draw_history(points, _axis_of(entry), summary=f"{entry.counts}{best}")
    is_thinned = len(kept) < len(lines)
    note = f"{len(kept):,} of {len(lines):,} trials are drawn, each improvement among them" if is_thinned else ""
    return chart, note


def draw_compared(
    groups: Sequence[Sequence[tuple[RunEntry, Sequence[TrialLine]]]],
) -> tuple[dict[str, Chart], str]:
    """Best-so-far curves over each other: one chart for each group, whose runs optimize the same figure."""
    charts = {}
    for place, group in enumerate(groups):
        named = []
        for entry, lines in group:
            points = [_make_point(line, None) for line in thin(lines, entry.greater_is_better)]
            named.append((entry.name + Provenance(entry.provenance).mark, points))
        entry = group[0][0]
        axis = Axis(_axis_of(entry).words, entry.figure, entry.greater_is_better)
        if (chart := draw_curves(named, axis, name=f"curves{place}")) is not None:
            charts[f"curves{place}"] = chart
    return charts, "" if charts else "Curves need two runs with a best trial that optimize the same figure."


def draw_series(nights: Sequence[NightSummary]) -> dict[str, Chart]:
    """Per job of a series: its best figure night by night, with the interval where there is one."""
    charts = {}
    for place, job in enumerate(dict.fromkeys(job.job for night in nights for job in night.jobs)):
        found = [(night.night, one, one.best) for night in nights for one in night.jobs if one.job == job and one.best]
        if not found:
            continue
        newest = found[-1][1]
        mark = Provenance(newest.provenance).mark if newest.provenance else ""
        unit = f" ({newest.unit})" if newest.unit else ""
        points = [
            NightPoint(
                night=stamp,
                value=best.value,
                config=format_config(best.config),
                interval=(best.low, best.high) if best.low is not None and best.high is not None else None,
            )
            for stamp, one, best in found
            if (one.figure, one.unit) == (newest.figure, newest.unit)
        ]
        chart = draw_nights(
            points,
            f"{newest.figure.removesuffix(f'_{newest.unit}').replace('_', ' ')}{unit}{mark}",
            name=f"nights{place}",
            title=f"{job}, night by night",
        )
        if chart is not None:
            charts[f"nights{place}"] = chart
    return charts


def thin(lines: Sequence[TrialLine], greater_is_better: bool) -> Sequence[TrialLine]:
    """At most about `MAX_POINTS` of the lines, evenly chosen, and each improvement."""
    if len(lines) <= MAX_POINTS:
        return lines
    sign, step = -1.0 if greater_is_better else 1.0, -(-len(lines) // MAX_POINTS)
    kept, best = [], math.inf
    for place, line in enumerate(lines):
        cost = sign * line.value if line.is_ranked and line.value is not None else math.inf
        if cost < best or place % step == 0:
            kept.append(line)
        best = min(best, cost)
    return kept


def _axis_of(entry: RunEntry) -> Axis:
    words = entry.figure.rsplit(" (", 1)[0]
    return Axis(words, entry.figure + Provenance(entry.provenance).mark, entry.greater_is_better)


def _make_point(line: TrialLine, best: int | None) -> TrialPoint:
    kind = _KINDS.get(line.state, FAILED)
    if kind == RANKED and line.purpose == Purpose.CONFIRMATION:
        kind = CONFIRMED
    return TrialPoint(
        number=line.number,
        config={knob: line.cell(knob) for knob in line.config},
        kind=BEST if line.number == best else kind,
        value=line.value,
        spread=line.spread,
        proposer=line.by,
        note=line.reason,
    )
