"""`ccl-search policy`: list, show or copy policy programs, or run one on workloads."""

from __future__ import annotations

import argparse
import json

from cclsearch.checks.policy import check_policy, describe_verdict
from cclsearch.cli.content import run_content
from cclsearch.core.content import list_content
from cclsearch.propose.agent.policy.store import read_policy


def run(args: argparse.Namespace) -> int:
    """Return exit code 0, or 1 if a proposal of the program is not legal."""
    if args.action != "test":
        return run_content("policies", args, "policy")
    program = read_policy(args.policy)
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
