"""`ccl-search policy test`: runs a policy program on workloads."""

from __future__ import annotations

import argparse
import json

from cclsearch.cli.arguments import add_use_fewer

EXAMPLE = """ccl-search policy test dense
  ccl-search policy test policies/moe.py --workload wl5 wl7"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    test = actions.add_parser(
        "test",
        help="run a program on workloads: the configuration that it picks, or why it is rejected",
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    test.add_argument("policy", metavar="FILE", help="a file, or the name of a policy")
    test.add_argument("-w", "--workload", nargs="+", default=[], metavar="NAME", help="workloads (default: all)")
    add_use_fewer(test)
    test.add_argument("--json", action="store_true", help="print JSON (one object per workload)")


def run(args: argparse.Namespace) -> int:
    from cclsearch.checks.policy import check_policy, describe_verdict, read_program
    from cclsearch.core.content import find_content, list_content

    program = read_program(find_content("policies", args.policy, ".py"))
    workloads = args.workload or list_content("workloads", ".yaml")
    verdicts = check_policy(program, workloads, use_fewer=args.use_fewer)
    for verdict in verdicts:
        if args.json:
            facts = {"workload": verdict.workload, "config": dict(verdict.config) if verdict.config else None}
            more = {"fits": verdict.fits, "slower_than_best_prediction": verdict.slower, "note": verdict.note}
            print(json.dumps({**facts, "legal": verdict.is_legal, "reasons": list(verdict.reasons), **more}))
        else:
            print("\n".join(describe_verdict(verdict)))
    return 0 if all(verdict.is_legal for verdict in verdicts) else 1
