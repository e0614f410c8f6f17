"""`ccl-search accelerators`: the known accelerators, or all facts about one, with the sources of the numbers."""

from __future__ import annotations

import argparse
import json
import textwrap

from cclsearch.card.hardware import Accelerator, find_accelerator, find_candidates, load_accelerators
from cclsearch.cli import EXIT_OK

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
    width = max(len(chip.name) for chip in chips)
    rates = ("bf16", "fp8", "fp4")
    print(f"{'':<{width}}  {'GiB':>6}  {'GB/s':>5}  {'bf16':>7}  {'fp8':>7}  {'fp4':>7}  scale-up  scale-out  domain")
    for chip in chips:
        cells = [f"{chip.peak_flops[r] / TERA:>7g}" if r in chip.peak_flops else f"{'-':>7}" for r in rates]
        sizes = "/".join(f"{size:g}" for size in chip.sizes_gib)
        domain = chip.scale_up_domain or ("slice" if chip.kind == "tpu" else "node")
        links = f"{chip.scale_up_gbps:>8g}  {chip.scale_out_gbps:>9g}  {domain:>6}"
        mark = "  nominal" if chip.nominal else ""
        print(f"{chip.name:<{width}}  {sizes:>6}  {chip.memory_gb_per_s:>5g}  {'  '.join(cells)}  {links}{mark}")
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
