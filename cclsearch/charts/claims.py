"""Charts of the claims: overlap against time, utility of resources, and frameworks side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cclsearch.charts.chart import Chart, Row, category, cut, make_spec, quantity, tips
from cclsearch.core.numbers import show_number


@dataclass(frozen=True)
class OverlapPoint:
    """One trace."""

    name: str
    overlap: float
    """Share of communication that computation hides."""
    seconds: float
    """Of a step."""
    cause: str
    """Where most of the step goes."""


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
    encoding = {
        "y": category("name"),
        "yOffset": category("resource"),
        "x": quantity("v", "share of the time saved by doubling it (%, simulated)") | {"scale": {"zero": True}},
        "color": category("resource", None),
        "tooltip": tips(name="name", resource="resource", v="saved (%)"),
    }
    summary = "; ".join(
        f"{name}: " + ", ".join(f"{resource} {100 * share:.1f} %" for resource, share in found.items())
        for name, found in shares.items()
    )
    count = max((len(found) for found in shares.values()), default=1)
    height = max(len(shares), 1) * (13 * count + 12)
    return Chart("utility", title, summary, make_spec(rows, height, mark={"type": "bar"}, encoding=encoding))


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
    encoding = {
        "y": category("name"),
        "yOffset": category("framework"),
        "x": quantity("v", f"best configuration of each framework (the fastest of a case is 1){of_all}")
        | {"scale": {"zero": True}},
        "color": category("framework", None),
        "tooltip": tips(name="case", framework="framework", shown="share of the fastest"),
    }
    summary = "; ".join(
        f"{name}: " + ", ".join(f"{framework} {speed:.2f}" for framework, speed in found.items())
        for name, found in speeds.items()
    )
    count = max((len(found) for found in speeds.values()), default=1)
    height = max(len(speeds), 1) * (13 * count + 12)
    spec = make_spec(rows, height, mark={"type": "bar"}, encoding=encoding)
    return Chart("frameworks", f"Frameworks, each with its best configuration{of_all}", summary, spec)
