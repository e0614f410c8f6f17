"""`ccl-search resume`: go on with a search that was stopped or killed."""

from __future__ import annotations

import argparse

from cclsearch.cli.arguments import add_run, positive_int, whole_number
from cclsearch.cli.run import add_output_arguments

EXAMPLE = "ccl-search resume wl2-20260101-120000-ab12 --budget 25"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "-b", "--budget", type=positive_int, default=0, metavar="N", help="raise the budget to N trials in all"
    )
    parser.add_argument("--confirm", type=whole_number, default=0, metavar="N", help="run N finalists again")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from cclsearch.cli.drive import drive_search
    from cclsearch.runs_folder import find_run

    return drive_search(find_run(args.run, args.runs), args, budget=args.budget, confirm=args.confirm)
