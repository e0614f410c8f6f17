"""Stacked bars: what a figure consists of, one bar per trial, configuration or rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cclsearch.charts.chart import SERIES, Chart, Row, category, cut, make_spec, tips
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
    x: Row = {"field": "v", "type": "quantitative", "title": axis_title, "stack": "zero"}
    x |= {"scale": {"domain": [0, top * 1.03], "nice": False}, "axis": {"tickCount": 6}}
    colors = [PARTS_COLORS[n % len(PARTS_COLORS)] for n in range(len(names))]
    color = {"field": "part", "type": "nominal", "scale": {"domain": names, "range": colors}, "legend": {"title": None}}
    y = category("bar", axis={"labelLimit": {"expr": "min(330, width * 0.45)"}})
    tooltip = tips(bar="bar", part="part", shown="size")
    stacked = {"x": x, "y": y, "color": color, "order": {"field": "nth"}, "tooltip": tooltip}
    layers: list[Row] = [
        {"mark": {"type": "bar", "height": {"band": 0.75}, "stroke": "$paper", "strokeWidth": 0.7}, "encoding": stacked}
    ]
    if limit:
        tip = f"limit {limit:g}"
        layers.append({"data": {"values": [{"limit": limit, "tip": tip}]},
                       "mark": {"type": "rule", "color": "$ink", "strokeDash": [4, 3], "strokeWidth": 1.6},
                       "encoding": {"x": {**x, "field": "limit", "stack": None},
                                    "tooltip": {"field": "tip", "title": None}}})  # fmt: skip
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
