"""`ccl-search best RUN`: the best configuration, with options and job script to run it again."""

from __future__ import annotations

import argparse
import json

from cclsearch.cli import EXIT_FAILED, EXIT_OK
from cclsearch.cli.output import say
from cclsearch.core.job_file import RECORD_BYTES, read_tail
from cclsearch.report.launch_form import describe_launch, launch_as_json
from cclsearch.report.power import describe_power_limit
from cclsearch.report.summary import best_as_json, closest_as_json, summarize_run
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import load_run
from cclsearch.run.trial_folder import SCRIPT_FILE


def run(args: argparse.Namespace) -> int:
    loaded = load_run(find_run(args.run, args.runs))
    best = loaded.state.best
    if args.power_limit is not None:
        say(*describe_power_limit(loaded.spec, loaded.state, args.power_limit))
        return EXIT_OK
    if args.json:
        closest = closest_as_json(loaded.spec, loaded.state)
        without = {"run": loaded.spec.run_id, "trial": None, "closest": closest} if closest else None
        figures = best_as_json(loaded.spec, loaded.state, loaded.folder)
        if figures is not None and best is not None:
            figures["launch"] = launch_as_json(loaded.spec, best.config)
        print(json.dumps(figures or without))
        return EXIT_OK if best else EXIT_FAILED
    say(*summarize_run(loaded.spec, loaded.state, loaded.folder))
    if best is None:
        return EXIT_FAILED
    say(*describe_launch(loaded.spec, best.config))
    script = loaded.trial_folder(best.number) / SCRIPT_FILE
    if loaded.spec.recording is None and script.is_file():
        say(f"job script: {script}\n", read_tail(script, RECORD_BYTES).rstrip())
    return EXIT_OK
