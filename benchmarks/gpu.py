"""Checks the whole product on the one GPU of this machine, in under ten minutes and without internet.

    python benchmarks/gpu.py [--out FOLDER]          an NVIDIA or AMD GPU and a torch that sees it; JAX if installed
    python benchmarks/gpu.py --device cpu --small    the same in a small form on a CPU, as the tests run it

Searches the micro-batch, checkpointing, compilation, optimizer and attention backend of a small GPT beside the
exhaustive best, and compares what the trace toolkit says of real traces with counts made here. Prints a table; writes
`gpu.json`, `gpu.md`, the traces and the measured table to FOLDER (`ccl-search bench FOLDER` replays searches of it).
Exit code 1 if a check fails, 2 without a GPU. What it needs besides torch: `gpu_bundle.py`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SITE = HERE.parent / ".gpu-site" / f"{sys.version_info.major}.{sys.version_info.minor}"
sys.path[:0] = [str(path) for path in (HERE.parent, SITE) if path.is_dir()]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
os.environ.setdefault("OMP_NUM_THREADS", "1")

LIMIT_S = 540.0
"""No part of the full form starts later than this."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--small", action="store_true", help="few and small configurations")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="folder of results (default: gpu-results)"
    )
    parser.add_argument(
        "--table-s", type=float, default=200.0, metavar="S", help="most seconds for the table (default: 200)"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="machine is always done; repeatable"
    )
    args = parser.parse_args()
    try:
        import torch

        import cclsearch.trace.score  # noqa: F401
    except ImportError as error:
        print(f"{error}: install torch, and the rest with benchmarks/gpu_bundle.py", file=sys.stderr)
        return 2
    if args.device == "gpu" and not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was checked (--device cpu --small runs on a CPU)", file=sys.stderr)
        return 2
    return run_parts(args)


def run_parts(args: argparse.Namespace) -> int:
    """Run all parts in a project folder of their own and write the results; return the exit code."""
    from gpu_machine import describe_machine, make_project
    from gpu_report import Report
    from gpu_search import measure_table, search_for_real
    from gpu_traces import check_energy, check_jax, check_one_rank, check_two_ranks

    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + (3600.0 if args.small else LIMIT_S)
    report = Report(small=args.small, table_s=args.table_s, ends_s=ends_s)
    parts: dict[str, Any] = {
        "table": measure_table,
        "search": search_for_real,
        "one rank": check_one_rank,
        "two ranks": check_two_ranks,
        "energy": check_energy,
        "JAX": check_jax,
    }
    with tempfile.TemporaryDirectory(prefix="ccl-gpu-") as scratch:
        report.section_name = "machine"
        bench = make_project(Path(scratch), out, report, device=args.device, small=args.small)
        report.run_part("machine", partial(describe_machine, bench))
        for name, run in parts.items():
            if not args.only or name in args.only:
                report.run_part(name, partial(run, bench))
        os.chdir(out)
    title = f"# The product on {report.figures.get('device', platform.machine())}\n\n"
    (out / "gpu.json").write_text(report.to_json(), encoding="utf-8")
    (out / "gpu.md").write_text(title + report.to_markdown(), encoding="utf-8")
    print(f"\n{report.to_markdown()}\n{out / 'gpu.json'}")
    made = sum(check.ok is not None for check in report.checks)
    print(f"{made} checks, {report.num_failed} failed, {sum(report.seconds.values()):.0f} s")
    return 1 if report.num_failed or not made else 0


if __name__ == "__main__":
    sys.exit(main())
