"""`ccl-search ask` and `ccl-search tell`: a search whose trials a script measures, as with Optuna's ask and tell."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from cclsearch.cli import EXIT_FAILED, EXIT_OK, make_parser
from cclsearch.cli.run import make_request
from cclsearch.core.errors import UserError
from cclsearch.loop.drive import start_run
from cclsearch.loop.told import ask
from cclsearch.plan.plan import plan_search
from cclsearch.run.catalog import find_run, runs_folder


def run(args: argparse.Namespace) -> int:
    """Print the next trial as JSON; return 1 if there is none."""
    if args.run is not None and args.workload is not None:
        raise UserError(f"--workload {args.workload}: the inputs of {args.run} are frozen; leave one of both out")
    if args.run is None:
        usual = vars(make_parser("run").parse_args([]))
        request = make_request(argparse.Namespace(**{**usual, **vars(args), "llm": "none"}))
        spec = plan_search(replace(request, launcher=None, threads=args.parallel)).spec
        folder, budget = start_run(spec, runs_folder(args.runs)), 0
    else:
        folder, budget = find_run(args.run, args.runs), args.budget or 0
    trial, why = ask(folder, budget)
    if trial is None:
        print(json.dumps({"run": folder.name, "trial": None, "why": why}))
        return EXIT_FAILED
    expected = {**trial.expects.metrics, "fits": trial.expects.fits}
    print(json.dumps({"run": folder.name, "trial": trial.number, "config": dict(trial.config), "expected": expected}))
    return EXIT_OK
