"""Prints figures of ccl-search beside those of other tools on the same traces, and where they differ.

    python benchmarks/agreement.py FOLDER... [--hta PYTHON] [--tracelens CHECKOUT] [--xprof PYTHON]

FOLDER has one folder of traces per run. PYTHON is an interpreter with the package HolisticTraceAnalysis (0.5) or xprof
(2.24), CHECKOUT a folder with TraceLens/TreePerf/gpu_event_analyser.py. Each tool gets a table of its own. HTA covers
the whole file of Kineto without its last profiler step, and rounds times to microseconds; its cells have three figures
over the whole file: exact, cut and rounded as HTA does, and HTA's own.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agreement_tracelens
import agreement_xprof

from cclsearch.trace.events import Kind
from cclsearch.trace.intervals import intersect_spans, merge_spans, total_ns
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import RankView, TraceView

HEAD = ["| trace | rank | idle, % | compute, % | overlap, % | differ |", "| --- " * 6 + "|"]
MAX_RANKS = 8
TOLERANCE = 0.015
"""Points of percent: HTA prints two decimals, each rounded."""
KINDS = {"compute": Kind.COMPUTE, "comm": Kind.COMM}
HTA = """
import json, logging, sys, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
try:
    trace = TraceAnalysis(trace_files={i: name for i, name in enumerate(sys.argv[1:])})
    found = trace.get_temporal_breakdown(visualize=False).to_dict("list")
    found["overlap"] = trace.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].tolist()
    print(json.dumps(found))
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"[:90]}))
"""


def run_hta(python: str, files: list[Path]) -> dict[str, Any]:
    """Return HTA's breakdown and overlap by rank, or `error`."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([python, "-c", HTA, *map(str, files)], capture_output=True, text=True, cwd=folder)
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-90:]}
    return found


def measure(view: RankView, *, like_hta: bool) -> dict[str, float]:
    """Return shares of the whole file in percent: idle, compute, other work, and overlap of communication.

    `like_hta`: without what the last of several profiler steps launched, starts rounded up and ends down to 1 us.
    """
    table, rows = view.table, view.device_rows
    profiled = [number for number, step in enumerate(table.steps) if step.name.startswith("ProfilerStep")]
    start, end = table.ts_ns[rows], table.ts_ns[rows] + table.dur_ns[rows]
    if like_hta:
        if len(profiled) > 1:
            rows = rows[table.step_id[rows] != profiled[-1]]
        base = table.base_ns % 1000
        start = -((-(table.ts_ns[rows] + base)) // 1000) * 1000
        end = (table.ts_ns[rows] + table.dur_ns[rows] + base) // 1000 * 1000
    kind = table.kind[rows]
    spans = {name: merge_spans(start[kind == of], end[kind == of]) for name, of in KINDS.items()}
    busy = merge_spans(start, end)
    span = float(end.max() - start.min())
    both = total_ns(intersect_spans(spans["compute"], spans["comm"]))
    communicated = total_ns(spans["comm"])
    return {
        "idle": 100 * (1 - total_ns(busy) / span),
        "compute": 100 * total_ns(spans["compute"]) / span,
        "overlap": 100 * both / communicated if communicated else math.nan,
    }


def compare(folder: Path, python: str) -> list[str]:
    """Return the rows of the table for one run, one for each rank."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))[:MAX_RANKS]
    trace = TraceView(read_traces(folder, use_cache=False))
    if not files or not any(view.table.format == "kineto" for view in trace.ranks.values()):
        return []
    found = run_hta(python, files)
    if "error" in found:
        return [f"| {folder.name} | | not read: {found['error']} | | |"]
    rows = []
    for rank, view in list(trace.ranks.items())[:MAX_RANKS]:
        at = found["rank"].index(rank)
        theirs = {"idle": found["idle_time_pctg"][at], "compute": found["compute_time_pctg"][at]}
        theirs["overlap"] = found["overlap"][at]
        exact, alike = measure(view, like_hta=False), measure(view, like_hta=True)
        columns = [" / ".join(f"{one[name]:.2f}" for one in (exact, alike, theirs)) for name in theirs]
        columns = [column.replace("nan / nan / nan", "no communication") for column in columns]
        far = [n for n in theirs if not math.isnan(theirs[n]) and abs(alike[n] - theirs[n]) > TOLERANCE]
        far += [n for n in theirs if math.isnan(theirs[n]) != math.isnan(alike[n])]
        rows.append(f"| {folder.name} | {rank} | {' | '.join(columns)} | {', '.join(far) or 'agree'} |")
    return rows


def main(arguments: list[str]) -> int:
    """Print a table for each tool, with a row for each rank of each run (xprof: for each figure of each file)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--hta", metavar="PYTHON")
    parser.add_argument("--tracelens", type=Path, metavar="CHECKOUT")
    parser.add_argument("--xprof", metavar="PYTHON")
    args = parser.parse_args(arguments)
    tools: list[tuple[list[str], Callable[[Path, Any], list[str]], Any]] = [
        (HEAD, compare, args.hta),
        (agreement_tracelens.HEAD, agreement_tracelens.compare, args.tracelens),
        (agreement_xprof.HEAD, agreement_xprof.compare, args.xprof),
    ]
    for head, rows_of, tool in tools:
        if tool is None:
            continue
        print("\n".join(head))
        for folder in sorted(path for parent in args.folders for path in parent.iterdir() if path.is_dir()):
            for row in rows_of(folder, tool):
                print(row, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
