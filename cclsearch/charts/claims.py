"""Charts of the claims: overlap against time, utility of resources, and frameworks side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cclsearch.charts.chart import Chart, Row, category, cut, make_spec, quantity, tips
from cclsearch.core.text import show_number


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
