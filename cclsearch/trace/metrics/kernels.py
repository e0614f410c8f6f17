"""Kernels: the most expensive ones, how short they are, and how fast they are launched."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from cclsearch.trace.events import Reason
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.metrics.totals import seconds_by_class
from cclsearch.trace.names.kernels import kernel_family
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import RankView, TraceView

SMALL_KERNEL_NS = 5_000
_EDGES_US = (0, 1, 2, 5, 10, 20, 50, 100, 1000, 10_000)
NUM_TOP = 5


def mean_family_seconds(trace: TraceView) -> dict[str, float]:
    """Return compute kernel family -> seconds per step (mean over ranks), largest first."""
    totals: dict[str, float] = defaultdict(float)
    for view in trace.ranks.values():
        seconds_N, _ = view.sum_by_name(view.compute_kernels)
        for number in np.flatnonzero(seconds_N).tolist():
            totals[kernel_family(view.table.names[number])] += float(seconds_N[number]) / len(trace.ranks)
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
    by_class: dict[str, JsonValue] = {name: value / total for name, value in seconds_by_class(trace).items()}
    return Draft(share, inputs={"kernels": top, "by_class": by_class})


@metric("concentration", unit="fraction", over="trace")
def measure_concentration(trace: TraceView) -> Draft:
    """Share of compute time of the largest kernel family. `inputs` has the share of the five largest."""
    share, families = _top_share(trace, 1)
    five, _ = _top_share(trace, NUM_TOP)
    return Draft(share, inputs={"kernel": next(iter(families)), "top_5": five})


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
    over="trace",
    summary=f"share of kernel time in compute kernels shorter than {SMALL_KERNEL_NS // 1000} us",
)
def measure_small_kernel_frac(trace: TraceView) -> Draft:
    """Summed duration of small kernels over that of all compute kernels, mean over ranks. `inputs` has their number and
    a histogram of the durations of all compute kernels."""
    shares: dict[int, float | None] = {}
    count_B, seconds_B = np.zeros(len(_EDGES_US)), np.zeros(len(_EDGES_US))
    for rank, view in trace.ranks.items():
        dur_ns = view.table.dur_ns[_require_kernels(view)]
        bins = np.searchsorted(np.array(_EDGES_US) * 1000, dur_ns, side="right") - 1
        count_B += np.bincount(bins, minlength=len(_EDGES_US))
        seconds_B += np.bincount(bins, weights=dur_ns / 1e9, minlength=len(_EDGES_US))
        shares[rank] = float(dur_ns[dur_ns < SMALL_KERNEL_NS].sum() / dur_ns.sum()) if dur_ns.sum() else None
    missing = NotAvailable(Reason.NO_GPU_EVENTS, "all kernels have duration 0")
    return mean_over_ranks(shares, _describe_durations(count_B, seconds_B), missing=missing)


def _describe_durations(count_B: npt.NDArray[np.float64], seconds_B: npt.NDArray[np.float64]) -> dict[str, JsonValue]:
    """Return number and share of small kernels, and number and seconds of kernels by duration; B: `_EDGES_US`."""
    histogram: dict[str, JsonValue] = {}
    for i, low in enumerate(_EDGES_US):
        label = f"{low} to {_EDGES_US[i + 1]} us" if i + 1 < len(_EDGES_US) else f"{low} us and more"
        if count_B[i]:
            histogram[label] = {"num_kernels": int(count_B[i]), "seconds": float(seconds_B[i])}
    small = int(count_B[: _EDGES_US.index(SMALL_KERNEL_NS // 1000)].sum())
    return {
        "num_small": small,
        "num_kernels": int(count_B.sum()),
        "small_count_frac": small / int(count_B.sum()),
        "histogram": histogram,
    }


@metric("launch_rate", unit="kernels/s", over="trace")
def measure_launch_rate(trace: TraceView) -> Draft:
    """Kernels started per second (queue depth of the device in --json). Per second of step time, mean over ranks; the
    queue depth is the number of events launched, not started; its percentiles are means over ranks."""
    rates: dict[int, float | None] = {}
    depths: dict[str, list[float]] = {"p50": [], "p5": []}
    for rank, view in trace.ranks.items():
        kernels = _require_kernels(view)
        rates[rank] = len(kernels) / (float(view.parts.window_ns_W.sum()) / 1e9)
        if len(known := _queue_depths(view)):
            for name, found in depths.items():
                found.append(float(np.percentile(known, int(name[1:]))))
    inputs: dict[str, JsonValue] = {f"queue_depth_{name}": float(np.mean(v)) for name, v in depths.items() if v}
    reason = None if inputs else Reason.NO_LAUNCH_RECORDS
    detail = "" if inputs else "no launch records: the queue depth is not known"
    return mean_over_ranks(rates, inputs, reason=reason, detail=detail)


def _queue_depths(view: RankView) -> Int64s:
    """Return the number of events launched but not started, at the start of each device event."""
    rows = view.device_rows
    rows = rows[view.table.launch[rows] >= 0]
    launched = np.sort(view.table.ts_ns[view.table.launch[rows]])
    started = np.sort(view.table.ts_ns[rows])
    return np.searchsorted(launched, started, side="right") - np.arange(len(started)) - 1
