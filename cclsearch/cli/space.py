"""`ccl-search space`: the search space of a workload, and which rule rejects a configuration."""

from __future__ import annotations

import argparse

from cclsearch.analysis.space_listing import answer_config, list_space
from cclsearch.cli.arguments import take
from cclsearch.cli.output import show
from cclsearch.core.errors import UserError
from cclsearch.plan.subject import Asked, find_subject
from cclsearch.plan.target import read_names


def run(args: argparse.Namespace) -> int:
    """Print the space, or the verdicts on one configuration; return 1 if that is not in the space."""
    if (args.action == "explain") != (args.config is not None):
        raise UserError("`space explain` needs --config (for example tp=2,dp=8), and `space list` does not accept it")
    if args.learn_from and args.config is None:
        raise UserError("--learn-from adapts the prediction of one configuration: `ccl-search space explain --config`")
    if args.launch and args.config is None:
        raise UserError("--launch needs one configuration: `ccl-search space explain ... --config tp=2,... --launch`")
    subject = find_subject(read_asked(args))
    if args.action == "explain":
        more = {"sources": args.learn_from, "runs": args.runs}
        answer = answer_config(subject, args.config, with_launch=args.launch, **more)
        show(answer.as_data(), answer.as_lines(), as_json=args.json)
        return 0 if answer.is_legal else 1
    listing = list_space(subject)
    lines = listing.as_lines(num_rows=args.rows, with_sources=args.rules, replays=args.workload is not None)
    show(listing.as_data(num_rows=args.rows), lines, as_json=args.json)
    return 0


def read_asked(args: argparse.Namespace) -> Asked:
    """Return the options that name a workload, a recording or a run, and change a workload."""
    workload, recording = read_names(args.workload, args.recording, args.launcher)
    return Asked(
        workload=workload,
        recording=recording,
        overlays=args.overlay,
        sets=args.set,
        knobs=args.knob,
        **take(args, "run", "runs", "framework", "launcher", "tuning_config", "use_fewer"),
    )
