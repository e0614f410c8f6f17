"""`ccl-search sweep`: one search for a whole Pareto front; each trial is scored at every weight."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from cclsearch.cli import EXIT_OK
from cclsearch.cli.arguments import add_runs_folder, positive_int
from cclsearch.cli.run import add_drive_arguments, add_search_arguments, add_warm_starts, make_request, naming_settings

EXAMPLE = "ccl-search sweep --workload wl2 --objective composite --weights 0:1:0.1 --budget 40"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--workload", required=True, metavar="NAME", help="workload card: a name, or a YAML file")
    parser.add_argument("-b", "--budget", type=positive_int, default=40, metavar="N", help="trials (default: 40)")
    parser.add_argument("--weights", metavar="A:B:STEP", help="weights of the first metric (default: 0:1:0.1)")
    add_search_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="show search space and first proposals; run nothing")
    add_drive_arguments(parser)
    add_runs_folder(parser)


def run(args: argparse.Namespace) -> int:
    from cclsearch.cli.drive import drive_search
    from cclsearch.run.catalog import name_run, runs_folder
    from cclsearch.search.sweep import JOINED_FOLDER, create_sweep, plan_sweep
    from cclsearch.stats.pareto import parse_weights

    weights = parse_weights(args.weights) if args.weights is not None else None
    runs = runs_folder(args.runs)
    if args.dry_run:
        from cclsearch.cli.dry_run import show_plan

        with tempfile.TemporaryDirectory() as joined:
            with naming_settings(args):
                planned = plan_sweep(make_request(args), args.objective, weights, Path(joined))
            return show_plan(add_warm_starts(planned.plan, args), runs, as_json=args.json)
    with naming_settings(args):
        planned = plan_sweep(make_request(args), args.objective, weights, runs.absolute() / JOINED_FOLDER)
    folder = create_sweep(replace(planned, plan=add_warm_starts(planned.plan, args)), runs)
    code = drive_search(folder, args)
    if code == EXIT_OK and not (args.json or args.quiet):
        from cclsearch.analysis.pareto import gather_pareto_page
        from cclsearch.cli.pareto import print_pareto
        from cclsearch.run.folder import load_run

        print_pareto(gather_pareto_page([load_run(folder)]))
        print(f"charts: ccl-search pareto {name_run(folder, args.runs)}")
    return code
