"""Figures of ccl-search beside those of xprof (openxla/xprof) on the same XSpaces, for `agreement.py`.

xprof adds the times of operations over all devices of a file, and has steps only if the trace has markers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from cclsearch.trace.events import Kind
from cclsearch.trace.intervals import merge_spans, total_ns
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

HEAD = ["| XSpace | figure | ccl-search | xprof | apart |", "| --- " * 5 + "|"]
CODE = """
import json, sys
from xprof.convert import raw_to_tool_data as convert

def tool(name):
    data, _ = convert.xspace_to_tool_data([sys.argv[1]], name, {})
    return json.loads(data)

found = {"steps_ms": [], "seconds": {}}
for table in tool("input_pipeline_analyzer"):
    ids = [column["id"] for column in table["cols"]]
    if "stepTimeMs" in ids:
        steps = [[cell.get("v") for cell in row["c"]] for row in table["rows"]]
        found["steps_ms"] = [step[ids.index("stepTimeMs")] for step in steps]
        found["step_compute_ms"] = [step[ids.index("deviceComputeTimeMs")] for step in steps]
root = tool("op_profile")["byProgram"]
found["total_s"] = root["metrics"]["rawTime"] / 1e12
programs = root.get("children", [])
for program in programs:
    for part in program.get("children") or [program]:
        seconds = found["seconds"]
        seconds[part["name"]] = seconds.get(part["name"], 0) + part["metrics"]["rawTime"] / 1e12
print(json.dumps(found))
"""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
KINDS = {"compute": (Kind.COMPUTE,), "collectives": (Kind.COMM,), "copies": (Kind.MEMCPY, Kind.MEMSET)}


def run_xprof(python: str, file: Path) -> dict[str, Any]:
    """Return steps in ms and summed seconds by category of operation, or `error`; works on a copy of the file."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(file, folder))
        done = subprocess.run([python, "-c", CODE, str(copy)], capture_output=True, text=True, cwd=folder)
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-90:]}
    return found


def kind_of(category: str) -> str:
    """Return which of `KINDS` a category of xprof's belongs to."""
    if category.startswith(COLLECTIVES):
        return "collectives"
    return "copies" if category.startswith(("copy", "data formatting")) else "compute"


def theirs_of(found: dict[str, Any]) -> dict[str, float]:
    """Return xprof's figures; a figure it has no data for is missing."""
    figures: dict[str, float] = {}
    if steps := found["steps_ms"]:
        figures["steps"] = len(steps)
        figures["mean step, ms"] = sum(steps) / len(steps)
    if any(found.get("step_compute_ms", ())):
        figures["compute in a step, ms"] = sum(found["step_compute_ms"]) / len(steps)
    seconds = {name: value for name, value in found["seconds"].items() if name != "IDLE"}
    if seconds:
        figures["devices' time, s"] = found["total_s"]
        figures["idle, %"] = 100 * found["seconds"].get("IDLE", 0.0) / found["total_s"]
        for name, value in seconds.items():
            key = f"{kind_of(name)}, s"
            figures[key] = figures.get(key, 0.0) + value
    return figures


def ours_of(trace: TraceView) -> dict[str, float]:
    """Return the same figures of ccl-search: times added over devices, steps of the device that has them last."""
    span = busy = 0.0
    figures: dict[str, float] = {}
    seconds = dict.fromkeys(KINDS, 0.0)
    for view in trace.ranks.values():
        table, rows = view.table, view.device_rows
        start, end, kind = table.ts_ns[rows], table.ts_ns[rows] + table.dur_ns[rows], table.kind[rows]
        span += float(end.max() - start.min())
        busy += total_ns(merge_spans(start, end))
        for name, kinds in KINDS.items():
            seconds[name] += float(table.dur_ns[rows][[value in kinds for value in kind]].sum()) / 1e9
        if steps := table.steps:
            figures["steps"] = len(steps)
            figures["mean step, ms"] = sum(step.end_ns - step.start_ns for step in steps) / len(steps) / 1e6
            inside = (start >= steps[0].start_ns) & (end <= steps[-1].end_ns) & (kind == Kind.COMPUTE)
            covered = total_ns(merge_spans(start[inside], end[inside]))
            figures["compute in a step, ms"] = covered / len(steps) / 1e6
    figures |= {"devices' time, s": span / 1e9, "idle, %": 100 * (1 - busy / span)}
    return figures | {f"{name}, s": value for name, value in seconds.items()}


def compare(folder: Path, python: str) -> list[str]:
    """Return the rows of the table for one run; none for a run without an XSpace."""
    rows = []
    for file in sorted(folder.rglob("*.xplane.pb")):
        found = run_xprof(python, file)
        if "error" in found:
            return [f"| {folder.name} | not read: {found['error']} | | | |"]
        with tempfile.TemporaryDirectory() as alone:
            shutil.copy(file, alone)
            ours = ours_of(TraceView(read_traces(Path(alone), use_cache=False)))
        theirs = theirs_of(found)
        for name in (name for name in ours if name in theirs):
            value, other = ours[name], theirs[name]
            apart = abs(value - other) / max(abs(value), abs(other), 1e-12)
            rows.append(f"| {folder.name} | {name} | {value:.6g} | {other:.6g} | {apart:.2%} |")
        alone_here = [name for name, value in ours.items() if value and name not in theirs]
        rows.append(f"| {folder.name} | {'; '.join(alone_here)} | yes | - | |" if alone_here else "")
    return [row for row in rows if row]
