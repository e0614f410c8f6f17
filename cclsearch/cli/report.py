"""`ccl-search report RUN...`: an HTML page and charts of one search, or a comparison of several."""

from __future__ import annotations

import argparse
from pathlib import Path

from cclsearch.analysis.report_pages import build_page, draw_pareto_charts
from cclsearch.cli.output import say
from cclsearch.core.errors import UserError
from cclsearch.report.page import write_report
from cclsearch.run.catalog import LAST, find_run, list_runs, runs_folder
from cclsearch.run.folder import Run, load_run, load_runs


def run(args: argparse.Namespace) -> None:
    if args.all and args.run:
        raise UserError(f"--all includes every run: give either --all or {' '.join(args.run)}")
    named = dict.fromkeys(find_run(name, args.runs) for name in args.run or [LAST]) if not args.all else {}
    runs = _load_all(args.runs) if args.all else [load_run(folder) for folder in named]
    pages = [build_page(run) for run in runs]
    folder = runs[0].folder if len(runs) == 1 else runs_folder(args.runs)
    written = write_report(
        pages, args.out or folder / "report.html", png=not args.no_png, dark=args.dark, extra=draw_pareto_charts(runs)
    )
    say(f"report:   {written[0]}")
    if len(written) > 1:
        say(f"charts:   {len(written) - 1} in {written[1].parent}")


def _load_all(chosen: Path | None) -> list[Run]:
    """Every run of the project; an unreadable one is skipped with a note."""
    runs = list(load_runs(list_runs(chosen), lambda name, error: say(f"note: {name} is skipped: {error}")))
    if not runs:
        start = "start one with `ccl-search run --workload wl2 --budget 15`"
        raise UserError(f"there are no runs in {str(runs_folder(chosen))!r} yet; {start}")
    return runs
