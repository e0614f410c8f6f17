"""`ccl-search objective`: list, show or copy objectives."""

from __future__ import annotations

import argparse

from cclsearch.cli.content import run_content


def run(args: argparse.Namespace) -> int:
    return run_content("objectives", args, "objective")
