"""`ccl-search tag RUN TAG...`: words by which a run is found again."""

from __future__ import annotations

import argparse

from cclsearch.cli.output import show
from cclsearch.core.errors import UserError
from cclsearch.run.annotations import add_tags, read_annotations
from cclsearch.run.catalog import find_run
from cclsearch.run.spec import read_spec


def run(args: argparse.Namespace) -> None:
    folder = find_run(args.run, args.runs)
    read_spec(folder)  # an unreadable run is named as by every other command
    if args.remove and not args.tag:
        raise UserError("TAG is missing: which tags are to be removed")
    if args.tag:
        add_tags(folder, args.tag, remove=args.remove)
    tags = read_annotations(folder).tags
    show(tags, [f"{folder.name}: {', '.join(tags) or 'no tags'}"], as_json=args.json)
