"""`ccl-search report RUN...`: one page, and pictures, of a search or of several beside each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from cclsearch.cli import EXIT_OK
from cclsearch.cli.arguments import add_runs_folder

EXAMPLE = "ccl-search report last\n  ccl-search report --all --out ranking.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="*", help="names or folders of runs (default: the latest)")
    parser.add_argument("--all", action="store_true", help="every run of the project, ranked")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page (default: report.html in the run's folder)")
    parser.add_argument("--no-png", action="store_true", help="write the page only")
    parser.add_argument(
        "--dark", action="store_true", help="pictures on dark paper (the page follows the reader's choice)"
    )
    add_runs_folder(parser)


def run(args: argparse.Namespace) -> int:
    from cclsearch.errors import UserError
    from cclsearch.report.write import write_report
    from cclsearch.reporting import build_front_charts, build_page
    from cclsearch.run_folder import load_run
    from cclsearch.runs_folder import find_run, list_runs, runs_folder
    from cclsearch.text import plain

    folders = list_runs(args.runs) if args.all else [find_run(name, args.runs) for name in args.run or ["last"]]
    folders = list(dict.fromkeys(folders))
    if not folders:
        raise UserError(f"there is no run in {str(runs_folder(args.runs))!r} yet: `ccl-search run` makes one")
    runs = [load_run(folder) for folder in folders]
    pages = [build_page(run) for run in runs]
    place = folders[0] if len(folders) == 1 else runs_folder(args.runs)
    written = write_report(
        pages, args.out or place / "report.html", png=not args.no_png, dark=args.dark, extra=build_front_charts(runs)
    )
    print(plain(f"report:   {written[0]}"))
    if len(written) > 1:
        print(plain(f"pictures: {len(written) - 1} in {written[1].parent}"))
    return EXIT_OK
