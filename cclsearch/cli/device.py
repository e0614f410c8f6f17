"""`ccl-search device probe`: what this machine's device does, measured in less than a minute, for `hardware.yaml`."""

from __future__ import annotations

import argparse
import re

import orjson

from cclsearch.checks.probe import DTYPES, DeviceProbe, probe_device
from cclsearch.cli.output import say
from cclsearch.core.errors import UserError
from cclsearch.core.text import plain


def run(args: argparse.Namespace) -> None:
    """Print the measurements, and an entry for the project's `hardware.yaml`."""
    import yaml

    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,59}", args.name):
        raise UserError(f"--name must be lower-case letters, digits, dots and dashes, not {args.name!r}")
    found = probe_device(with_collectives=not args.no_collectives)
    if args.json:
        print(orjson.dumps(found.model_dump(mode="json") | {"hardware_yaml": found.as_entry(args.name)}).decode())
        return
    say(*_lines(found))
    print("\n# for a project's hardware.yaml (docs/accelerators.md); complete scale_out_gbps with your network's\n")
    print(plain(yaml.safe_dump(found.as_entry(args.name), sort_keys=False, width=110)), end="")


def _lines(found: DeviceProbe) -> list[str]:
    lines = [f"{found.name}: {found.memory_gib:.4g} GiB"]
    for dtype in DTYPES:
        rates = [f"{gemm.size}: {gemm.flops_per_s / 1e12:.3g}" for gemm in found.gemms if gemm.dtype == dtype]
        lines += [f"  {dtype} products, TFLOP/s by size: {', '.join(rates)}"] if rates else []
    lines.append(f"  memory: {found.copy_bytes_per_s / 1e9:.4g} GB/s (copy, read and written)")
    lines.append(f"  launch: {found.launch_us:.3g} us")
    if found.all_reduce_gbps is None or found.all_reduce_us is None:
        lines.append("  collectives: not measured (one local rank, or --no-collectives)")
    else:
        lines.append(
            f"  all-reduce of {found.ranks} local ranks: {found.all_reduce_gbps:.4g} Gbit/s a rank,"
            f" {found.all_reduce_us:.3g} us for four bytes"
        )
    return lines
