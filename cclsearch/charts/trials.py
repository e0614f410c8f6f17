"""Charts of a search's trials: their history, configurations, predictions, and neighbors of the winner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cclsearch.charts.chart import (
    TRIAL,
    Chart,
    Row,
    category,
    cut,
    fixed,
    layer,
    make_spec,
    number,
    quantity,
    show_choice,
    tips,
)
from cclsearch.core.text import show_number
from cclsearch.core.values import Provenance, Value, format_config

BEST, RANKED, CONFIRMED = "best", "ranked", "confirmation"
NOT_ADMITTED, ENDED_EARLY, FAILED, RUNNING = "not admitted", "ended early", "failed", "running"
STAR = "M0,-1L0.23,-0.3L0.95,-0.3L0.37,0.12L0.59,0.8L0,0.38L-0.59,0.8L-0.37,0.12L-0.95,-0.3L-0.23,-0.3Z"
KINDS: Mapping[str, tuple[str, str, int]] = {
    RANKED: ("circle", "$blue", 70),
    CONFIRMED: ("diamond", "$purple", 80),
    BEST: (STAR, "$green", 300),
    NOT_ADMITTED: ("triangle-up", "$gray", 70),
    ENDED_EARLY: ("square", "$gray", 60),
    FAILED: ("cross", "$orange", 60),
    RUNNING: ("stroke", "$gray", 60),
}
"""Kind of a trial -> the shape, color and size of its mark, in the order of the legend."""
MAX_STRIP_TRIALS = 200
MAX_NAMED_OUTLIERS = 5
OUTLIER_FACTOR = 1.25
"""A trial is named in the chart of predictions if it is off by more than this factor."""


@dataclass(frozen=True)
class Axis:
    """The figure that a chart shows."""

    words: str
    """`step time`."""
    title: str
    """`step time (s)`, with ` (recorded)` or ` (simulated)` if nothing measured it here."""
    greater_is_better: bool = False


@dataclass(frozen=True)
class TrialPoint:
    """One trial as charts show it."""

    number: int
    config: Mapping[str, Value]
    kind: str
    """A key of `KINDS`."""
    value: float | None = None
    """The figure as measured, also of a trial that was not admitted; None if it has none."""
    spread: float | None = None
    """Relative spread of the measurements inside the trial."""
    expected: float | None = None
    """The figure that was expected before the run."""
    proposer: str = ""
    note: str = ""
    """Reason why it is not ranked."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        return self.kind in (BEST, RANKED, CONFIRMED)


def _kind_channels(points: Sequence[TrialPoint]) -> dict[str, Any]:
    used = [kind for kind in KINDS if any(point.kind == kind for point in points)]
    shapes, colors, _ = zip(*(KINDS[kind] for kind in used), strict=True)
    channel: Row = {"field": "kind", "type": "nominal", "legend": {"title": None}}
    looks = {"shape": shapes, "color": colors}
    return {name: {**channel, "scale": {"domain": used, "range": look}} for name, look in looks.items()}


def _row_of(point: TrialPoint, **more: object) -> Row:
    shown = "" if point.value is None else show_number(point.value)
    if point.value is not None and not point.counts:
        shown += ", which does not count"
    row: Row = {"trial": point.number, "kind": point.kind, "v": point.value, "shown": shown}
    row |= {"config": format_config(point.config), "by": point.proposer, "size": KINDS[point.kind][2]}
    return row | ({"note": cut(point.note, 200)} if point.note else {}) | more


def _tips(axis: Axis) -> list[Row]:
    titles = {"trial": "trial", "shown": axis.words, "kind": "state", "config": "configuration", "by": "proposed by"}
    return tips(**titles, note="reason")


ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x", "y"], "zoom": "wheel![event.shiftKey]"},
    "bind": "scales",
}
SIZE = number("size", scale=None, legend=None)


def draw_history(
    points: Sequence[TrialPoint], axis: Axis, *, summary: str, interval: tuple[float, float] | None = None
) -> Chart | None:
    """Draw the figure by trial with the best so far, the noise, and trials that do not count in gray.

    `interval` is of the best trial's true figure.
    """
    measured = [point for point in points if point.value is not None]
    if not measured:
        return None
    ends = [(p.value or 0.0) * (1 + sign * p.spread) for p in measured if p.spread for sign in (-1, 1)]
    values = [*(p.value for p in measured if p.value is not None), *(interval or ()), *ends]
    y = quantity("v", axis.title, values)
    last = max(point.number for point in points)
    x = {**TRIAL, "scale": fixed(0.5, last + 0.5)}
    layers: list[Row] = []
    band = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    if interval:
        low, high = interval
        tip = f"{show_number(low)} to {show_number(high)}: interval of the best's true {axis.words}"
        tooltip = {"tooltip": {"field": "tip", "title": None}}
        known: Row = {"low": low, "high": high, "tip": tip}
        layers.append(layer("rect", band | tooltip, [known], color="$green", opacity=0.16))
    spreads: list[Row] = [
        {"trial": p.number, "low": low, "high": high}
        for p in measured
        if p.spread and p.value is not None
        for low, high in [(p.value * (1 - p.spread), p.value * (1 + p.spread))]
    ]
    if spreads:
        layers.append(layer("rule", {"x": x, **band}, spreads, color="$muted", strokeWidth=1.2))
    so_far = best_so_far(points, axis, last=last)
    if so_far:
        line: Row = {"interpolate": "step-after", "color": "$green", "strokeWidth": 2}
        layers.append(layer("line", {"x": x, "y": y}, so_far, **line))
    marks = {"x": x, "y": y, "size": SIZE, "tooltip": _tips(axis), **_kind_channels(points)}
    drawn: Row = {"filled": True, "opacity": 0.95, "cursor": "pointer"}
    layers.append(layer("point", marks, **drawn) | {"params": [ZOOM]})
    failed = [_row_of(point) for point in points if point.value is None]
    if failed:
        layers.append(layer("point", {**marks, "y": {"value": 6}}, failed, **drawn))
    rows = [_row_of(point) for point in measured]
    return Chart("progress", f"{_title(axis)} by trial", summary, make_spec(rows, 300, layer=layers))


def best_so_far(points: Sequence[TrialPoint], axis: Axis, *, last: int) -> list[Row]:
    """Trial and figure at each improvement, and at the end."""
    rows: list[Row] = []
    best: float | None = None
    for point in points:
        if point.value is None or point.kind not in (BEST, RANKED):
            continue
        if best is None or (point.value > best if axis.greater_is_better else point.value < best):
            best = point.value
            rows.append({"trial": point.number, "v": best})
    return [*rows, {"trial": last, "v": best}] if rows else []


def draw_strip(points: Sequence[TrialPoint]) -> Chart | None:
    """The configurations: one row per knob that varied, one cell per trial."""
    knobs = varied_knobs([point.config for point in points])
    if not points or not knobs or len(points) > MAX_STRIP_TRIALS:
        return None
    rows: list[Row] = []
    for knob in knobs:
        places = place_choices([point.config for point in points], knob)
        for point in points:
            if knob in point.config:
                text = str(show_choice(point.config[knob]))
                place = places[point.config[knob]]
                rows.append({"trial": point.number, "knob": cut(knob, 24), "value": text, "place": place,
                             "dark": place >= 0.55})  # fmt: skip
    x = {"field": "trial", "type": "ordinal", "title": "trial", "axis": {"labelAngle": 0, "labelOverlap": True}}
    y = category("knob", axis={"labelLimit": 160})
    shade = number("place", legend=None, scale={"range": ["$low", "$high"]})
    cells = {"x": x, "y": y, "tooltip": tips(trial="trial", knob="knob", value="value")}
    ink = {"condition": {"test": "datum.dark", "value": "$paper"}, "value": "$ink"}
    room = f"width / {len(points)}"
    fit: Row = {"limit": {"expr": f"{room} - 3"}, "opacity": {"expr": f"{room} < 20 ? 0 : 1"}}
    layers = [
        layer("rect", {**cells, "color": shade}, stroke="$paper", strokeWidth=1.5, cursor="pointer"),
        layer("text", {**cells, "text": {"field": "value"}, "color": ink}, fontSize=11, **fit),
    ]
    if max(len(str(row["value"])) for row in rows) * 7 * len(points) > 3000:
        layers = layers[:1]
    summary = f"{len(knobs)} knobs varied over {len(points)} trials: {', '.join(knobs)}; the table has every value"
    return Chart("strip", "Configuration of each trial", summary, make_spec(rows, {"step": 22}, layer=layers))


def draw_prediction(points: Sequence[TrialPoint], axis: Axis) -> Chart | None:
    """The figure as expected before the run and as measured; the trials furthest off are named."""
    pairs = [
        (point, point.expected, point.value)
        for point in points
        if point.expected and point.value and point.kind in (BEST, RANKED) and min(point.expected, point.value) > 0
    ]
    if len(pairs) < 2:
        return None
    off = {point.number: max(value / expected, expected / value) for point, expected, value in pairs}
    worst = sorted((n for n in off if off[n] > OUTLIER_FACTOR), key=lambda n: -off[n])[:MAX_NAMED_OUTLIERS]
    both = [number for _, *pair in pairs for number in pair]
    middle = sorted(off.values())[len(off) // 2] - 1
    rows = [
        _row_of(point, expected=expected, expected_shown=show_number(expected), off=f"{off[point.number]:.2f}x",
                name=f"trial {point.number}" if point.number in worst else "")
        for point, expected, _ in pairs
    ]  # fmt: skip
    x, y = quantity("expected", f"expected {axis.title}", both), quantity("v", f"measured {axis.title}", both)
    extent = [min(both), max(both)]
    for channel in (x, y):
        channel["scale"] = {**channel["scale"], "domain": [extent[0] * 0.95, extent[1] * 1.05], "padding": 0}
    titles = {"trial": "trial", "expected_shown": "expected", "shown": "measured", "off": "off by"}
    tooltip = tips(**titles, config="configuration", by="proposed by")
    line = [{"expected": end, "v": end} for end in extent]
    marks = {"x": x, "y": y, "size": SIZE, "tooltip": tooltip, **_kind_channels([point for point, *_ in pairs])}
    names = {"x": x, "y": y, "text": {"field": "name"}}
    layers = [
        layer("line", {"x": x, "y": y}, line, color="$muted", strokeDash=[5, 4]),
        layer("point", marks, filled=True, cursor="pointer") | {"params": [ZOOM]},
        layer("text", names, align="left", baseline="middle", dx=9, fontSize=11),
    ]
    named = f"; furthest off: {', '.join(f'trial {n} by {off[n]:.2f}x' for n in worst)}" if worst else ""
    summary = f"{len(pairs)} trials; half of them within {middle:.0%} of the expected {axis.words}{named}"
    return Chart("prediction", f"Expected and measured {axis.words}", summary, make_spec(rows, 360, layer=layers))


@dataclass(frozen=True)
class NeighborPoint:
    """A configuration near the winner."""

    change: str
    ratio: float
    trial: int | None
    """None if it was predicted and did not run."""


def draw_neighbors(neighbors: Sequence[NeighborPoint], axis: Axis) -> Chart | None:
    """The figure of configurations near the best, relative to its own; predicted ones are hollow."""
    if not neighbors:
        return None
    shown = sorted(neighbors, key=lambda n: n.ratio, reverse=axis.greater_is_better)[:16]
    rows = [
        {"change": f"{cut(n.change, 60)}", "ratio": n.ratio, "one": 1, "kind": "ran" if n.trial else "predicted",
         "shown": f"{n.ratio:.3g}x", "what": f"trial {n.trial}" if n.trial else "predicted, did not run",
         **({"trial": n.trial} if n.trial else {})}
        for n in shown
    ]  # fmt: skip
    x = quantity("ratio", f"{axis.words} relative to the best", [n.ratio for n in shown] + [1.0])
    y = category("change", axis={"labelLimit": {"expr": "min(320, width * 0.45)"}})
    filled = {"condition": {"test": "datum.kind === 'ran'", "value": "$blue"}, "value": "$paper"}
    marks = {"y": y, "x": x, "fill": filled, "tooltip": tips(change="change", shown="ratio", what="known from")}
    layers = [
        layer("rule", {"x": {**x, "aggregate": "min", "field": "one"}}, color="$green", strokeWidth=2),
        layer("rule", {"y": y, "x": x, "x2": {"field": "one"}}, color="$gray"),
        layer("point", marks, filled=True, size=90, stroke="$blue", strokeWidth=2, opacity=1),
    ]
    summary = "; ".join(f"{n.change}: {n.ratio:.3g}x" + ("" if n.trial else " (predicted)") for n in shown)
    return Chart(
        "sensitivity", "Configurations near the best (hollow: predicted, did not run)", summary,
        make_spec(rows, {"step": 25}, layer=layers),
    )  # fmt: skip


def draw_against(points: Sequence[tuple[str, TrialPoint]], cause: str, words: str, axis: Axis) -> Chart | None:
    """The figure against another metric over all ranked trials; one color and shape per run."""
    kept = [(run, p, p.metrics[cause]) for run, p in points if p.counts and p.value and cause in p.metrics]
    if len(kept) < 3 or len({value for *_, value in kept}) < 2:
        return None
    rows = [_row_of(p, run=run, cause=value, cause_shown=show_number(value)) for run, p, value in kept]
    x = quantity("cause", words, [value for *_, value in kept])
    y = quantity("v", axis.title, [p.value for _, p, _ in kept if p.value])
    legend = {"title": None} if len({run for run, *_ in kept}) > 1 else None
    titles = {"run": "run", "trial": "trial", "cause_shown": words, "shown": axis.words, "config": "configuration"}
    one = category("run", legend=legend)
    encoding = {"x": x, "y": y, "color": one, "shape": one, "tooltip": tips(**titles)}
    strength = rank_correlation([(value, p.value or 0.0) for _, p, value in kept])
    summary = f"{len(rows)} trials; rank correlation of {words} with {axis.words} {strength:+.2f}"
    name = f"{axis.words}-{cause}".replace(" ", "-").replace("_", "-").replace("/", "-")
    spec = make_spec(rows, 300, mark={"type": "point", "filled": True, "size": 70}, encoding=encoding, params=[ZOOM])
    return Chart(name, f"{_title(axis)} against {words}", summary, spec)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation, with mean ranks for ties; 0 if one side does not vary."""
    from scipy.stats import rankdata

    left, right = rankdata([a for a, _ in pairs]), rankdata([b for _, b in pairs])
    dl, dr = left - left.mean(), right - right.mean()
    scale = math.sqrt(float((dl**2).sum() * (dr**2).sum()))
    return float((dl * dr).sum()) / scale if scale else 0.0


def varied_knobs(configs: Sequence[Mapping[str, Value]]) -> list[str]:
    """Knobs that took more than one value, in the order of the space; all of them if none varied."""
    names = list(dict.fromkeys(knob for config in configs for knob in config))
    varied = [k for k in names if len({(type(c.get(k)), c.get(k)) for c in configs}) > 1]
    return varied or names


def place_choices(configs: Sequence[Mapping[str, Value]], knob: str, *, alone: float = 0.0) -> dict[Value, float]:
    """Value of the knob -> its place among those tried, from 0 to 1; a single value has the place `alone`."""
    values = sorted({config[knob] for config in configs if knob in config}, key=lambda v: (isinstance(v, str), v))
    return {value: n / (len(values) - 1) if len(values) > 1 else alone for n, value in enumerate(values)}


def _title(axis: Axis) -> str:
    """`Step time (simulated)`: a title states the origin of the figures, as its axis does."""
    mark = next((p.mark for p in Provenance if p.mark and axis.title.endswith(p.mark)), "")
    return axis.words[:1].upper() + axis.words[1:] + mark
