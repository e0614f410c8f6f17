"""Writes a report to disk: the page, and its charts as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cclsearch.charts.chart import Chart, render_png, render_svg
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError, require_writable, writing_to
from cclsearch.report.charts import draw_comparisons, draw_run
from cclsearch.report.data import RunPage, rank_runs
from cclsearch.report.page import render_page, render_pareto_page
from cclsearch.report.pareto import ParetoPage, draw_pareto_page, render_pareto_csv

CHARTS_FOLDER = "charts"


def write_report(
    pages: Sequence[RunPage], path: Path, *, png: bool = True, dark: bool = False, extra: Sequence[Chart] = ()
) -> list[Path]:
    """Write the page to `path` and, with `png`, every chart to `charts/` in the same folder; returns the files written.

    Raises UserError if the folder is not writable.
    """
    written = [write_text(path, render_page(pages, extra_charts=extra, base=path.parent))]
    if not png:
        return written
    charts = list(extra)
    for page in pages:
        prefix = "" if len(pages) == 1 else f"{safe_stem(page.run_id)}-"
        charts += [replace(chart, name=prefix + chart.name) for chart in draw_run(page)]
    if len(pages) > 1:
        for n, entries in enumerate(rank_runs(pages), 1):
            charts += draw_comparisons(entries, f"compared-{n}-")
    return written + write_pictures(charts, path.parent / CHARTS_FOLDER, dark=dark)


def write_pareto_page(page: ParetoPage, folder: Path, *, png: bool = True, dark: bool = False) -> list[Path]:
    """Write `pareto.html`, `pareto.csv` and, with `png`, the charts to `charts/`; returns the files written."""
    written = [
        write_text(folder / "pareto.html", render_pareto_page(page)),
        write_text(folder / "pareto.csv", render_pareto_csv(page)),
    ]
    return written + (write_pictures(draw_pareto_page(page), folder / CHARTS_FOLDER, dark=dark) if png else [])


def write_pictures(charts: Sequence[Chart], folder: Path, *, dark: bool = False) -> list[Path]:
    """Write each chart as a PNG of its name; returns the files. Raises UserError if that is impossible."""
    return [write_picture(chart, folder / f"{chart.name}.png", dark=dark) for chart in charts]


def write_picture(chart: Chart, path: Path, *, dark: bool = False) -> Path:
    """Write a chart as a PNG or, if that is the ending of the path, as SVG. Raises UserError if that is impossible."""
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_svg = path.suffix.lower() == ".svg"
        write_atomically(path, render_svg(chart, dark=dark) if is_svg else render_png(chart, dark=dark))
    return path


def check_picture(path: Path | None) -> None:
    """Raise UserError if the file of `--picture` does not end in .svg or .png, or cannot be written."""
    if path is not None and path.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"--picture {path}: the file must end in .svg or .png")
    if path is not None:
        require_writable(path, "--picture")


def write_text(path: Path, text: str) -> Path:
    """Write a file, creating its folder if needed; returns its path. Raises UserError if that is impossible."""
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path


def safe_stem(name: str) -> str:
    """The name reduced to letters, digits, `.`, `_` and `-`, so that it is never a path."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).lstrip(".-") or "run"
