"""Parts of a chart's specification: its layers, channels, scales and tooltips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cclsearch.charts.chart import WIDTH_MARK, Row
from cclsearch.core.values import Value


def make_spec(rows: Sequence[Row], height: int | Mapping[str, int], **parts: Any) -> dict[str, Any]:
    """A specification as wide as its place, over rows."""
    autosize = {"type": "fit-x", "contains": "padding"}
    return {"width": WIDTH_MARK, "height": height, "autosize": autosize, "data": {"values": list(rows)}, **parts}


def layer(mark: str, encoding: Row, rows: Sequence[Row] | None = None, **look: Any) -> Row:
    """Marks of one kind with their look and channels; over rows of their own if these are given."""
    own = {} if rows is None else {"data": {"values": list(rows)}}
    return {**own, "mark": {"type": mark, **look}, "encoding": encoding}


def named_bars(x: Row, y: Row, tooltip: Sequence[Row]) -> list[Row]:
    """The layers of horizontal bars with each row's `shown` beside them."""
    bars = layer("bar", {"x": x, "y": y, "tooltip": tooltip}, color="$blue", height={"band": 0.7})
    return [bars, layer("text", {"x": x, "y": y, "text": {"field": "shown"}}, align="left", dx=5)]


def number(field: str, **more: Any) -> Row:
    """A channel of numbers as it is described."""
    return {"field": field, "type": "quantitative", **more}


def fixed(low: float, high: float) -> Row:
    """A scale from one number to another."""
    return {"domain": [low, high], "nice": False}


def quantity(field: str, title: str | None, values: Sequence[float] = (), **more: Any) -> dict[str, Any]:
    """A channel of numbers; logarithmic if the values are positive and span more than a factor of 5."""
    known = [value for value in values if value is not None]
    scale: dict[str, Any] = {"zero": False, "nice": True, "padding": 8}
    axis: dict[str, Any] = {"tickCount": 6, **more.pop("axis", {})}
    if known and min(known) > 0 and max(known) / min(known) > 5:
        scale = {"type": "log", "nice": False, "padding": 12}
        axis = {"format": "~g", **axis}
    return number(field, title=title, scale=scale, axis=axis, **more)


def category(field: str, title: str | None = None, **more: Any) -> dict[str, Any]:
    """A channel of names in the order of the data, unless `sort` is given."""
    return {"field": field, "type": "nominal", "title": title, "sort": None, **more}


def tips(**titles: str) -> list[Row]:
    """The lines of a tooltip: field -> its title."""
    return [{"field": field, "type": "nominal", "title": title} for field, title in titles.items()]


def show_choice(value: Value) -> str | float:
    """A knob's value as charts order and print it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


TRIAL = number("trial", title="trial", axis={"tickMinStep": 1, "grid": False})
"""The channel of trials by number."""
