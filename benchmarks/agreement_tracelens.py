"""Figures of ccl-search beside those of TraceLens (AMD-AGI/TraceLens) on the same Kineto traces, for `agreement.py`.

TraceLens is not on PyPI; of its code, `GPUEventAnalyser` (the breakdown of the GPU's timeline over the whole file) runs
by itself. It counts memsets as computation, and knows communication by `nccl` in a kernel's name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.trace.events import Kind
from cclsearch.trace.intervals import merge_spans, subtract_spans, total_ns
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import RankView, TraceView

HEAD = [
    "| trace | rank | idle, % | compute, % | exposed communication, % | exposed copies, % | differ |",
    "| --- " * 7 + "|",
]
MAX_RANKS = 8
TOLERANCE = 0.01
"""Points of percent: half a digit of what is printed, for each of the two."""
CODE = """
import gzip, json, sys
sys.path.insert(0, sys.argv[1] + "/TraceLens/TreePerf")
from gpu_event_analyser import GPUEventAnalyser
try:
    with (gzip.open if sys.argv[2].endswith(".gz") else open)(sys.argv[2], "rb") as file:
        events = json.load(file)["traceEvents"]
    print(json.dumps(GPUEventAnalyser(events).compute_metrics()))
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"[:90]}))
"""
THEIR_NAMES = {
    "idle": "idle_time",
    "compute": "computation_time",
    "comm": "exposed_comm_time",
    "copies": "exposed_memcpy_time",
}


def run_tracelens(checkout: Path, file: Path) -> dict[str, Any]:
    """Return TraceLens' shares in percent, or `error`."""
    done = subprocess.run([sys.executable, "-c", CODE, str(checkout), str(file)], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-90:]}
    if "error" in found:
        return found
    return {name: 100 * found[key] / found["total_time"] for name, key in THEIR_NAMES.items()}


def measure(view: RankView, *, memset: Kind) -> dict[str, float]:
    """Return shares of the whole file in percent; `memset`: the kind that memsets count as."""
    table, rows = view.table, view.device_rows
    start, end = table.ts_ns[rows], table.ts_ns[rows] + table.dur_ns[rows]
    kind = np.where(table.kind[rows] == Kind.MEMSET, int(memset), table.kind[rows])
    compute, comm, copies = (merge_spans(start[kind == of], end[kind == of]) for of in (1, 2, 3))
    exposed = subtract_spans(comm, compute)
    alone = subtract_spans(subtract_spans(copies, compute), comm)
    span = float(end.max() - start.min())
    times = {
        "idle": span - total_ns(merge_spans(start, end)),
        "compute": total_ns(compute),
        "comm": total_ns(exposed),
        "copies": total_ns(alone),
    }
    return {name: 100 * time / span for name, time in times.items()}


def compare(folder: Path, checkout: Path) -> list[str]:
    """Return the rows of the table for one run; none for a run without Kineto traces of a device."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))[:MAX_RANKS]
    trace = TraceView(read_traces(folder, use_cache=False))
    views = {rank: view for rank, view in trace.ranks.items() if view.table.format == "kineto"}
    rows = []
    for (rank, view), file in zip(list(views.items())[:MAX_RANKS], files, strict=False):
        theirs = run_tracelens(checkout, file)
        if "error" in theirs:
            rows.append(f"| {folder.name} | {rank} | not read: {theirs['error']} | | | | |")
            continue
        ours, alike = measure(view, memset=Kind.MEMCPY), measure(view, memset=Kind.COMPUTE)
        columns = [" / ".join(f"{shares[name]:.2f}" for shares in (ours, alike, theirs)) for name in THEIR_NAMES]
        far = [name for name in THEIR_NAMES if abs(alike[name] - theirs[name]) > TOLERANCE]
        rows.append(f"| {folder.name} | {rank} | {' | '.join(columns)} | {', '.join(far) or 'agree'} |")
    return rows
