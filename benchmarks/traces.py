"""Time and memory to read one large trace: this project, HolisticTraceAnalysis (HTA) and `json.load`.

    python benchmarks/traces.py TRACE [--size-mb 500] [--hta PYTHON] [--out benchmarks/traces.md]

TRACE is a real Kineto trace (`.json` or `.json.gz`); it is repeated with shifted times and ids up to the given size.
PYTHON is an interpreter of a separate environment with `hta` 0.5. Every measurement runs in its own process on one
core; the best of three runs counts, HTA and json.load run once.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
_SHIFTED = re.compile(r'"(ts|correlation|External id|id)": (\d+)')

READ = """
import json, resource, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from cclsearch.trace.read import read_traces
from cclsearch.trace.score import score_traces, score_view
from cclsearch.trace.view import TraceView
from cclsearch.trace.file_summary import summarize_file
import numpy, msgspec
names = "trace_step_time compute_frac exposed_comm_frac exposed_mem_frac idle_frac comm_time overlap".split()
read_traces({warm!r}, use_cache=False)
score_traces(read_traces({warm!r}, use_cache=False), names=names)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, cpu = time.perf_counter(), time.process_time()
found = read_traces({path!r}, use_cache={cache!r})
loaded = time.perf_counter()
view = TraceView(found)
whole = summarize_file(view.ranks[0])
score = score_view(view, names)
end, cpu = time.perf_counter(), time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
table = found.tables[0]
print(json.dumps(dict(load_s=loaded - start, total_s=end - start, cpu_s=cpu, peak_mb=peak / 1024,
    before_mb=before / 1024,
    table_mb=table.nbytes / 1e6, rows=len(table), busy_us=whole.busy_ns / 1e3, compute_us=whole.compute_ns / 1e3)))
"""

LOAD = """
import json, resource, time
start, cpu = time.perf_counter(), time.process_time()
data = json.load(open({path!r}))
print(json.dumps(dict(total_s=time.perf_counter() - start,
    cpu_s=time.process_time() - cpu,
    peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, rows=len(data["traceEvents"]))))
"""

HTA = """
import json, resource, time, logging
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
start, cpu = time.perf_counter(), time.process_time()
analysis = TraceAnalysis(trace_files={{0: {path!r}}}, trace_dir="/")
loaded = time.perf_counter()
times = analysis.get_temporal_breakdown(visualize=False)
print(json.dumps(dict(load_s=loaded - start, total_s=time.perf_counter() - start,
    cpu_s=time.process_time() - cpu,
    peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)))
"""


def repeat_trace(source: Path, target: Path, size_bytes: int) -> None:
    """Write the trace repeatedly, with shifted times and ids, until the target has the size."""
    data = source.read_bytes()
    text = (gzip.decompress(data) if source.suffix == ".gz" else data).decode()
    start = text.index("[", text.index('"traceEvents"')) + 1
    end = text.index("\n  ],\n", start)
    head, body, tail = text[:start], text[start:end], text[end:]
    found = [(key, int(number)) for key, number in _SHIFTED.findall(body)]
    times = [number for key, number in found if key == "ts"]
    span = max(times) - min(times) + 100_000
    ids = max(number for key, number in found if key != "ts") + 1
    with target.open("w") as file:
        file.write(head)
        for count in range(max(1, round(size_bytes / len(body)))):
            shift = {"ts": span * count}
            file.write("," if count else "")
            file.write(_SHIFTED.sub(lambda m, s=shift, n=count: f'"{m[1]}": {int(m[2]) + s.get(m[1], ids * n)}', body))
        file.write(tail)


def run_alone(python: str, program: str, core: int | None) -> dict[str, float]:
    """Return what the program prints, run in its own process on one core."""
    command = ["taskset", "-c", str(core), python, "-c", program] if core is not None else [python, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure_ours(path: Path, warm: Path, *, cache: bool, core: int | None, repeats: int = 3) -> dict[str, float]:
    """Return the fastest of several runs."""
    program = READ.format(root=str(HERE.parent), path=str(path), warm=str(warm), cache=cache)
    return min((run_alone(sys.executable, program, core) for _ in range(repeats)), key=lambda run: run["cpu_s"])


def main() -> None:
    """Build the large trace, measure, and print the table (and write it)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--size-mb", type=int, default=500)
    parser.add_argument("--hta", metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--core", type=int, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        text = make_report(arguments, Path(scratch))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def make_report(arguments: argparse.Namespace, scratch: Path) -> str:
    """Return the measurements as a Markdown table."""
    plain, zipped = scratch / "plain" / "rank0.json", scratch / "zipped" / "rank0.json.gz"
    plain.parent.mkdir()
    zipped.parent.mkdir()
    repeat_trace(arguments.trace, plain, arguments.size_mb * 1_000_000)
    subprocess.run(f"gzip -6 -c {plain} > {zipped}", shell=True, check=True)
    size_mb = plain.stat().st_size / 1e6
    rows = _rows(arguments, plain, zipped, size_mb)
    head = (
        "| reader | wall s | CPU s | MB of raw JSON per CPU s | peak MB without start and table |\n"
        "| --- | --- | --- | --- | --- |\n"
    )
    return (
        f"# Reading traces\n\n`benchmarks/traces.py` on {size_mb:.0f} MB of Kineto JSON, made by repeating "
        f"one real trace with shifted times and ids; one process on one core of {platform.machine()}, "
        f"{os.cpu_count()} cores shared with other work, {time.strftime('%Y-%m-%d')}.\n\n{head}"
        + "\n".join(rows)
        + "\n"
    )


def _rows(arguments: argparse.Namespace, plain: Path, zipped: Path, size_mb: float) -> list[str]:
    core, warm = arguments.core, arguments.trace
    ours = measure_ours(plain, warm, cache=False, core=core)
    packed = measure_ours(zipped, warm, cache=False, core=core)
    measure_ours(plain, warm, cache=True, core=core, repeats=1)
    again = measure_ours(plain, warm, cache=True, core=core)
    naive = run_alone(sys.executable, LOAD.format(path=str(plain)), core)
    rows = [
        _row("this project, load and full breakdown, `.json`", ours, size_mb),
        _row("this project, load and full breakdown, `.json.gz`", packed, size_mb),
        _row("this project, second read from the cache", {**again, "table_mb": 0.0}, None),
        _row("`json.load` alone", naive, size_mb),
    ]
    if arguments.hta:
        hta = run_alone(arguments.hta, HTA.format(path=str(plain)), core)
        rows.append(_row("HolisticTraceAnalysis, load and temporal breakdown", hta, size_mb))
        rows.append(
            f"\n{hta['cpu_s'] / ours['cpu_s']:.1f}x faster than HolisticTraceAnalysis "
            f"({hta['cpu_s']:.3g} s -> {ours['cpu_s']:.3g} s of CPU time)."
        )
    rows.append(f"\n{ours['rows']:.0f} rows, {ours['table_mb']:.0f} MB of columns.")
    return rows


def _row(what: str, run: dict[str, float], size_mb: float | None) -> str:
    extra = run["peak_mb"] - run.get("before_mb", 0.0) - run.get("table_mb", 0.0) * 1e6 / (1 << 20)
    rate = f"{size_mb / run['cpu_s']:.0f}" if size_mb else ""
    return f"| {what} | {run['total_s']:.3g} | {run['cpu_s']:.3g} | {rate} | {extra:.0f} |"


if __name__ == "__main__":
    main()
