"""Use of the device: memory, copies, and the intra-chip metrics of DABench-LLM (allocation, waves and resources)."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from cclsearch.trace.events import DeviceInfo, Kind, LaunchShape, Reason
from cclsearch.trace.intervals import Int64s, covered_ns
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.metrics.efficiency import achieved_flops, at_most_one, describe_coverage, find_peak
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import RankView, TraceView, require_windows

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


Floats = npt.NDArray[np.float64]

MAX_BLOCKS_PER_SM = 32


def _rows_with_grid(view: RankView) -> tuple[Int64s, Floats]:
    """Return the compute rows in the windows with known blocks per multiprocessor (SM), and these numbers."""
    require_windows(view)
    rows = view.in_windows(view.compute_kernels)
    blocks = view.table.blocks_per_sm[rows].astype(float)
    known = np.isfinite(blocks) & (blocks > 0) & (view.table.dur_ns[rows] > 0)
    if not known.any():
        raise NotAvailable(Reason.NO_GRID_INFO, "no kernel records its grid")
    return rows[known], blocks[known]


@metric("allocation_ratio", unit="fraction", better="higher", over="trace")
def measure_allocation_ratio(trace: TraceView) -> Draft:
    """Share of multiprocessors (SMs) that compute kernels occupy, times compute_frac. The share is the
    duration-weighted mean of min(1, blocks/SM)."""
    ratios, coverages = {}, []
    for rank, view in trace.ranks.items():
        rows, blocks = _rows_with_grid(view)
        coverage = float(np.average(np.minimum(blocks, 1.0), weights=view.table.dur_ns[rows]))
        busy = float(covered_ns(view.compute_M2, view.windows.spans_W2).sum() / view.parts.window_ns_W.sum())
        coverages.append(coverage)
        ratios[rank] = coverage * busy
    return mean_over_ranks(ratios, {"sm_coverage": float(np.mean(coverages))})


def resident_blocks(grid: LaunchShape, device: DeviceInfo) -> int | None:
    """Return how many blocks of a launch fit on one SM at a time; None if the trace does not record enough."""
    if not device.max_threads_per_sm or not grid.threads_per_block:
        return None
    limits = [MAX_BLOCKS_PER_SM, device.max_threads_per_sm // grid.threads_per_block]
    if device.registers_per_sm and grid.registers_per_thread:
        limits.append(device.registers_per_sm // (grid.registers_per_thread * grid.threads_per_block))
    if device.shared_memory_per_sm_bytes and grid.shared_memory_bytes:
        limits.append(device.shared_memory_per_sm_bytes // grid.shared_memory_bytes)
    return max(min(limits), 1)


@metric("wave_balance", unit="fraction", better="higher", over="trace")
def measure_wave_balance(trace: TraceView) -> Draft:
    """Fill of the waves of thread blocks: waves over waves rounded up, weighted by duration. Mean of b / ceil(b), b =
    blocks per SM over the blocks that fit on an SM at a time."""
    ratios, bounded = {}, False
    for rank, view in trace.ranks.items():
        rows, blocks = _rows_with_grid(view)
        resident, unknown = _resident_by_row(view, rows)
        bounded |= unknown
        waves = blocks / resident
        ratios[rank] = float(np.average(waves / np.ceil(waves), weights=view.table.dur_ns[rows]))
    return mean_over_ranks(
        ratios,
        reason=Reason.NO_GRID_INFO if bounded else None,
        detail="the number of blocks that fit on an SM is unknown for some kernels: assumed to be 1" if bounded else "",
    )


def _resident_by_row(view: RankView, rows: Int64s) -> tuple[Floats, bool]:
    table = view.table
    devices = {device.ordinal: device for device in table.devices}
    device = devices.get(int(table.device[rows[0]])) or next(iter(devices.values()), None)
    per_grid = [resident_blocks(grid, device) if device else None for grid in table.grids] + [None]
    of_row = [per_grid[i] for i in table.grid_id[rows].tolist()]
    return np.array([float(blocks or 1) for blocks in of_row]), any(blocks is None for blocks in of_row)


@metric("resource_efficiency", unit="fraction", better="higher", over="trace")
def measure_resource_efficiency(trace: TraceView) -> Draft:
    """Achieved FLOP/s of matrix products over the roofline limit of the chip. The limit is min(peak, intensity x memory
    bandwidth), or the peak alone if bytes are unknown."""
    card = trace.card
    if card is None:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "needs a workload card (--card) with the dtype")
    found = achieved_flops(trace)
    peak = find_peak(trace, card.precision)
    intensity = _intensity(trace)
    memory = peak.memory_bytes_per_s
    roof = min(peak.flops, intensity * memory) if intensity and memory else peak.flops
    shares = {rank: one.per_s / roof for rank, one in found.items()}
    coverage, reason, partly = describe_coverage(found)
    without_bytes = "" if intensity else "bytes are not recorded: compared with the peak, not with the roofline"
    draft = mean_over_ranks(
        shares,
        {"device": peak.device, "roof_flops": roof, "flop_per_byte": intensity, "coverage": coverage},
        reason=reason,
        detail="; ".join(filter(None, (without_bytes, partly))),
    )
    return at_most_one(draft, "roofline")


def _intensity(trace: TraceView) -> float | None:
    """Return FLOP per byte of device memory over all runs of operations that record both (XLA); None without them."""
    flops = bytes_ = 0.0
    for view in trace.ranks.values():
        rows = view.in_windows(view.compute_kernels)
        runs = np.bincount(view.table.name_id[rows], minlength=len(view.table.names)).tolist()
        for name_id, cost in view.table.op_costs.items():
            if cost.flops and cost.bytes_accessed and math.isfinite(cost.flops + cost.bytes_accessed):
                flops += cost.flops * runs[name_id]
                bytes_ += cost.bytes_accessed * runs[name_id]
    return flops / bytes_ if bytes_ else None
