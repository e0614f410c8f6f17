"""The timeline of one step: spans of compute, communication and copies of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cclsearch.charts.chart import Chart, Row, category, make_spec, tips

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
    x: Row = {"field": "start", "type": "quantitative", "title": "ms from the start of the rank's step"}
    x |= {"scale": {"domain": [0, last], "nice": False}}
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
