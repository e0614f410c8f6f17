"""`ccl-search ui`: the runs of the project in a browser, on this machine only, until Ctrl-C."""

from __future__ import annotations

import argparse

from cclsearch.core.errors import UserError
from cclsearch.run.catalog import runs_folder
from cclsearch.ui.app import serve_runs
from cclsearch.ui.guard import Permissions


def run(args: argparse.Namespace) -> None:
    runs = runs_folder(args.runs)
    if not runs.is_dir():
        raise UserError(f"{str(runs)!r} is not a folder: name the folder of runs with --runs, or start a search first")
    allowed = Permissions(notes=args.allow_notes or args.allow_start, start=args.allow_start)
    serve_runs(
        runs, args.port, allowed, lambda address: print(f"{runs}: {address}  (Ctrl-C ends it, no search)", flush=True)
    )
    print()
