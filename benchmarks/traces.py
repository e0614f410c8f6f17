"""Time and memory to read large traces: this project, an earlier checkout, `json.load` and HolisticTraceAnalysis (HTA).

    python benchmarks/traces.py TRACE... [--before DIR] [--hta PYTHON] [--size-mb 300] [--out FILE]

Each TRACE is a real Kineto trace (`.json` or `.json.gz`), repeated with shifted times and ids up to the given size. DIR
is a checkout to compare with, PYTHON an interpreter of a separate environment with `hta` 0.5. Every measurement runs in
its own process, this project and the checkout in turns; of three runs the one with the least CPU time (with several
workers: wall time) counts. json.load and HTA run once.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 3
_SHIFTED = re.compile(r'"(ts|correlation|External id|id)":\s*(\d+)')
_METRICS = "trace_step_time compute_frac exposed_comm_frac exposed_mem_frac idle_frac comm_time overlap"

READ = f"""
import json, os, resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cclsearch.trace.read import read_traces
from cclsearch.trace.score import score_view
from cclsearch.trace.view import TraceView
from cclsearch.trace.metrics.quality import summarize_file
path, workers, cache, warm = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "cache", sys.argv[5]
names = "{_METRICS}".split()
score_view(TraceView(read_traces(warm, use_cache=False)), names)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cpu_s = lambda: time.process_time() + sum(os.times()[2:4])
start, cpu = time.perf_counter(), cpu_s()
found = read_traces(path, workers=workers, use_cache=cache)
loaded = time.perf_counter()
keywords = TraceView.__init__.__kwdefaults__
view = TraceView(found, **(dict(workers=workers) if "workers" in keywords else {{}}))
summarize_file(view.ranks[0])
score_view(view, names)
tables = found.tables.values()
print(json.dumps(dict(load_s=loaded - start, wall_s=time.perf_counter() - start, cpu_s=cpu_s() - cpu,
    peak_mb=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    table_mb=sum(table.nbytes for table in tables) / 2**20, rows=sum(map(len, tables)))))
"""

LOAD = """
import json, os, resource, sys, time
start = time.perf_counter()
data = json.load(open(sys.argv[1]))
print(json.dumps(dict(wall_s=time.perf_counter() - start, cpu_s=sum(os.times()[:4]),
    peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)))
"""

HTA = """
import json, logging, os, resource, sys, time
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
start, cpu = time.perf_counter(), sum(os.times()[:4])
TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/").get_temporal_breakdown(visualize=False)
print(json.dumps(dict(wall_s=time.perf_counter() - start, cpu_s=sum(os.times()[:4]) - cpu,
    peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)))
"""


@dataclass
class Way:
    """One way to read: a checkout, its number of workers and the environment."""

    name: str
    root: Path
    workers: int = 1
    native: bool = True


def repeat_trace(source: Path, target: Path, size_bytes: int) -> None:
    """Write the trace repeatedly, with shifted times and ids, until the target has the size."""
    data = source.read_bytes()
    text = (gzip.decompress(data) if source.suffix == ".gz" else data).decode()
    start = text.index("[", text.index('"traceEvents"'))
    _, end = json.JSONDecoder(strict=False).raw_decode(text, start)
    inner = text[start + 1 : end - 1]
    body = inner.strip()
    indent = inner[: len(inner) - len(inner.lstrip())]
    found = [(key, int(number)) for key, number in _SHIFTED.findall(body)]
    times = [number for key, number in found if key == "ts" and number]
    shift = {"ts": max(times) - min(times) + 100_000}
    ids = max(number for key, number in found if key != "ts") + 1

    def shifted(match: re.Match[str], count: int) -> str:
        keep = match[0][: match.start(2) - match.start()]
        return f"{keep}{int(match[2]) + shift.get(match[1], ids) * count}"

    with target.open("w") as file:
        file.write(text[: start + 1] + indent)
        for count in range(max(1, round(size_bytes / len(body)))):
            file.write("," + (indent or " ") if count else "")
            file.write(_SHIFTED.sub(lambda match, n=count: shifted(match, n), body))
        file.write(inner[len(inner.rstrip()) :] + text[end - 1 :])


def run_program(python: str, program: str, *arguments: str, core: int | None, native: bool = True) -> dict[str, float]:
    """Return what the program prints, run in its own process."""
    command = [python, "-c", program, *arguments]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CCL_NATIVE": "1" if native else "0"}
    folder = arguments[0] if program == READ else None  # the other processes of a checkout import from there
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=folder)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure(ways: list[Way], path: Path, warm: Path, *, cache: bool = False) -> dict[str, dict[str, float]]:
    """Return the run of each way with the least CPU time (wall time, for several workers); the ways alternate."""
    runs: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for _ in range(REPEATS):
        for way in ways:
            arguments = (str(way.root), str(path), str(way.workers), "cache" if cache else "", str(warm))
            core = None if way.workers > 1 else 0
            runs[way.name].append(run_program(sys.executable, READ, *arguments, core=core, native=way.native))
    return {
        way.name: min(runs[way.name], key=lambda run, w=way: run["wall_s" if w.workers > 1 else "cpu_s"])
        for way in ways
    }


def report_single(arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """Return the table of single traces, each read in every way."""
    ways = [Way("now", ROOT), Way("now, 2 workers", ROOT, 2), Way("now, Python only", ROOT, native=False)]
    if arguments.before:
        ways.insert(0, Way("before", arguments.before))
    lines = [
        "| trace | way | wall s | CPU s | MB/s of CPU | peak MB without start and table | times before "
        "| times one worker |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for source in arguments.traces:
        name = source.parent.name
        path = scratch / name / "rank0.json"
        path.parent.mkdir()
        repeat_trace(source, path, arguments.size_mb * 1_000_000)
        size_mb = path.stat().st_size / 1e6
        runs = measure(ways, path, source)
        packed = path.with_name("rank0.json.gz")
        subprocess.run(f"gzip -1 -c {path} > {packed}", shell=True, check=True)
        for way, run in measure([way for way in ways if way.root == ROOT and way.native], packed, source).items():
            runs[f"{way}, .json.gz"] = run
        measure([Way("cache", ROOT)], path, source, cache=True)
        runs["now, from the cache"] = measure([Way("cache", ROOT)], path, source, cache=True)["cache"]
        runs["json.load"] = run_program(sys.executable, LOAD, str(path), core=0)
        if arguments.hta:
            runs["HTA, load and temporal breakdown"] = run_program(arguments.hta, HTA, str(path), core=0)
        for way, run in runs.items():
            one = runs[way.replace(", 2 workers", "")] if "2 workers" in way else None
            lines.append(_single_row(f"{name}, {size_mb:.0f} MB", way, run, (runs.get("before"), one), size_mb))
            print(lines[-1], file=sys.stderr)
        path.unlink()
        packed.unlink()
    return lines


def _single_row(
    trace: str, way: str, run: dict[str, float], beside: Sequence[dict[str, float] | None], size_mb: float
) -> str:
    extra = max(run["peak_mb"] - run.get("table_mb", 0.0), 0.0)
    ratios = " | ".join(f"{other['wall_s'] / run['wall_s']:.2g}" if other else "" for other in beside)
    rate = size_mb / run["cpu_s"]
    return f"| {trace} | {way} | {run['wall_s']:.3g} | {run['cpu_s']:.3g} | {rate:.0f} | {extra:.0f} | {ratios} |"


def make_report(arguments: argparse.Namespace, scratch: Path) -> str:
    """Return the measurements as Markdown."""
    lines = [
        "# Reading traces",
        "",
        "`benchmarks/traces.py`: Kineto JSON made by repeating real traces with shifted times and ids, loaded with the "
        f"full breakdown. {platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}. One worker runs "
        "on one core; `--workers` shares several large files among processes, and reads one file in threads.",
        "",
        *report_single(arguments, scratch),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Build the large traces, measure, and print the tables (and write them)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--size-mb", type=int, default=300)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--hta", metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.traces = [trace.resolve() for trace in arguments.traces]
    arguments.before = arguments.before and arguments.before.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        text = make_report(arguments, Path(scratch))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
