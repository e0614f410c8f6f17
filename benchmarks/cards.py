"""Share of the workload cards in a folder that load without an overlay, by phase, and why the others do not.

    python benchmarks/cards.py FOLDER [--lines]

Counts every YAML file with a `workload` section; files without one are counted apart. A card that loads may leave its
hardware or a number of the work open, which a search must then be given. `--lines` also prints the notes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from cclsearch.card.load import inspect_card, require_stated
from cclsearch.core.errors import UserError
from cclsearch.core.yaml_file import read_yaml


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lines", action="store_true", help="also print what was inferred")
    args = parser.parse_args()
    files = sorted(path for suffix in ("*.yaml", "*.yml") for path in args.folder.rglob(suffix))
    if not files:
        print(f"{args.folder}: no YAML file", file=sys.stderr)
        return 2
    seen: Counter[str] = Counter()
    loaded: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    left_open: Counter[str] = Counter()
    num_open = 0
    others = []
    for path in files:
        try:
            if not isinstance(read_yaml(path).get("workload"), dict):
                others.append(f"{path.name}: no `workload` section")
                continue
        except UserError as error:
            others.append(str(error))
            continue
        report = None
        try:
            report = inspect_card(str(path))
            card = require_stated(report)
        except UserError as error:
            seen[report.task if report else "unreadable"] += 1
            print(f"refused: {error}")
            continue
        seen[card.task] += 1
        loaded[card.task] += 1
        if report.open:
            print(f"open: {path.name} {report.say_open().partition(':')[0]}")
            left_open.update(
                {"work" if problem.field.startswith("workload.data.") else "hardware" for problem in report.open}
            )
            num_open += 1
        shape = [each.source for each in card.inferred if "catalogue of models" in each.source]
        way = shape[0].split(", ", 1)[1].split(" ")[1].rstrip(":") if shape else "stated"
        ways[way] += 1
        for remark in card.remarks if args.lines else ():
            print(f"{path.name}: {remark}")
    for task, number in sorted(seen.items()):
        print(f"{task:<12}{loaded[task]:>4} of {number:<4} load ({loaded[task] / number:.1%})")
    total = sum(seen.values())
    if total:
        print(f"{'all':<12}{sum(loaded.values()):>4} of {total:<4} load ({sum(loaded.values()) / total:.1%})")
        complete = sum(loaded.values()) - num_open
        print(
            f"{'complete':<12}{complete:>4} of {total:<4} ({complete / total:.1%}); the others that load leave open:"
            f" hardware {left_open['hardware']}, a number of the work {left_open['work']}"
        )
        print("shape: " + ", ".join(f"{number} {way}" for way, number in ways.most_common()))
    print(f"not cards: {len(others)}")
    for line in others:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
