"""Where the time goes: stacked bars of what a figure consists of, and the timeline of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cclsearch.charts.chart import SERIES, Chart, Row, category, cut, fixed, layer, make_spec, number, tips
from cclsearch.core.text import show_number

SMALL_SHARE = 0.02
"""Parts below this share of every bar are merged into `other`."""
PARTS_COLORS = (*SERIES, "$low", "$high", "$muted", "$grid")


@dataclass(frozen=True)
class StackedBar:
    """One bar: its label and its parts in drawing order."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def draw_parts(
    bars: Sequence[StackedBar], axis_title: str, *, name: str, title: str, limit: float | None = None
) -> Chart | None:
    """A stacked bar per label; `limit` is drawn as a dashed line."""
    bars = merge_small(bars)
    names = list(dict.fromkeys(part for bar in bars for part, value in bar.parts.items() if value > 0))
    if not names:
        return None
    rows: list[Row] = [
        {"bar": cut(bar.label, 60), "part": part, "v": value, "nth": names.index(part),
         "shown": f"{show_number(value)} of {show_number(bar.total)}"}
        for bar in bars
        for part, value in bar.parts.items()
        if value > 0
    ]  # fmt: skip
    top = max([bar.total for bar in bars] + ([limit] if limit else []))
    x = number("v", title=axis_title, stack="zero", scale=fixed(0, top * 1.03), axis={"tickCount": 6})
    colors = [PARTS_COLORS[n % len(PARTS_COLORS)] for n in range(len(names))]
    color = {"field": "part", "type": "nominal", "scale": {"domain": names, "range": colors}, "legend": {"title": None}}
    y = category("bar", axis={"labelLimit": {"expr": "min(330, width * 0.45)"}})
    tooltip = tips(bar="bar", part="part", shown="size")
    stacked = {"x": x, "y": y, "color": color, "order": {"field": "nth"}, "tooltip": tooltip}
    layers = [layer("bar", stacked, height={"band": 0.75}, stroke="$paper", strokeWidth=0.7)]
    if limit:
        limits = {"x": {**x, "field": "limit", "stack": None}, "tooltip": {"field": "tip", "title": None}}
        named: Row = {"limit": limit, "tip": f"limit {limit:g}"}
        layers.append(layer("rule", limits, [named], color="$ink", strokeDash=[4, 3], strokeWidth=1.6))
    lines = (f"{b.label}: " + ", ".join(f"{p} {show_number(v)}" for p, v in b.parts.items() if v > 0) for b in bars[:6])
    summary = "; ".join(lines) + (f"; {len(bars) - 6} more bars" if len(bars) > 6 else "")
    return Chart(name, title, summary, make_spec(rows, {"step": 30 if len(bars) <= 12 else 20}, layer=layers))


def merge_small(bars: Sequence[StackedBar]) -> list[StackedBar]:
    """The bars with parts that are small in all of them merged into `other`."""
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    large = [n for n in names if any(bar.parts.get(n, 0.0) > SMALL_SHARE * bar.total for bar in bars)]
    large = sorted(large, key=lambda n: -sum(bar.parts.get(n, 0.0) for bar in bars))[: len(PARTS_COLORS) - 1]
    merged = []
    for bar in bars:
        kept = {name: bar.parts.get(name, 0.0) for name in names if name in large}
        merged.append(StackedBar(bar.label, kept | {"other": max(bar.total - sum(kept.values()), 0.0)}))
    return [StackedBar(b.label, {n: v for n, v in b.parts.items() if v > 1e-9 * max(b.total, 1e-300)}) for b in merged]


LANES: Mapping[str, str] = {"compute": "$blue", "communication": "$orange", "copies": "$purple"}
MAX_SPANS = 400
"""Spans drawn per lane; of more, those with the smallest gaps between them are joined."""


@dataclass(frozen=True)
class Lane:
    """Spans of one kind on one rank, from the start of its step."""

    rank: int
    kind: str
    """A key of `LANES`."""
    spans_ms: Sequence[tuple[float, float]]


def draw_timeline(lanes: Sequence[Lane]) -> Chart | None:
    """Spans of every rank over the milliseconds of its step."""
    rows: list[Row] = [
        {"rank": lane.rank, "kind": lane.kind, "place": f"rank {lane.rank} · {lane.kind}", "start": round(start, 4),
         "end": round(end, 4), "shown": f"{start:.3f} to {end:.3f} ms"}
        for lane in lanes
        for start, end in join_spans(lane.spans_ms)
    ]  # fmt: skip
    if not rows:
        return None
    last = max(row["end"] for row in rows)
    x = number("start", title="ms from the start of the rank's step", scale=fixed(0, last))
    y = {"field": "place", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 170}}
    color = {**category("kind", legend=None), "scale": {"domain": list(LANES), "range": list(LANES.values())}}
    zoom = {"name": "zoom", "bind": "scales",
            "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"}}  # fmt: skip
    spec = make_spec(
        rows, {"step": 17}, params=[zoom], mark={"type": "bar", "clip": True, "height": {"band": 0.8}},
        encoding={"x": x, "x2": {"field": "end"}, "y": y, "color": color, "tooltip": tips(place="lane", shown="time")},
    )  # fmt: skip
    ranks = len({lane.rank for lane in lanes})
    joined = any(len(lane.spans_ms) > MAX_SPANS for lane in lanes)
    note = f"; at most {MAX_SPANS} spans per lane, short gaps are closed" if joined else ""
    summary = f"one step of {last:.3f} ms on {ranks} rank{'' if ranks == 1 else 's'}{note}"
    return Chart("timeline", "One step by rank", summary, spec)


def join_spans(spans: Sequence[tuple[float, float]], limit: int = MAX_SPANS) -> list[tuple[float, float]]:
    """At most `limit` spans, in order and disjoint: the smallest gaps are closed."""
    if len(spans) <= limit:
        return list(spans)
    gaps = sorted(range(1, len(spans)), key=lambda n: spans[n - 1][1] - spans[n][0])[: limit - 1]
    starts = [0, *sorted(gaps)]
    ends = [*(start - 1 for start in starts[1:]), len(spans) - 1]
    return [(spans[first][0], spans[last][1]) for first, last in zip(starts, ends, strict=True)]


def as_trace_events(lanes: Sequence[Lane]) -> list[Row]:
    """Return the same as Chrome trace events, which Perfetto opens: a process per rank, a thread per kind."""
    kinds = list(LANES)
    events: list[Row] = []
    for lane in lanes:
        track = Track(lane.rank, kinds.index(lane.kind))
        events += track.name(f"rank {lane.rank}", lane.kind)
        events += [track.span(lane.kind, 1e3 * start, 1e3 * end) for start, end in join_spans(lane.spans_ms)]
    return events


@dataclass(frozen=True)
class Track:
    """A thread of a process in the Chrome trace event format."""

    pid: int
    tid: int

    def name(self, process: str, thread: str) -> list[Row]:
        """Return the events that name the process and the thread."""
        names = {"process_name": process, "thread_name": thread}
        return [{"ph": "M", "name": kind, **vars(self), "args": {"name": name}} for kind, name in names.items()]

    def span(self, name: str, start_us: float, end_us: float, **more: object) -> Row:
        """Return a complete event."""
        return {"ph": "X", "name": name, **vars(self), "ts": start_us, "dur": end_us - start_us, **more}
