"""Memory: copy bandwidth and peak use."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.events import Kind, Reason
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import RankView, TraceView

_DIRECTIONS = (
    ("h2d", re.compile(r"HtoD|Host-to-Device|Host -> Device|Pinned -> Device|Pageable -> Device", re.IGNORECASE)),
    ("d2h", re.compile(r"DtoH|Device-to-Host|Device -> (?:Host|Pinned|Pageable)", re.IGNORECASE)),
    ("p2p", re.compile(r"PtoP|Peer", re.IGNORECASE)),
    ("d2d", re.compile(r"DtoD|Device-to-Device|Device -> Device", re.IGNORECASE)),
)
_DIRECTION_PRIORITY = ("h2d", "d2h", "d2d", "p2p", "other")
"""The value of `mem_copy_bw` is for the first of these directions that the trace has."""


def copy_direction(name: str) -> str:
    """Return `h2d`, `d2h`, `d2d`, `p2p` or `other` for the name of a copy event."""
    return next((label for label, pattern in _DIRECTIONS if pattern.search(name)), "other")


def _copies_by_direction(view: RankView) -> dict[str, tuple[int, int]]:
    """Return direction -> (bytes, ns) of the device's copies with known bytes."""
    table = view.table
    rows = view.rows(Kind.MEMCPY)
    rows = rows[(table.bytes[rows] > 0) & (table.dur_ns[rows] > 0)]
    labels = np.array([copy_direction(name) for name in table.names] or [""])[table.name_id[rows]]
    return {
        str(label): (int(table.bytes[rows[labels == label]].sum()), int(table.dur_ns[rows[labels == label]].sum()))
        for label in np.unique(labels)
    }


@metric("mem_copy_bw", unit="GB/s", better="higher", over="trace")
def measure_mem_copy_bw(trace: TraceView) -> Draft:
    """Bandwidth of copies from host to device, 1 GB = 1e9 bytes (other directions in --json). Mean over ranks; without
    such copies, of the first of d2h, d2d and p2p that occurs (`direction` in `inputs`, which also has the figures of
    all directions). Directions use different links, so they are never mixed. Kernels with `copy` in their names are not
    copies."""
    found = {rank: _copies_by_direction(view) for rank, view in trace.ranks.items()}
    moved_of: Counter[str] = Counter()
    ns_of: Counter[str] = Counter()
    for by_direction in found.values():
        for label, (moved, ns) in by_direction.items():
            moved_of[label] += moved
            ns_of[label] += ns
    direction = next((label for label in _DIRECTION_PRIORITY if label in ns_of), None)
    if direction is None:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no memory copy records its bytes")
    rates: dict[int, float | None] = {}
    for rank, by_direction in found.items():
        moved, ns = by_direction.get(direction, (0, 0))
        rates[rank] = moved / ns if ns else None
    inputs: dict[str, JsonValue] = {
        "direction": direction,
        "by_direction_gbps": {label: moved_of[label] / ns for label, ns in ns_of.items()},
        "by_direction_bytes": dict(moved_of),
        "by_direction_s": {label: ns / 1e9 for label, ns in ns_of.items()},
    }
    return mean_over_ranks(rates, inputs, detail=f"{direction} copies")


@metric("peak_memory", unit="B", better="lower", over="trace", needs_times=False)
def measure_peak_memory(trace: TraceView) -> Draft:
    """Peak memory that the run reports, largest rank; else the allocator's peak in the profiled window. The run's peak
    is that of `result.json` for its whole duration; the allocator's is the largest allocated total in the file, with
    the reserved bytes in `inputs` if recorded."""
    log = trace.trace_set.run_log
    on_cpu = all(view.table.accelerator == "cpu" for view in trace.ranks.values())
    if log is not None and log.peak_memory_bytes and log.is_device_memory != on_cpu:
        ran = {rank: float(peak) for rank, peak in enumerate(log.peak_memory_bytes)}
        what = "over the whole run" if log.is_device_memory else "resident set of a process over the whole run"
        return Draft(max(ran.values()), dict(ran), detail=f"{what}, from result.json")
    peaks: dict[int, float | None] = {}
    reserved: dict[str, JsonValue] = {}
    for rank, view in trace.ranks.items():
        points = view.table.memory
        on_device = points.device >= 0 if view.table.accelerator != "cpu" else np.ones(len(points.ts_ns), dtype=bool)
        allocated = points.allocated_bytes[on_device]
        peaks[rank] = float(allocated.max()) if len(allocated) and allocated.max() > 0 else None
        reserved_bytes = points.reserved_bytes[on_device]
        if len(reserved_bytes) and reserved_bytes.max() > 0:
            reserved[str(rank)] = int(reserved_bytes.max())
    found = [peak for peak in peaks.values() if peak is not None]
    if not found:
        raise NotAvailable(Reason.FORMAT_UNSUPPORTED, "no allocator events (profile_memory=True)")
    partial = len(found) < len(peaks)
    return Draft(
        max(found),
        peaks,
        reason=Reason.RANKS_MISSING if partial else None,
        detail="without memory allocated before the profiled window",
        inputs={"reserved_bytes_by_rank": reserved} if reserved else {},
    )
