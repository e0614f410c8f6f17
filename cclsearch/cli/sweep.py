"""`ccl-search sweep`: one search for a whole Pareto front; each trial is scored at every weight."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from cclsearch.cli import EXIT_OK
from cclsearch.cli.drive import drive_in_terminal
from cclsearch.cli.run import make_request, naming_settings, tell_llm
from cclsearch.loop.sweep import JOINED_FOLDER, create_sweep, plan_sweep
from cclsearch.run.catalog import name_run, runs_folder
from cclsearch.run.folder import load_run
from cclsearch.stats.pareto import parse_weights
from cclsearch.tracking.webhook import choose_webhook


def run(args: argparse.Namespace) -> int | None:
    choose_webhook(args.notify)
    weights = parse_weights(args.weights) if args.weights is not None else None
    runs = runs_folder(args.runs)
    if args.dry_run:
        from cclsearch.cli.dry_run import show_plan

        with tempfile.TemporaryDirectory() as joined:
            with naming_settings(args):
                plan, _ = plan_sweep(make_request(args), args.objective, weights, Path(joined))
            show_plan(plan, runs, as_json=args.json)
        return None
    with naming_settings(args):
        plan, sweep = plan_sweep(make_request(args), args.objective, weights, runs.absolute() / JOINED_FOLDER)
    tell_llm(plan.spec, args)
    folder = create_sweep(plan, sweep, runs)
    code = drive_in_terminal(folder, args)
    if code == EXIT_OK and not (args.json or args.quiet):
        from cclsearch.analysis.pareto import gather_pareto_page
        from cclsearch.cli.pareto import print_pareto

        print_pareto(gather_pareto_page([load_run(folder)]))
        print(f"charts: ccl-search pareto {name_run(folder, args.runs)}")
    return code
