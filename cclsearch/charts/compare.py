"""Charts that compare runs: the best of each, and best-so-far curves over each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cclsearch.charts.chart import Chart, Row, category, cut, make_spec, quantity, tips
from cclsearch.charts.trials import Axis, TrialPoint, best_so_far
from cclsearch.core.text import show_number


@dataclass(frozen=True)
class BestOfRun:
    """The best trial of one run; runs of one group are comparable."""

    run: str
    group: str
    value: float
    detail: str
    """Its configuration."""


def draw_bests(bests: Sequence[BestOfRun], axis: Axis, *, name: str = "bests") -> Chart | None:
    """A bar per run of one group."""
    if len(bests) < 2:
        return None
    rows = [
        {"run": cut(best.run, 46), "v": best.value, "zero": 0, "shown": show_number(best.value), "config": best.detail}
        for best in bests
    ]
    x = quantity("v", f"{axis.title} of the best trial")
    x["scale"] = {"zero": True, "domainMax": max(best.value for best in bests) * 1.15}
    y = category("run")
    layers = [
        {"mark": {"type": "bar", "color": "$blue", "height": {"band": 0.7}},
         "encoding": {"x": x, "y": y, "tooltip": tips(run="run", shown=axis.words, config="configuration")}},
        {"mark": {"type": "text", "align": "left", "dx": 5}, "encoding": {"x": x, "y": y, "text": {"field": "shown"}}},
    ]  # fmt: skip
    summary = f"{bests[0].group}: " + "; ".join(f"{best.run}: {show_number(best.value)}" for best in bests)
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
    x = {"field": "trial", "type": "quantitative", "title": "trial", "axis": {"tickMinStep": 1, "grid": False}}
    legend = {"title": None}
    encoding = {
        "x": x,
        "y": quantity("v", f"best {axis.title} so far", [row["v"] for row in rows]),
        "color": category("run", legend=legend),
        "strokeDash": category("run", legend=legend),
        "tooltip": tips(run="run", trial="trial", shown=f"best {axis.words} so far"),
    }
    mark = {"type": "line", "interpolate": "step-after", "strokeWidth": 2.2}
    title = f"Best {axis.words} so far"
    return Chart(name, title, "; ".join(ends), make_spec(rows, 300, mark=mark, encoding=encoding))
