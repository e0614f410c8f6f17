"""`ccl-search accelerators`: the known accelerators, or all facts about one, with the sources of the numbers."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

from cclsearch.card.hardware import Accelerator, find_accelerator, find_candidates, load_accelerators
from cclsearch.cli.output import show
from cclsearch.core.text import format_table

TERA = 1e12


def run(args: argparse.Namespace) -> None:
    """Print the table, or the accelerators of one name; a name that several sizes share shows all of them."""
    known = list(load_accelerators().values())
    chosen = known if args.name is None else find_candidates(args.name) or [find_accelerator(args.name)]
    lines = _list_all(chosen) if args.name is None else (line for chip in chosen for line in _describe_one(chip))
    show([chip.model_dump() for chip in chosen], lines, as_json=args.json)


def _list_all(chips: list[Accelerator]) -> Iterator[str]:
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
    yield format_table(heads, rows, right=range(1, 9))
    yield "\nTFLOP/s dense; links in Gbit/s per accelerator and direction."
    yield "`ccl-search accelerators NAME` shows the rest."


def _describe_one(chip: Accelerator) -> Iterator[str]:
    rates = ", ".join(f"{dtype} {rate / TERA:g}" for dtype, rate in chip.peak_flops.items())
    domain = f", {chip.scale_up_domain} accelerators per domain" if chip.scale_up_domain else ""
    yield f"{chip.name} ({chip.kind}{', nominal' if chip.nominal else ''})"
    yield f"  also       {', '.join(chip.aliases)}"
    yield f"  memory     {' or '.join(f'{size:g}' for size in chip.sizes_gib)} GiB, {chip.memory_gb_per_s:g} GB/s"
    yield f"  peak rates {rates} TFLOP/s, dense"
    yield f"  scale-up   {chip.scale_up_gbps:g} Gbit/s per direction, {chip.scale_up_latency_us:g} us{domain}"
    yield f"  scale-out  {chip.scale_out_gbps:g} Gbit/s per direction, {chip.scale_out_latency_us:g} us"
    if chip.slices:
        yield f"  slices     {', '.join('x'.join(map(str, shape)) for shape in chip.slices)}"
    yield textwrap.fill(chip.source, 113, initial_indent="  source     ", subsequent_indent=" " * 13)
