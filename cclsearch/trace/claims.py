"""Claims of CCL-Bench's paper on traces (hidden communication, utility of links), and a step of a trace as charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import OverlapPoint, draw_overlap, draw_utilities
from cclsearch.charts.parts import LANES, Lane, StackedBar, draw_parts, draw_timeline
from cclsearch.charts.trials import rank_correlation
from cclsearch.core.errors import UserError
from cclsearch.core.text import format_table, format_value, one_line
from cclsearch.trace.diagnosis.causes import median_window
from cclsearch.trace.intervals import clip_spans
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.read import open_trace
from cclsearch.trace.score import Diagnosis, score_view, try_diagnose
from cclsearch.trace.view import TraceView
from cclsearch.trace.whatif.projection import WhatIf, prepare_replay

MIN_CLEAR_CORRELATION = 0.3
"""Below it, ranks show no clear order."""


@dataclass(frozen=True)
class ShownClaim:
    """A claim on traces: the table, the same as data, the chart, and why some traces are missing."""

    text: str
    data: dict[str, object]
    chart: Chart | None
    missing: Mapping[str, str]
    """Trace -> why it gave no result."""
    num_found: int


def show_claim(claim: str, traces: Sequence[str], *, workers: int = 1) -> ShownClaim:
    """Return a claim's figures (`overlap` or `links`) for the traces; a trace without a result is in `missing`."""
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    measure, show = (_overlap_of, _show_overlap) if claim == "overlap" else (_utilities_of, _show_utilities)
    for name, path in _name_all(traces).items():
        trace = open_trace(path, card=None, workers=workers)
        try:
            if not trace.ranks:
                raise UserError(trace.trace_set.message or str(trace.trace_set.reason or "no trace files"))
            found[name] = measure(trace)
        except NotAvailable as error:
            missing[name] = error.detail or str(error.reason)
        except UserError as error:
            missing[name] = str(error)
    return ShownClaim(*show(found), missing, len(found))


def _name_all(paths: Sequence[str]) -> dict[str, Path]:
    """Return a short name of each trace: the last parts of its path that tell it from the others."""
    parts = [Path(path).absolute().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return {one_line(name, 80): Path(path) for name, path in zip(names, paths, strict=True)}


def _overlap_of(trace: TraceView) -> tuple[float, float, str, str]:
    """Return hidden share of communication, seconds of a step, the cause of most of it, and its evidence."""
    score = score_view(trace, ("overlap", "trace_step_time"))
    values = []
    for result in score.metrics.values():
        if result.value is None:
            raise UserError(f"{result.reason or 'not available'} {result.detail or ''}".strip())
        values.append(result.value)
    diagnosis = score.diagnosis
    cause = str(diagnosis.bottleneck).replace("_", " ") if diagnosis is not None else "unknown"
    sentence = diagnosis.sentences[0] if diagnosis is not None and diagnosis.sentences else ""
    return values[0], values[1], cause, sentence


def _utilities_of(trace: TraceView) -> dict[str, WhatIf]:
    return prepare_replay(trace).utilities()


def _show_overlap(found: Mapping[str, Any]) -> tuple[str, dict[str, object], Chart | None]:
    points = [(OverlapPoint(name, *figures), sentence) for name, (*figures, sentence) in found.items()]
    points.sort(key=lambda pair: pair[0].overlap)
    pairs = [(point.overlap, point.seconds) for point, _ in points]
    correlation = rank_correlation(pairs) if len(pairs) > 2 else None
    chart = draw_overlap([point for point, _ in points]) if points else None
    rows = [{**vars(point), "diagnosis": sentence} for point, sentence in points]
    cells = [
        (p.name, f"{100 * p.overlap:.1f} %", format_value(p.seconds, "s"), p.cause, sentence) for p, sentence in points
    ]
    lines = [format_table(("trace", "hidden", "step", "most of it", "diagnosis"), cells)]
    if correlation is not None:
        meaning = "more overlap, longer steps" if correlation > 0 else "more overlap, shorter steps"
        weak = "no clear order" if abs(correlation) < MIN_CLEAR_CORRELATION else meaning
        lines.append(f"rank correlation of hidden share and step over {len(pairs)} traces: {correlation:+.2f} ({weak})")
    return "\n".join(lines), {"traces": rows, "rank_correlation": correlation}, chart


def _show_utilities(found: Mapping[str, dict[str, WhatIf]]) -> tuple[str, dict[str, object], Chart | None]:
    shares = {
        name: {resource: (one.gain_low, one.gain_high) for resource, one in answers.items()}
        for name, answers in found.items()
    }
    drawn = {name: {resource: high for resource, (_, high) in each.items()} for name, each in shares.items()}
    chart = draw_utilities(drawn, "Utility of doubling each resource (upper bounds, simulated)") if drawn else None
    resources = list(dict.fromkeys(resource for each in shares.values() for resource in each))

    def between(low: float, high: float) -> str:
        return f"{100 * low:.1f} %" if abs(high - low) < 5e-4 else f"{100 * low:.1f} to {100 * high:.1f} %"

    cells = [(name, *(between(*each[resource]) for resource in resources)) for name, each in shares.items()]
    head = "share of the step that doubling a resource saves (simulated, bounds):"
    text = f"{head}\n{format_table(('trace', *resources), cells)}"
    return text, {"provenance": "simulated", "traces": shares}, chart


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
