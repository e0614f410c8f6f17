"""`ccl-search sweep-hardware`: a trace or a prediction on other clusters, and what doubling each resource saves."""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson

from cclsearch.analysis.hardware_sweep import HardwareSweep, ask_sweep, sweep_prediction, sweep_trace
from cclsearch.cli.arguments import take
from cclsearch.cli.what_if import print_not_available
from cclsearch.core.errors import UserError
from cclsearch.core.text import plain
from cclsearch.plan.subject import Asked, find_subject
from cclsearch.report.page import check_picture, write_picture
from cclsearch.trace.metric import NotAvailable


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 if there is a result, 1 if the trace does not allow one."""
    check_picture(args.picture)
    try:
        swept = _sweep(args)
    except NotAvailable as error:
        return print_not_available(str(error.reason), error.detail, as_json=args.json)
    if args.picture:
        write_picture(swept.draw(), args.picture)
    text = orjson.dumps(swept.as_data(), option=orjson.OPT_INDENT_2).decode() if args.json else plain(swept.as_text())
    print(text)
    return 0


def _sweep(args: argparse.Namespace) -> HardwareSweep:
    options = take(args, "algorithm", "compress", "base", "ranks")
    asked = ask_sweep(args.cluster, args.accelerator, **options)
    if (args.trace is None) == (args.workload is None):
        raise UserError("give a TRACE or a --workload, and not both")
    if args.workload is None:
        if args.config or args.framework or args.learn_from:
            raise UserError("--config, --framework and --learn-from belong to --workload; a trace has its own")
        folder, domain = Path(args.trace), args.ranks_per_domain
        return sweep_trace(asked, folder, card=args.card, ranks_per_domain=domain, workers=args.workers)
    for option, value in (("--card", args.card), ("--ranks-per-domain", args.ranks_per_domain)):
        if value:
            raise UserError(f"{option} belongs to a trace; a predicted configuration has its own")
    subject = find_subject(Asked(workload=args.workload, framework=args.framework))
    return sweep_prediction(asked, subject, config=args.config, sources=args.learn_from)
