"""Kernels: which take the most time, how short they are, and how fast they are launched."""

from __future__ import annotations

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.compute_class import ComputeClass
from cclsearch.trace.events import Reason
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.kernel_names import kernel_family
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.view import RankView, TraceView

SMALL_KERNEL_NS = 5_000
NUM_TOP = 5


def family_seconds(view: RankView, rows: Int64s) -> dict[str, float]:
    """Return family -> seconds per window of the rows that start in a window."""
    rows = view.in_windows(rows)
    total_ns = np.bincount(
        view.table.name_id[rows], weights=view.table.dur_ns[rows].astype(float), minlength=len(view.table.names)
    )
    windows = max(len(view.windows.spans_W2), 1)
    families: dict[str, float] = {}
    for name_id in np.flatnonzero(total_ns).tolist():
        family = kernel_family(view.table.names[name_id])
        families[family] = families.get(family, 0.0) + float(total_ns[name_id]) / 1e9 / windows
    return families


def mean_family_seconds(trace: TraceView) -> dict[str, float]:
    """Return compute kernel family -> seconds per step (mean over ranks), largest first."""
    totals: dict[str, float] = {}
    for view in trace.ranks.values():
        for family, seconds in family_seconds(view, view.compute_kernels).items():
            totals[family] = totals.get(family, 0.0) + seconds / len(trace.ranks)
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _top_share(trace: TraceView, count: int) -> tuple[float, dict[str, float]]:
    families = mean_family_seconds(trace)
    total = sum(families.values())
    if not total:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no compute was recorded")
    return sum(list(families.values())[:count]) / total, families


@metric(
    "top_kernels",
    unit="fraction",
    over="trace",
    summary=f"share of compute time of the {NUM_TOP} kernel families with the most time (names in --json)",
)
def measure_top_kernels(trace: TraceView) -> Draft:
    """Share of the top families; `inputs` has their seconds per step, shares and classes."""
    share, families = _top_share(trace, NUM_TOP)
    total = sum(families.values())
    top: list[JsonValue] = [
        {"name": name, "seconds_per_step": seconds, "share": seconds / total}
        for name, seconds in list(families.items())[: 2 * NUM_TOP]
    ]
    inputs: dict[str, JsonValue] = {"kernels": top, "by_class": _class_shares(trace)}
    return Draft(share, reason=trace.window_reason, n_steps=trace.num_steps, inputs=inputs)


def _class_shares(trace: TraceView) -> dict[str, JsonValue]:
    totals = np.zeros(len(ComputeClass))
    for view in trace.ranks.values():
        rows = view.in_windows(view.compute_kernels)
        classes = view.table.name_class[view.table.name_id[rows]]
        totals += np.bincount(classes, weights=view.table.dur_ns[rows].astype(float), minlength=len(totals))
    whole = totals.sum()
    order = np.argsort(-totals)
    return (
        {ComputeClass(i).name.lower(): float(totals[i] / whole) for i in order.tolist() if totals[i]} if whole else {}
    )


@metric("concentration", unit="fraction", over="trace")
def measure_concentration(trace: TraceView) -> Draft:
    """Share of compute time of the largest kernel family. `inputs` has the share of the five largest."""
    share, families = _top_share(trace, 1)
    five, _ = _top_share(trace, NUM_TOP)
    inputs: dict[str, JsonValue] = {"kernel": next(iter(families)), "top_5": five}
    return Draft(share, reason=trace.window_reason, n_steps=trace.num_steps, inputs=inputs)


def _require_kernels(view: RankView) -> Int64s:
    if view.table.accelerator == "cpu":
        raise NotAvailable(Reason.NO_GPU_EVENTS, "a CPU has operators, not kernels")
    rows = view.in_windows(view.compute_kernels)
    if not len(rows):
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no kernel was recorded")
    return rows


@metric(
    "small_kernel_frac",
    unit="fraction",
    better="lower",
    summary=f"share of kernel time in compute kernels shorter than {SMALL_KERNEL_NS // 1000} us",
)
def measure_small_kernel_frac(rank: RankView) -> float:
    """Summed duration of small kernels over that of all compute kernels."""
    dur_ns = rank.table.dur_ns[_require_kernels(rank)]
    if not dur_ns.sum():
        raise NotAvailable(Reason.NO_GPU_EVENTS, "all kernels have duration 0")
    return float(dur_ns[dur_ns < SMALL_KERNEL_NS].sum() / dur_ns.sum())


@metric("launch_rate", unit="kernels/s", over="trace")
def measure_launch_rate(trace: TraceView) -> Draft:
    """Kernels started per second (queue depth of the device in --json). Per second of step time, mean over ranks; the
    queue depth is the number of events launched, not started."""
    rates, depths = {}, []
    for rank, view in trace.ranks.items():
        kernels = _require_kernels(view)
        rates[rank] = len(kernels) / (float(view.parts.window_ns_W.sum()) / 1e9)
        depths.append(_queue_depths(view))
    known = np.concatenate(depths)
    inputs: dict[str, JsonValue] = {}
    if len(known):
        inputs = {"queue_depth_p50": float(np.median(known)), "queue_depth_p5": float(np.percentile(known, 5))}
    reason = None if len(known) else Reason.NO_LAUNCH_RECORDS
    detail = "" if len(known) else "no launch records: the queue depth is not known"
    value = float(np.mean(list(rates.values())))
    return Draft(value, rates, n_steps=trace.num_steps, reason=reason, detail=detail, inputs=inputs)


def _queue_depths(view: RankView) -> Int64s:
    """Return the number of events launched but not started, at the start of each device event."""
    rows = view.device_rows
    rows = rows[view.table.launch[rows] >= 0]
    launched = np.sort(view.table.ts_ns[view.table.launch[rows]])
    started = np.sort(view.table.ts_ns[rows])
    return np.searchsorted(launched, started, side="right") - np.arange(len(started)) - 1
