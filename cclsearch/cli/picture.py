"""Writes a chart into the file that `--picture` names."""

from __future__ import annotations

from pathlib import Path

from cclsearch.charts.bundle import render_png, render_svg
from cclsearch.charts.chart import Chart
from cclsearch.core.errors import UserError, require_writable


def check_picture(path: Path | None) -> None:
    """Raise UserError if the file has another ending than .svg or .png, or cannot be written."""
    if path is None:
        return
    if path.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"--picture {path}: the file must end in .svg or .png")
    require_writable(path, "--picture")


def write_picture(chart: Chart, path: Path) -> None:
    """Write the chart."""
    if path.suffix.lower() == ".svg":
        path.write_text(render_svg(chart), encoding="utf-8")
    else:
        path.write_bytes(render_png(chart))
