"""A chart as a Vega-Lite specification whose colors are roles, so that one chart serves light, dark and print.

In a specification, text such as `$green` stands for the color of a role, `$width` for the width of the drawing and
`$columns` for those of its legend: `paint` replaces them, and so does `charts.js` in a page, when the theme or the
width changes. Data are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cclsearch.core.values import Value
from cclsearch.core.yaml_file import read_yaml

_THEME = read_yaml(Path(__file__).with_name("theme.yaml"))
PALETTE: dict[str, tuple[str, str]] = {role: (light, dark) for role, (light, dark) in _THEME["palette"].items()}
"""Role -> color on a light and on a dark background. Marks also differ in shape."""

WIDTH = 880
WIDTH_MARK, COLUMNS_MARK = "$width", "$columns"
LEGEND_COLUMN = 170
"""Pixels per column of a legend."""
DATA_KEYS = ("values", "datasets", "domain", "sort", "options", "labels", "title")
"""Keys of a specification that hold text from outside."""

Spec = Mapping[str, Any]
Row = dict[str, Any]

CONFIG: Spec = _THEME["config"]
"""Settings that all charts share."""
SERIES: Sequence[str] = CONFIG["range"]["category"]


@dataclass(frozen=True)
class Chart:
    """One chart; `spec` is Vega-Lite without `config`."""

    name: str
    """Stem of its file name: letters, digits and dashes."""
    title: str
    summary: str
    """Text alternative for people who cannot see the chart."""
    spec: Spec


def paint(chart: Chart, *, dark: bool = False, width: int = WIDTH) -> dict[str, Any]:
    """The whole specification with colors and a width in pixels."""
    known: dict[str, Any] = {f"${role}": colors[dark] for role, colors in PALETTE.items()}
    known |= {WIDTH_MARK: width, COLUMNS_MARK: max(1, width // LEGEND_COLUMN)}

    def fill(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: value if key in DATA_KEYS else fill(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [fill(value) for value in node]
        return known.get(node, node) if isinstance(node, str) else node

    painted: dict[str, Any] = fill({**chart.spec, "config": CONFIG})
    return painted


def page_data(charts: Mapping[str, Chart]) -> dict[str, Any]:
    """Data for `charts.js`: each specification by the id of its element, the configuration and the colors."""
    return {
        "charts": {place: chart.spec for place, chart in charts.items()},
        "config": CONFIG,
        "palette": {f"${role}": colors for role, colors in PALETTE.items()},
    }


def palette_css() -> str:
    """CSS variables of every role: by the reader's preference, and by `data-theme` on the root where one was chosen."""
    light, dark = (";".join(f"--{role}:{colors[n]}" for role, colors in PALETTE.items()) for n in (0, 1))
    chosen = f":root[data-theme=dark]{{color-scheme:dark;{dark}}}"
    return (
        f":root{{color-scheme:light;{light}}}\n{chosen}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
    )


def cut(text: str, limit: int) -> str:
    """The text, at most `limit` characters long."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


SCRIPT = Path(__file__).parent / "charts.js"
EMBED = "window.vegaEmbed = vegaEmbed;"


@cache
def page_script() -> str:
    """Vega, Vega-Lite and Vega-Embed, then `charts.js`, as one script.

    It draws under a content policy without `unsafe-eval`, since `charts.js` has Vega interpret its expressions; the
    page must allow inline styles. It takes about a second to bundle, once per process.
    """
    import vl_convert

    bundled: str = vl_convert.javascript_bundle(EMBED)
    return bundled.replace("</script", "<\\/script") + "\n" + SCRIPT.read_text(encoding="utf-8")


def render_svg(chart: Chart, *, dark: bool = False) -> str:
    """The chart as SVG text that needs nothing else."""
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(paint(chart, dark=dark), allowed_base_urls=[])
    return svg


def render_png(chart: Chart, *, dark: bool = False, scale: float = 2.0) -> bytes:
    """The chart as a PNG with `scale` pixels per unit of width."""
    import vl_convert

    png: bytes = vl_convert.vegalite_to_png(paint(chart, dark=dark), scale=scale, allowed_base_urls=[])
    return png


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
