"""What the toolkit says about one-step traces, events of duration 0 and idle time, beside counts from the JSON itself.

    python benchmarks/traces_review.py FOLDER [--before CHECKOUT] [--out FILE]

FOLDER has one folder of traces per run. `--before` runs the same in another checkout of this project (the commit
before a change), each trace in its own process. The reference columns come from the events of the JSON, without the
toolkit: the extent of the device work that was launched inside the one marker of a step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARKER = re.compile(r"ProfilerStep|execute_(\d+_)?context_|(scheduler\.)?run_batch")
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")

PROBE = """
import json, sys, time
from pathlib import Path
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView
from cclsearch.plugins import METRICS
from cclsearch.trace.diagnosis.diagnose import diagnose_trace
import numpy as np
trace = TraceView(read_traces(Path(sys.argv[1]), use_cache=False))
if not trace.ranks:
    print(json.dumps({"status": str(trace.trace_set.reason)}))
    raise SystemExit
view = max(trace.ranks.values(), key=lambda view: float(np.median(view.parts.window_ns_W)) if len(view.busy_M2) else 0)
step, idle = (METRICS.get(name)(trace) for name in ("trace_step_time", "idle_frac"))
start = time.perf_counter()
path = METRICS.get("critical_path")(trace)
seconds = time.perf_counter() - start
durations = np.concatenate([one.table.dur_ns[one.device_rows] for one in trace.ranks.values()])
print(json.dumps({
    "step_ms": None if step.value is None else step.value * 1e3, "reason": str(step.reason),
    "idle": idle.value, "zero": int((durations == 0).sum()), "path_s": path.inputs.get("path_s"),
    "path_time_s": seconds, "path_reason": str(path.reason), "path_ok": path.value is not None,
    "window_s": float(np.median(view.parts.window_ns_W)) / 1e9 if len(view.parts.window_ns_W) else 0,
    "sentences": list(diagnose_trace(trace).sentences),
}))
"""


def probe(root: Path, folder: Path) -> dict[str, Any]:
    """Return what the checkout at `root` says about a folder of traces."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
    )
    if done.returncode:
        return {"status": (done.stderr.strip().splitlines() or ["failed"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def count_extent(path: Path) -> tuple[float, float] | None:
    """Return ms and idle share of the work launched inside the file's one step marker; None without exactly one."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = json.loads(text)
    events = [e for e in (data.get("traceEvents", []) if isinstance(data, dict) else data) if e.get("ph") == "X"]
    marks = [e for e in events if e.get("cat") == "user_annotation" and MARKER.match(e["name"])]
    if len(marks) != 1:
        return None
    start, end = marks[0]["ts"], marks[0]["ts"] + marks[0]["dur"]
    calls = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") in DEVICE_CATEGORIES and start <= calls.get(e["args"].get("correlation"), start - 1) <= end
    )
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for begin, stop in spans:
        busy += max(0.0, stop - max(begin, reached))
        reached = max(reached, stop)
    return (reached - spans[0][0]) / 1e3, 1 - busy / (reached - spans[0][0])


def count_slowest(folder: Path) -> tuple[float, float] | None:
    """Return the longest extent of the folder's Kineto files, and the mean idle share; None if one has not one step."""
    files = [path for path in sorted(folder.glob("*.json*")) if ".xplane." not in path.name]
    found = [count_extent(path) for path in files if not path.name.startswith((".", "host"))]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return max(ms for ms, _ in known), sum(idle for _, idle in known) / len(known)


def write_zero_trace(folder: Path) -> Path:
    """Write a trace of 2000 queued kernels of 10 us, of which each tenth is followed by an event of duration 0."""
    folder.mkdir()
    events: list[dict[str, Any]] = []
    for i in range(2000):
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 1000 + i}
        events.append({**launch, "dur": 1, "args": {"correlation": i}})
        for duration in (10, 0) if i % 10 == 0 else (10,):
            name, start = ("gemm", 1000) if duration else ("Memset (Device)", 1010)
            event = {"ph": "X", "cat": "kernel" if duration else "gpu_memset", "name": name, "pid": 0, "tid": 7}
            args = {"device": 0, "stream": 7, "correlation": i}
            events.append({**event, "ts": start + 10 * i, "dur": duration, "args": args})
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "gpu"}]}
    (folder / "rank0.json").write_text(json.dumps({**head, "traceEvents": events}))
    return folder


def make_report(folder: Path, before: Path | None, scratch: Path) -> str:
    """Return the three tables as Markdown."""
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "licences"]
    folders.append(write_zero_trace(scratch / "self-made-duration-0"))
    now = {path.name: probe(HERE.parent, path) for path in folders}
    old = {path.name: probe(before, path) for path in folders} if before else {}
    counted = {path.name: extent for path in folders if (extent := count_slowest(path)) is not None}
    parts = ["## One-step traces", "", *_step_rows(now, old, counted), "", "## Events of duration 0", ""]
    parts += [*_zero_rows(now, old), "", "## First sentence of the diagnosis", "", *_sentence_rows(now, old), ""]
    return "\n".join(parts)


def _table(head: str, rows: list[str]) -> list[str]:
    return [head, re.sub(r"[^|]+", " --- ", head), *(rows or ["| none |"])]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _step_rows(
    now: dict[str, dict[str, Any]], old: dict[str, dict[str, Any]], counted: dict[str, tuple[float, float]]
) -> list[str]:
    rows = []
    for name, (extent_ms, idle) in counted.items():
        then, found = old.get(name, {}), now[name]
        cells = [_ms(extent_ms), _ms(found.get("step_ms")), _ms(then.get("step_ms"))]
        cells += [_percent(idle), _percent(found.get("idle")), _percent(then.get("idle"))]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return _table("| trace | extent, ms | step now, ms | before, ms | idle of extent | idle now | before |", rows)


def _zero_rows(now: dict[str, dict[str, Any]], old: dict[str, dict[str, Any]]) -> list[str]:
    def path(found: dict[str, Any]) -> str:
        if not found.get("path_ok"):
            return str(found.get("path_reason", ""))
        return f"{found['path_s']:.4g} of {found['window_s']:.4g} s, in {found['path_time_s']:.2f} s"

    rows = [
        f"| {name} | {found['zero']} | {path(found)} | {path(old.get(name, {}))} |"
        for name, found in now.items()
        if found.get("zero")
    ]
    return _table("| trace | events of duration 0 | critical path now | before |", rows)


def _sentence_rows(now: dict[str, dict[str, Any]], old: dict[str, dict[str, Any]]) -> list[str]:
    def text(found: dict[str, Any]) -> str:
        sentences = found.get("sentences") or [found.get("status", "")]
        waits = [sentence for sentence in sentences[1:] if "wait for rank" in sentence]
        return " ".join([sentences[0], *waits]).replace("|", "/")

    rows = [f"| {name} | {text(found)} | {text(old.get(name, {}))} |" for name, found in now.items()]
    return _table("| trace | now | before |", rows)


def main() -> None:
    """Print the report, and add it to the file if one is given (replacing an earlier one)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        before = arguments.before.resolve() if arguments.before else None
        text = make_report(arguments.folder.resolve(), before, Path(scratch))
    print(text)
    if arguments.out:
        title = "# One-step traces, duration 0 and sentences (`benchmarks/traces_review.py`)"
        known = arguments.out.read_text() if arguments.out.exists() else ""
        arguments.out.write_text(f"{known.split(title)[0].rstrip()}\n\n{title}\n\n{text}")


if __name__ == "__main__":
    main()
