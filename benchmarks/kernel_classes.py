"""Prints how many of the kernel names in tests/kernel_names.csv get the class that their source states.

    python benchmarks/kernel_classes.py [NAMES.csv]

Every set of names was labeled before the table was run on it. The table was written from `dev`; it was scored on
`held`, later on `third`, and then on `fourth`, each time before the mistakes were corrected (kernel_classes.md).
"""

from __future__ import annotations

import csv
import sys
import time
from collections import Counter
from pathlib import Path

from cclsearch.trace.kernel_classes import KernelClasses, load_classes

NAMES = Path(__file__).parent.parent / "tests" / "kernel_names.csv"


def main(arguments: list[str]) -> int:
    """Print the score of each half, the wrong names, and the time to classify all."""
    with Path(arguments[0] if arguments else NAMES).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    table = load_classes()
    fresh = KernelClasses(table.rules, table.fingerprint)
    started = time.perf_counter()
    found = [fresh.find(row["name"]) for row in rows]
    took = time.perf_counter() - started
    for half in dict.fromkeys(row["half"] for row in rows):
        right = [kind == row["class"] for row, kind in zip(rows, found, strict=True) if row["half"] == half]
        print(f"{half}: {sum(right)} of {len(right)} names right ({sum(right) / max(len(right), 1):.1%})")
    by_class = Counter(row["class"] for row in rows)
    right_by_class = Counter(row["class"] for row, kind in zip(rows, found, strict=True) if row["class"] == kind)
    for name, count in by_class.most_common():
        print(f"  {name}: {right_by_class[name]} of {count}")
    for row, kind in zip(rows, found, strict=True):
        if row["class"] != kind:
            print(f"  {row['class']} taken for {kind}: {row['name'][:110]} ({row['source']})")
    print(f"{len(table.rules)} patterns; {1e6 * took / max(len(rows), 1):.0f} us for each distinct name")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
