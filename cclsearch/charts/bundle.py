"""Vega for pages and for files: the script that draws charts offline, and charts as SVG and PNG without a browser."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cclsearch.charts.chart import WIDTH, Chart, paint

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


def render_svg(chart: Chart, *, dark: bool = False, width: int = WIDTH) -> str:
    """The chart as SVG text that needs nothing else."""
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(paint(chart, dark=dark, width=width), allowed_base_urls=[])
    return svg


def render_png(chart: Chart, *, dark: bool = False, width: int = WIDTH, scale: float = 2.0) -> bytes:
    """The chart as a PNG with `scale` pixels per unit of width."""
    import vl_convert

    spec = paint(chart, dark=dark, width=width)
    png: bytes = vl_convert.vegalite_to_png(spec, scale=scale, allowed_base_urls=[])
    return png
