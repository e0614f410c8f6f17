"""`ccl-search claims`: what CCL-Bench's paper claims, as a table and a picture of your evidence."""

from __future__ import annotations

import argparse

import orjson

from cclsearch.analysis.frameworks import show_frameworks
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line, plain
from cclsearch.report.page import check_picture, write_picture
from cclsearch.trace.claims import show_claim


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 if every source gave a result, 1 if some did not."""
    check_picture(args.picture)
    if args.claim == "frameworks":
        shown = show_frameworks(args.source, args.limit, args.runs)
    elif args.limit:
        raise UserError(f"--limit is for `claims frameworks`, not for `claims {args.claim}`")
    else:
        shown = show_claim(args.claim, args.source, workers=args.workers)
    if args.json:
        print(orjson.dumps(shown.data).decode())
    else:
        print(plain(shown.text))
        print("".join(plain(f"note: {name}: {one_line(why)}\n") for name, why in shown.missing.items()), end="")
    if args.picture and shown.chart is not None:
        write_picture(shown.chart, args.picture)
        print(f"wrote {args.picture}") if not args.json else None
    return 1 if shown.missing or not shown.num_found else 0
