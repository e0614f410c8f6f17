"""A step of a trace as charts show it: bars of seconds by cause of every rank, and the lanes of its timeline."""

from __future__ import annotations

from cclsearch.charts.chart import Chart
from cclsearch.charts.parts import LANES, Lane, StackedBar, draw_parts, draw_timeline
from cclsearch.trace.diagnosis.causes import median_window
from cclsearch.trace.intervals import clip_spans
from cclsearch.trace.score import Diagnosis, try_diagnose
from cclsearch.trace.view import TraceView

MAX_RANKS_DRAWN = 64
MAX_LANES_RANKS = MAX_RANKS_DRAWN // 4


def find_lanes(trace: TraceView) -> tuple[Lane, ...]:
    """The median step of every rank, from its own start: spans of compute, communication and copies."""
    lanes = []
    for view in [view for view in trace.ranks.values() if len(view.windows.spans_W2)][:MAX_LANES_RANKS]:
        start, end = median_window(view)
        for kind, spans in zip(LANES, (view.compute_M2, view.comm_M2, view.copies_M2), strict=True):
            inside = (clip_spans(spans, start, end) - start) / 1e6
            lanes.append(Lane(view.rank, kind, [(float(first), float(last)) for first, last in inside.tolist()]))
    return tuple(lanes)


def draw_breakdown(diagnosis: Diagnosis) -> Chart | None:
    """Seconds by cause for every rank, the one that the others wait for marked."""
    ranks = list(diagnosis.seconds_by_rank.items())[:MAX_RANKS_DRAWN]
    bars = [
        StackedBar(
            f"rank {rank}" + (" *" if rank == diagnosis.worst_rank else ""),
            {cause.replace("_", " "): 1e3 * value for cause, value in seconds.items() if value > 0},
        )
        for rank, seconds in ranks
    ]
    subject = "One step" if diagnosis.is_step else "The whole recording"
    title = f"{subject} by rank: {1e3 * diagnosis.window_s:.3f} ms"
    title += " (* the other ranks wait for it)" if len(ranks) > 1 else ""
    return draw_parts(bars, title, name="breakdown", title=title)


def draw_pictures(trace: TraceView) -> dict[str, Chart]:
    """Return the charts of a step by file name; none if the trace allows no diagnosis."""
    diagnosis = try_diagnose(trace)
    if diagnosis is None:
        return {}
    charts = {"breakdown.svg": draw_breakdown(diagnosis), "timeline.svg": draw_timeline(find_lanes(trace))}
    return {name: chart for name, chart in charts.items() if chart is not None}
