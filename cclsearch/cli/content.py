"""Actions that `launcher`, `card`, `objective` and `policy` share: list the items of a folder, show one, copy one."""

from __future__ import annotations

import argparse

from cclsearch.checks.content import copy_item, list_items, read_item
from cclsearch.cli import EXIT_OK
from cclsearch.cli.output import show
from cclsearch.core.text import format_table, plain

NEXT = {
    "launchers": "fill in what your cluster needs, then  ccl-search launcher check {name}",
    "workloads": "change what differs, then  ccl-search card check {name}",
    "objectives": "change what it ranks by, then  ccl-search run --workload wl2 --objective {name}",
    "policies": "change what it proposes, then  ccl-search policy test {name}",
}
"""Content folder -> instruction for a copy."""
NEW = {"training": "wl2"}
"""Task -> the card that `new` copies, if it has another name."""


def run_content(folder: str, args: argparse.Namespace, argument: str) -> int:
    """Run the action `list`, `show` or `copy` on that content folder; `argument` names the attribute with the item's
    name.
    """
    if args.action == "list":
        items = list_items(folder)
        facts = ("name", "kind", "description", "is_shipped")
        data = [{fact: getattr(item, fact) for fact in facts} | {"path": str(item.path)} for item in items]
        places = ("" if item.is_shipped else f"  [{item.path}]" for item in items)
        rows = [(i.name, i.kind, f"{i.description}{where}") for i, where in zip(items, places, strict=True)]
        show(data, [format_table((), rows)], as_json=args.json)
    elif args.action == "show":
        print(plain(read_item(folder, getattr(args, argument))), end="")
    else:
        name = getattr(args, argument)
        path = copy_item(folder, NEW.get(name, name) if args.action == "new" else name, args.new_name)
        print(f"{plain(str(path))}\nnext: {NEXT[folder].format(name=args.new_name)}")
    return EXIT_OK
