"""Results of load generators (vLLM, SGLang, guidellm, genai-perf, aiperf) as rows of a recording."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cclsearch.card.fields import look_up
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.yaml_file import read_yaml

MAX_BYTES = 256 << 20
SUFFIXES = (".json", ".jsonl")


@cache
def _load_formats() -> Mapping[str, Any]:
    return read_yaml(Path(__file__).with_suffix(".yaml"))


def read_benchmark(path: Path) -> tuple[str, list[dict[str, float]]] | None:
    """Return the tool that wrote a result and the metrics of each of its runs; None for any other file.

    Raises UserError for a result without the fields that its tool is known to write, as of another version.
    """
    if path.suffix not in SUFFIXES or not path.is_file() or path.stat().st_size > MAX_BYTES:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        written = [json.loads(line) for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else None
        results = written or [json.loads(text)]
    except (OSError, ValueError, RecursionError):
        return None
    for tool, form in _load_formats().items():
        if results and all(_has(each, form["marks"]) for each in results):
            where = f"{str(path)!r} is a result of {tool}"
            return tool, [row for each in results for row in _read_runs(each, form, where)]
    return None


def _has(result: Any, marks: list[str]) -> bool:
    return isinstance(result, dict) and all(look_up(result, mark) is not None for mark in marks)


def _read_runs(result: Mapping[str, Any], form: Mapping[str, Any], where: str) -> Iterator[dict[str, float]]:
    runs = look_up(result, form["runs"]) if "runs" in form else [result]
    for run in runs if isinstance(runs, list) and runs else [{}]:
        paths = {name: (path, 1.0) for name, path in form["values"].items()}
        for latency, path in form["latencies"].items():
            unit = 1.0 if latency in form.get("seconds", ()) else 1e-3
            paths |= {f"{latency}_{s}_s": (path.format(of=of), unit) for s, of in form["statistics"].items()}
        found = {
            name: value * unit for name, (path, unit) in paths.items() if (value := _number(run, path)) is not None
        }
        if missing := [paths[name][0] for name in form["needed"] if name not in found]:
            version = look_up(result, form.get("version", "version"))
            of = f" (its version: {one_line(str(version), 30)})" if version else ""
            raise UserError(f"{where}, but of another version{of}: it has no {' and no '.join(missing)}")
        yield found


def _number(run: Any, path: str) -> float | None:
    value = look_up(run, path) if isinstance(run, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None


def describe_benchmarks(paths: list[Path], found: list[tuple[str, list[dict[str, float]]]]) -> Iterator[str]:
    """Yield which tool wrote each file, and the results as the table of a recording."""
    for path, (tool, runs) in zip(paths, found, strict=True):
        yield f"{path}: {len(runs)} of {tool} (recorded; nothing ran here)"
    rows = [row for _, runs in found for row in runs]
    known = list(dict.fromkeys(name for row in rows for name in row))
    loads = [name for name in ("concurrency", "request_rate") if name in known]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    columns = [name for name in known if name not in loads]
    table.writerow([*loads, "status", *columns])
    for row in rows:
        figures = [f"{row[name]:.6g}" if name in row else "" for name in (*loads, *columns)]
        table.writerow([*figures[: len(loads)], "ok", *figures[len(loads) :]])
    yield "as trials.csv of a recording (`ccl-search docs your-recording`); put a column for each knob before these:"
    yield from text.getvalue().splitlines()
