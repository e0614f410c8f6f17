"""`ccl-search show RUN TRIAL`: everything known about one trial."""

from __future__ import annotations

import argparse
import json

from cclsearch.cli.output import say
from cclsearch.report.launch_form import describe_launch, launch_as_json
from cclsearch.report.terminal import describe_trial_in_full, trial_as_json
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import load_run

LOG_LINES = 15


def run(args: argparse.Namespace) -> None:
    loaded = load_run(find_run(args.run, args.runs))
    trial = loaded.find_trial(args.trial)
    if args.json:
        print(json.dumps({**trial_as_json(loaded, trial), "launch": launch_as_json(loaded.spec, trial.config)}))
    else:
        lines = describe_trial_in_full(loaded, trial, log_lines=LOG_LINES)
        say(*lines, *describe_launch(loaded.spec, trial.config))
