"""Writes a report to disk: the page, and its charts as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cclsearch.core.atomic_file import replacing, write_atomically
from cclsearch.core.errors import writing_to
from cclsearch.draw.scene import Scene
from cclsearch.report.data import RunPage
from cclsearch.report.page import draw_comparisons, draw_run, render_page, render_pareto_page
from cclsearch.report.pareto import ParetoPage, draw_pareto_page, render_pareto_csv

CHARTS_FOLDER = "charts"


def write_report(
    pages: Sequence[RunPage], path: Path, *, png: bool = True, dark: bool = False, extra: Sequence[Scene] = ()
) -> list[Path]:
    """Write the page to `path` and, with `png`, every chart to `charts/` in the same folder; returns the files written.

    Raises UserError if the folder is not writable.
    """
    written = [write_text(path, render_page(pages, extra_charts=extra))]
    if not png:
        return written
    scenes = list(extra)
    for page in pages:
        prefix = "" if len(pages) == 1 else f"{safe_stem(page.run_id)}-"
        scenes += [replace(scene, name=prefix + scene.name) for scene in draw_run(page)]
    if len(pages) > 1:
        scenes += [replace(scene, name=f"compared-{scene.name}") for scene in draw_comparisons(pages)]
    return written + write_pictures(scenes, path.parent / CHARTS_FOLDER, dark=dark)


def write_pareto_page(page: ParetoPage, folder: Path, *, png: bool = True, dark: bool = False) -> list[Path]:
    """Write `pareto.html`, `pareto.csv` and, with `png`, the charts to `charts/`; returns the files written."""
    written = [
        write_text(folder / "pareto.html", render_pareto_page(page)),
        write_text(folder / "pareto.csv", render_pareto_csv(page)),
    ]
    return written + (write_pictures(draw_pareto_page(page), folder / CHARTS_FOLDER, dark=dark) if png else [])


def write_pictures(scenes: Sequence[Scene], folder: Path, *, dark: bool = False) -> list[Path]:
    """Write each scene as a PNG of its name; returns the files. Raises UserError if that is impossible."""
    from cclsearch.draw.png import write_png

    written = []
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for scene in scenes:
            path = folder / f"{scene.name}.png"
            with replacing(path) as partial:
                write_png(scene, partial, dark=dark)
            written.append(path)
    return written


def write_text(path: Path, text: str) -> Path:
    """Write a file, creating its folder if needed; returns its path. Raises UserError if that is impossible."""
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path


def safe_stem(name: str) -> str:
    """The name reduced to letters, digits, `.`, `_` and `-`, so that it is never a path."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).lstrip(".-") or "run"
