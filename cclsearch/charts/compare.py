"""Charts that compare: the runs of a group, the nights of a job, the frameworks and the traces of a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cclsearch.charts.chart import TRIAL, Chart, Row, category, cut, layer, make_spec, named_bars, quantity, tips
from cclsearch.charts.trials import Axis, TrialPoint, best_so_far
from cclsearch.core.text import show_number


def draw_bests(bests: Sequence[tuple[str, float, str]], axis: Axis, group: str, *, name: str = "bests") -> Chart | None:
    """A bar per run of one group of comparable runs: its name, its best figure and that one's configuration."""
    if len(bests) < 2:
        return None
    rows = [
        {"run": cut(run, 46), "v": value, "zero": 0, "shown": show_number(value), "config": config}
        for run, value, config in bests
    ]
    x = quantity("v", f"{axis.title} of the best trial")
    x["scale"] = {"zero": True, "domainMax": max(value for _, value, _ in bests) * 1.15}
    layers = named_bars(x, category("run"), tips(run="run", shown=axis.words, config="configuration"))
    summary = f"{group}: " + "; ".join(f"{run}: {show_number(value)}" for run, value, _ in bests)
    return Chart(name, f"Best {axis.words} of each run", summary, make_spec(rows, {"step": 28}, layer=layers))


def draw_curves(runs: Sequence[tuple[str, Sequence[TrialPoint]]], axis: Axis, *, name: str = "curves") -> Chart | None:
    """The best so far by trial, one line per run, over each other; runs must be comparable."""
    rows: list[Row] = []
    ends: list[str] = []
    for run, points in runs:
        line = best_so_far(points, axis, last=max((point.number for point in points), default=0))
        rows += [{**row, "run": run, "shown": show_number(row["v"])} for row in line]
        if line:
            ends.append(f"{run}: {show_number(line[-1]['v'])} after {line[-1]['trial']} trials")
    if len(ends) < 2:
        return None
    one = category("run", legend={"title": None})
    encoding = {
        "x": TRIAL,
        "y": quantity("v", f"best {axis.title} so far", [row["v"] for row in rows]),
        "color": one,
        "strokeDash": one,
        "tooltip": tips(run="run", trial="trial", shown=f"best {axis.words} so far"),
    }
    mark = {"type": "line", "interpolate": "step-after", "strokeWidth": 2.2}
    title = f"Best {axis.words} so far"
    return Chart(name, title, "; ".join(ends), make_spec(rows, 300, mark=mark, encoding=encoding))


@dataclass(frozen=True)
class NightPoint:
    """The best of one night."""

    night: str
    """Its stamp, `20261122-062421`."""
    value: float
    config: str
    interval: tuple[float, float] | None = None
    followed: Mapping[str, float] | None = None
    """Configurations that ran on several nights -> their figures in this one."""


def draw_nights(nights: Sequence[NightPoint], axis_title: str, *, name: str, title: str) -> Chart | None:
    """The best of each night with its interval, and a dashed line per followed configuration."""
    if not nights:
        return None
    bests: list[Row] = []
    followed: list[Row] = []
    spans: list[Row] = []
    for n, night in enumerate(nights):
        shared = {"n": n, "night": night.night}
        bests.append({**shared, "v": night.value, "shown": show_number(night.value), "line": "best of the night",
                      "config": night.config})  # fmt: skip
        if night.interval:
            spans.append({**shared, "low": night.interval[0], "high": night.interval[1]})
        for config, value in (night.followed or {}).items():
            followed.append(
                {**shared, "v": value, "shown": show_number(value), "line": cut(config, 60), "config": config}
            )
    names = [f"{night.night[4:6]}-{night.night[6:8]}" for night in nights]
    x = {"field": "n", "type": "ordinal", "title": "night (month-day, UTC)",
         "axis": {"labelAngle": 0, "labelOverlap": True, "labelExpr": _label_expression(names)}}  # fmt: skip
    values = [row["v"] for row in (*bests, *followed)] + [edge for row in spans for edge in (row["low"], row["high"])]
    y = quantity("v", axis_title, values)
    lines = list(dict.fromkeys(row["line"] for row in (*bests, *followed)))
    colors = {"domain": lines, "range": ["$green", "$blue", "$orange", "$purple"][: len(lines)]}
    shapes = {"domain": lines, "range": ["diamond", "circle", "square", "triangle-up"][: len(lines)]}
    legend = {"title": None, "columns": 1, "labelLimit": {"expr": "width - 60"}}
    look = {
        "color": category("line", scale=colors, legend=legend),
        "shape": category("line", scale=shapes, legend=legend),
    }
    tooltip = tips(night="night", shown="figure", line="line", config="configuration")
    ends = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    of_line = {"x": x, "y": y, "color": look["color"]}
    points = {"x": x, "y": y, **look, "tooltip": tooltip}
    layers = [
        *([layer("rule", ends, spans, color="$green", strokeWidth=1.5)] if spans else []),
        *([layer("line", of_line, followed, strokeDash=[4, 3], strokeWidth=1.2)] if followed else []),
        layer("line", of_line, strokeWidth=2),
        layer("point", points, [*followed, *bests], filled=True, size=70, opacity=1),
    ]
    summary = "; ".join(f"{night.night[:8]}: {show_number(night.value)}" for night in nights)
    return Chart(name, title, summary, make_spec(bests, 280, layer=layers))


def _label_expression(names: Sequence[str]) -> str:
    """Vega's expression of a night's label: digits and dashes only, for any stamp."""
    safe = ["".join(c for c in name if c.isdigit() or c == "-") for name in names]
    return f"[{', '.join(repr(name) for name in safe)}][datum.value]"


@dataclass(frozen=True)
class OverlapPoint:
    """One trace."""

    name: str
    overlap: float
    """Share of communication that computation hides."""
    seconds: float
    """Seconds of a step."""
    cause: str
    """Largest part of the step's time."""


def draw_overlap(points: Sequence[OverlapPoint]) -> Chart:
    """The time of a step against the share of hidden communication; a color and shape for each diagnosis."""
    rows: list[Row] = [
        {"name": cut(one.name, 40), "x": 100 * one.overlap, "y": one.seconds, "cause": one.cause,
         "shown": f"{show_number(one.seconds)} s"}
        for one in points
    ]  # fmt: skip
    encoding = {
        "x": quantity("x", "communication hidden behind computation (%)"),
        "y": quantity("y", "time of a step (s)", [one.seconds for one in points]),
        "color": category("cause", "most of the step"),
        "shape": category("cause", "most of the step"),
        "tooltip": tips(name="trace", x="hidden (%)", shown="step", cause="most of the step"),
    }
    summary = "; ".join(f"{one.name}: {100 * one.overlap:.0f} % hidden, {show_number(one.seconds)} s" for one in points)
    spec = make_spec(rows, 320, mark={"type": "point", "filled": True, "size": 90}, encoding=encoding)
    return Chart("overlap", "Hidden communication against the time of a step", summary, spec)


def draw_utilities(shares: Mapping[str, Mapping[str, float]], title: str) -> Chart:
    """Grouped bars: for each trace or cluster, the share of the time that doubling each resource saves."""
    rows: list[Row] = [
        {"name": cut(name, 40), "resource": resource.replace("_", " "), "v": 100 * share, "zero": 0}
        for name, found in shares.items()
        for resource, share in found.items()
    ]
    axis = "share of the time saved by doubling it (%, simulated)"
    spec = _draw_groups(rows, shares, "resource", axis, name="name", resource="resource", v="saved (%)")
    return Chart("utility", title, _list_groups(shares, lambda share: f"{100 * share:.1f} %"), spec)


def draw_frameworks(speeds: Mapping[str, Mapping[str, float]], about: str = "") -> Chart:
    """Grouped bars: for each case, how fast each framework's best configuration is; the fastest is 1.

    `about` is said of all cases.
    """
    of_all = f"; {about}" if about else ""
    rows: list[Row] = [
        {"name": cut(name, 60), "framework": cut(framework, 24), "v": speed, "zero": 0, "shown": f"{speed:.2f}"}
        for name, found in speeds.items()
        for framework, speed in found.items()
    ]
    axis = f"best configuration of each framework (the fastest of a case is 1){of_all}"
    titles = {"name": "case", "framework": "framework", "shown": "share of the fastest"}
    spec = _draw_groups(rows, speeds, "framework", axis, **titles)
    title = f"Frameworks, each with its best configuration{of_all}"
    return Chart("frameworks", title, _list_groups(speeds, lambda speed: f"{speed:.2f}"), spec)


def _draw_groups(
    rows: Sequence[Row], groups: Mapping[str, Mapping[str, float]], field: str, axis: str, **titles: str
) -> dict[str, Any]:
    """Return grouped bars: a group for each `name`, a bar for each `field`, tooltips with `titles`."""
    encoding = {
        "y": category("name"),
        "yOffset": category(field),
        "x": quantity("v", axis) | {"scale": {"zero": True}},
        "color": category(field, None),
        "tooltip": tips(**titles),
    }
    count = max((len(found) for found in groups.values()), default=1)
    height = max(len(groups), 1) * (13 * count + 12)
    return make_spec(rows, height, mark={"type": "bar"}, encoding=encoding)


def _list_groups(groups: Mapping[str, Mapping[str, float]], show: Callable[[float], str]) -> str:
    """Return every figure in words: `GROUP: BAR FIGURE, BAR FIGURE; GROUP: ...`."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{bar} {show(value)}" for bar, value in found.items())
        for name, found in groups.items()
    )
