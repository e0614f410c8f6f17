"""The chart of a nightly job: the best of each night, and configurations that ran on several nights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cclsearch.charts.chart import Chart, Row, category, cut, make_spec, quantity, tips
from cclsearch.core.text import show_number


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
    layers: list[Row] = [
        {"data": {"values": spans}, "mark": {"type": "rule", "color": "$green", "strokeWidth": 1.5},
         "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"data": {"values": followed}, "mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.2},
         "encoding": {"x": x, "y": y, "color": look["color"]}},
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"x": x, "y": y, "color": look["color"]}},
        {"data": {"values": [*followed, *bests]}, "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
         "encoding": {"x": x, "y": y, **look, "tooltip": tooltip}},
    ]  # fmt: skip
    layers = [layer for layer in layers if layer.get("data", {"values": bests})["values"]]
    summary = "; ".join(f"{night.night[:8]}: {show_number(night.value)}" for night in nights)
    return Chart(name, title, summary, make_spec(bests, 280, layer=layers))


def _label_expression(names: Sequence[str]) -> str:
    """Vega's expression of a night's label: digits and dashes only, for any stamp."""
    safe = ["".join(c for c in name if c.isdigit() or c == "-") for name in names]
    return f"[{', '.join(repr(name) for name in safe)}][datum.value]"
