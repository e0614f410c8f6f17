"""`ccl-search tell`: the result of a trial of `ccl-search ask`, or of a configuration that was measured without it."""

from __future__ import annotations

import argparse
import json

from cclsearch.core.errors import UserError
from cclsearch.launch.in_process import read_told
from cclsearch.loop.told import tell
from cclsearch.report.figures import find_figure
from cclsearch.report.terminal import result_text
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import load_run


def run(args: argparse.Namespace) -> None:
    """Record it, and print what was judged as JSON."""
    if (args.trial is None) == (args.config is None):
        raise UserError("name either the trial that was asked for, or --config with what was measured")
    folder = find_run(args.run, args.runs)
    spec = load_run(folder).spec
    trial = tell(folder, args.trial or args.config, read_told(spec.card, args.value, args.metric, args.failed))
    best = load_run(folder).state.best
    result = result_text(trial, find_figure(spec), as_data=True)
    print(json.dumps({"run": folder.name, "trial": trial.number, "result": result, "best": best and best.number}))
