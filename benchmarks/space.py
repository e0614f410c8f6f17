"""Time to enumerate and filter a million raw combinations of knob values (goal: under one second).

.venv/bin/python benchmarks/space.py
"""

from __future__ import annotations

import statistics
import time

from cclsearch.card.load import load_card
from cclsearch.card.model import KnobDeclaration
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework

REPEATS = 7


def main() -> None:
    """Time wl2 and wl7 with enough additional knobs for over a million raw combinations."""
    for workload, extra in (
        ("wl2", ("virtual_pipeline", "nccl_algo", "nccl_proto", "overlap_grad_reduce")),
        ("wl7", ()),
    ):
        card = load_card(workload)
        framework = load_framework(card.framework)
        optional = [knob for name in extra if (knob := framework.find_optional(name)) is not None]
        knobs = [KnobDeclaration(name=knob.name, choices=knob.resolve(card).choices) for knob in optional]
        if not knobs:
            knobs = [KnobDeclaration(name="nccl_algo", choices=("default", "Ring", "Tree", "CollnetChain"))]
        knobs.append(KnobDeclaration(name="buffer_mib", choices=(4, 8, 16, 32)))
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            space = build_space(card, framework, knobs)
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        print(
            f"{workload}: {space.num_raw} raw combinations, {len(space)} in the search space,"
            f" {1e3 * seconds:.1f} ms (median of {REPEATS})"
        )


if __name__ == "__main__":
    main()
