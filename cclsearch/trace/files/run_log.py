"""Figures that are not in any trace, from files next to it: the run's peak memory, a server's request log, and the
result of a load generator."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULT_FILE, TRACE_FOLDER = "result.json", "trace"
"""Names from the trial contract."""
MAX_BYTES = 64 << 20
MAX_FILES = 200
"""Files of a folder that are looked at for the result of a load generator."""
REQUEST_LOGS = ("requests.jsonl", "requests.json")
"""One object per line with `ttft_s` and `tpot_s` (seconds), or one object with the lists `ttfts` and `itls` (seconds
between a request's tokens), as `vllm bench serve --save-result --save-detailed` writes it."""
_SNIFFED_BYTES = 1 << 16
_MARKS = (b'"completed"', b'"duration"')
"""Both fields are in every result of `vllm bench serve` and of `sglang.bench_serving`."""


@dataclass(frozen=True)
class ServingLog:
    """Throughput of a server under the load of one run of a load generator."""

    source: str
    """The file."""
    duration_s: float | None = None
    """Seconds from the first request to the last token."""
    num_requests: int | None = None
    """Completed requests."""
    output_tokens: int | None = None
    input_tokens: int | None = None

    @property
    def output_tokens_per_s(self) -> float | None:
        """Generated tokens per second; None if the file does not say."""
        return self.output_tokens / self.duration_s if self.output_tokens is not None and self.duration_s else None

    @property
    def requests_per_s(self) -> float | None:
        """Completed requests per second; None if the file does not say."""
        return self.num_requests / self.duration_s if self.num_requests is not None and self.duration_s else None


@dataclass(frozen=True)
class LatencySummary:
    """Latency over the requests of a load generator that wrote no list of them; seconds."""

    median_s: float
    others: Mapping[str, float]
    """`mean_s`, `p90_s`, `p95_s`, `p99_s` and `std_s`; only those in the file."""
    source: str
    """The file."""


@dataclass(frozen=True)
class RunLog:
    """Figures of the whole run, reported by the run itself."""

    peak_memory_bytes: tuple[int, ...] = ()
    """Peak of each rank over the whole run, from `result.json`."""
    is_device_memory: bool = True
    """False: the resident set of a process on a CPU."""
    ttft_s: tuple[float, ...] = ()
    """Time to the first token of each request."""
    tpot_s: tuple[float, ...] = ()
    """Mean time between tokens, for each request with several tokens."""
    serving: ServingLog | None = None
    summaries: Mapping[str, LatencySummary] = field(default_factory=dict)
    """`ttft` and `tpot`, if a load generator wrote only their statistics."""


def read_run_log(path: Path) -> RunLog | None:
    """Return the figures found in the traces' folder or in the trial's folder around it; None without any.

    A file that cannot be read or has no such figures is ignored.
    """
    folder = path if path.is_dir() else path.parent
    folders = (folder, folder.parent) if folder.name == TRACE_FOLDER else (folder,)
    result = next((found for place in folders if (found := _read_json(place / RESULT_FILE)) is not None), None)
    peaks = tuple(_positive(result.get("peak_memory_bytes"))) if isinstance(result, dict) else ()
    logs = (_read_requests(place / name) for place in folders for name in REQUEST_LOGS)
    ttft, tpot, serving = next((log for log in logs if any(log)), ((), (), None))
    summaries: dict[str, LatencySummary] = {}
    for data, name in _load_results(folders):
        for key, summary in _read_summaries(data, name):
            summaries.setdefault(key, summary)
        first, token, load = _read_result(data, name)
        ttft, tpot = ttft or first, tpot or token
        serving = serving if serving is not None and serving.duration_s else load
        if serving is not None:
            break
    if not (peaks or ttft or tpot or serving or summaries):
        return None
    is_device = not (isinstance(result, dict) and result.get("memory_kind") == "rss")
    return RunLog(tuple(int(peak) for peak in peaks), is_device, ttft, tpot, serving, summaries)


Requests = tuple[tuple[float, ...], tuple[float, ...], ServingLog | None]


def _load_results(folders: Iterable[Path]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the results of load generators in these folders, the last line of each file first found by name."""
    for folder in folders:
        try:
            files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jsonl"))[:MAX_FILES]
        except OSError:
            continue
        for path in files:
            if path.name in (RESULT_FILE, *REQUEST_LOGS) or path.name.startswith(".") or not _is_load_result(path):
                continue
            text = _read_text(path)
            whole = _parse(text) if path.suffix == ".json" else None
            rows = [whole] if whole is not None else [_parse(line) for line in reversed(text.splitlines()[-100:])]
            yield from ((row, path.name) for row in rows if isinstance(row, dict) and "completed" in row)


def _is_load_result(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(_SNIFFED_BYTES)
    except OSError:
        return False
    return all(mark in head for mark in _MARKS)


def _read_result(data: Mapping[str, Any], name: str) -> Requests:
    """Return latencies and throughput of one result of `vllm bench serve` or `sglang.bench_serving`."""
    listed = data.get("itls")
    gaps = (
        [list(_positive(request)) for request in listed if isinstance(request, list)]
        if isinstance(listed, list)
        else []
    )
    tokens = tuple(sum(many) / len(many) for many in gaps if many)
    load = ServingLog(
        name,
        _number(data.get("duration")),
        _whole(data.get("completed")),
        _whole(data.get("total_output_tokens", data.get("total_output"))),
        _whole(data.get("total_input_tokens", data.get("total_input"))),
    )
    return tuple(_positive(data.get("ttfts"))), tokens, load


def _read_summaries(data: Mapping[str, Any], name: str) -> Iterator[tuple[str, LatencySummary]]:
    """Yield the statistics that both load generators write in any case: `median_ttft_ms`, `p99_tpot_ms`, ..."""
    for key in ("ttft", "tpot"):
        median = _number(data.get(f"median_{key}_ms"))
        if median is not None:
            found = {word: _number(data.get(f"{word}_{key}_ms")) for word in ("mean", "std", "p90", "p95", "p99")}
            others = {f"{word}_s": value / 1e3 for word, value in found.items() if value is not None}
            yield key, LatencySummary(median / 1e3, others, name)


def _read_requests(path: Path) -> Requests:
    if path.suffix == ".jsonl":
        lines = [_parse(line) for line in _read_text(path).splitlines()]
        rows = [line for line in lines if isinstance(line, dict)]
        ttft, tpot = (tuple(_positive(row.get(key) for row in rows)) for key in ("ttft_s", "tpot_s"))
        return ttft, tpot, _sum_requests(rows, path.name)
    data = _read_json(path)
    if not isinstance(data, dict):
        return (), (), None
    ttft, tpot, load = _read_result(data, path.name)
    return ttft, tpot, load if load is not None and (load.duration_s or load.num_requests) else None


def _sum_requests(rows: list[dict[str, Any]], name: str) -> ServingLog | None:
    """Return the throughput of a log with `start_s` and `end_s` (or `latency_s`) and `output_tokens` per request."""
    spans = []
    tokens: list[int] = []
    for row in rows:
        start, end, latency = (_number(row.get(key), low=-math.inf) for key in ("start_s", "end_s", "latency_s"))
        if start is not None and (end is not None or latency is not None):
            spans.append((start, end if end is not None else start + (latency or 0.0)))
        count = _whole(row.get("output_tokens"))
        tokens += [count] if count is not None else []
    if not spans and not tokens:
        return None
    duration = max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0
    complete = len(tokens) == len(rows)
    return ServingLog(name, duration if duration > 0 else None, len(spans) or None, sum(tokens) if complete else None)


def _number(value: object, low: float = 0.0) -> float | None:
    """Return a finite number above `low`; None for anything else."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > low
    return float(value) if good and isinstance(value, int | float) else None


def _whole(value: object) -> int | None:
    """Return a count of 0 or more; None for anything else."""
    number = _number(value, low=-1.0)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def _positive(values: object) -> Iterable[float]:
    """Yield the values that are finite numbers above 0."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | dict):
        return
    yield from (number for value in values if (number := _number(value)) is not None)


def _read_json(path: Path) -> Any:
    return _parse(_read_text(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size <= MAX_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
