"""Figures that are not in any trace, from files next to it: the run's peak memory and a server's request log."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclsearch.core.job_file import RESULT_BYTES, JobFileError, parse_json, read_job_bytes

RESULT_FILE, TRACE_FOLDER = "result.json", "trace"
"""Names from the trial contract."""
REQUEST_LOGS = ("requests.jsonl", "requests.json")
"""One object per line with `ttft_s` and `tpot_s` (seconds), or one object with the lists `ttfts` and `itls` (seconds
between a request's tokens), as `vllm bench serve --save-result --save-detailed` writes it."""


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


def read_run_log(path: Path) -> RunLog | None:
    """Return the figures found in the traces' folder or in the trial's folder around it; None without any.

    A file that cannot be read or has no such figures is ignored.
    """
    folder = path if path.is_dir() else path.parent
    folders = (folder, folder.parent) if folder.name == TRACE_FOLDER else (folder,)
    result = next((found for place in folders if (found := _read_json(place / RESULT_FILE)) is not None), None)
    peaks = tuple(_positive(result.get("peak_memory_bytes"))) if isinstance(result, dict) else ()
    logs = (_read_requests(place / name) for place in folders for name in REQUEST_LOGS)
    ttft, tpot = next((log for log in logs if any(log)), ((), ()))
    if not (peaks or ttft or tpot):
        return None
    is_device = not (isinstance(result, dict) and result.get("memory_kind") == "rss")
    return RunLog(tuple(int(peak) for peak in peaks), is_device, ttft, tpot)


def _read_requests(path: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if path.suffix == ".jsonl":
        lines = [_parse(line) for line in _read(path).splitlines()]
        rows = [line for line in lines if isinstance(line, dict)]
        return tuple(_positive(r.get("ttft_s") for r in rows)), tuple(_positive(r.get("tpot_s") for r in rows))
    data = _read_json(path)
    if not isinstance(data, dict):
        return (), ()
    gaps = [list(_positive(request)) for request in data.get("itls") or () if isinstance(request, list)]
    return tuple(_positive(data.get("ttfts"))), tuple(sum(many) / len(many) for many in gaps if many)


def _positive(values: object) -> Iterable[float]:
    """Yield the values that are finite numbers above 0."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | dict):
        return
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
            yield value


def _read_json(path: Path) -> Any:
    return _parse(_read(path))


def _read(path: Path) -> bytes:
    try:
        return read_job_bytes(path, RESULT_BYTES)
    except (OSError, JobFileError):
        return b""


def _parse(text: bytes) -> Any:
    try:
        return parse_json(text)
    except JobFileError:
        return None
