"""`ccl-search accelerators`: the known accelerators, or all facts about one, with the sources of the numbers."""

from __future__ import annotations

import argparse
import json
import textwrap

from cclsearch.card.hardware import Accelerator, find_accelerator, find_candidates, load_accelerators
from cclsearch.cli import EXIT_OK
from cclsearch.core.table import format_table

TERA = 1e12


def run(args: argparse.Namespace) -> int:
    """Print the table, or the accelerators of one name; a name that several sizes share shows all of them."""
    known = list(load_accelerators().values())
    chosen = known if args.name is None else find_candidates(args.name) or [find_accelerator(args.name)]
    if args.json:
        print(json.dumps([chip.model_dump() for chip in chosen]))
    elif args.name is None:
        _print_table(chosen)
    else:
        for chip in chosen:
            _print_one(chip)
    return EXIT_OK


def _print_table(chips: list[Accelerator]) -> None:
    rates = ("bf16", "fp8", "fp4")
    rows = [
        (
            chip.name,
            "/".join(f"{size:g}" for size in chip.sizes_gib),
            f"{chip.memory_gb_per_s:g}",
            *(f"{chip.peak_flops[rate] / TERA:g}" if rate in chip.peak_flops else "-" for rate in rates),
            f"{chip.scale_up_gbps:g}",
            f"{chip.scale_out_gbps:g}",
            chip.scale_up_domain or ("slice" if chip.kind == "tpu" else "node"),
            "nominal" if chip.nominal else "",
        )
        for chip in chips
    ]
    heads = ("", "GiB", "GB/s", *rates, "scale-up", "scale-out", "domain", "")
    print(format_table(heads, rows, right=range(1, 9)))
    print(
        "\nTFLOP/s dense; links in Gbit/s per accelerator and direction. `ccl-search accelerators NAME` shows the rest."
    )


def _print_one(chip: Accelerator) -> None:
    rates = ", ".join(f"{dtype} {rate / TERA:g}" for dtype, rate in chip.peak_flops.items())
    domain = f", {chip.scale_up_domain} accelerators per domain" if chip.scale_up_domain else ""
    print(f"{chip.name} ({chip.kind}{', nominal' if chip.nominal else ''})")
    print(f"  also       {', '.join(chip.aliases)}")
    print(f"  memory     {' or '.join(f'{size:g}' for size in chip.sizes_gib)} GiB, {chip.memory_gb_per_s:g} GB/s")
    print(f"  peak rates {rates} TFLOP/s, dense")
    print(f"  scale-up   {chip.scale_up_gbps:g} Gbit/s per direction, {chip.scale_up_latency_us:g} us{domain}")
    print(f"  scale-out  {chip.scale_out_gbps:g} Gbit/s per direction, {chip.scale_out_latency_us:g} us")
    if chip.slices:
        print(f"  slices     {', '.join('x'.join(map(str, shape)) for shape in chip.slices)}")
    lines = textwrap.wrap(chip.source, 100) or [""]
    print(f"  source     {lines[0]}")
    for line in lines[1:]:
        print(f"             {line}")
