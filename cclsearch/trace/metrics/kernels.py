"""Kernels and operators: seconds, families, lengths, launches and FLOP; calls of collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from cclsearch.core.text import one_line
from cclsearch.trace.events import Kind, Reason
from cclsearch.trace.flops import count_ops, count_undetermined
from cclsearch.trace.intervals import Int64s, covered_ns, total_ns, unite_spans
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.names.kernels import ComputeClass, kernel_family
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import RankView, TraceView, require_windows


def seconds_by_class(trace: TraceView) -> dict[str, float]:
    """Return class of compute -> summed seconds of its kernels per step (mean over ranks), largest first."""
    totals = np.zeros(len(ComputeClass))
    for view in trace.ranks.values():
        seconds_N, _ = view.sum_by_name(view.compute_kernels)
        totals += np.bincount(view.table.name_class, weights=seconds_N, minlength=len(totals)) / len(trace.ranks)
    return {ComputeClass(i).name.lower(): float(totals[i]) for i in np.argsort(-totals).tolist() if totals[i]}


def _measure_covered(
    trace: TraceView, rows_of: Callable[[RankView], Int64s], more: Mapping[str, JsonValue] | None = None
) -> Draft:
    """Return the seconds per step that the rows cover, mean over ranks; sums and the whole file are in `inputs`."""
    covered, summed, whole, whole_sum = {}, [], [], []
    for rank, view in trace.ranks.items():
        windows_W2 = require_windows(view)
        rows = rows_of(view)
        spans = view.merge_rows(rows)
        covered[rank] = float(covered_ns(spans, windows_W2).mean()) / 1e9
        summed.append(float(view.table.dur_ns[view.in_windows(rows)].sum()) / 1e9 / max(len(windows_W2), 1))
        whole.append(total_ns(spans) / 1e9)
        whole_sum.append(float(view.table.dur_ns[rows].sum()) / 1e9)
    inputs: dict[str, JsonValue] = {
        "max_s": max(covered.values()),
        "summed_s": float(np.mean(summed)),
        "whole_file_s": float(np.mean(whole)),
        "whole_file_summed_s": float(np.mean(whole_sum)),
        **(more or {}),
    }
    return mean_over_ranks(covered, inputs)


def _kernels(view: RankView) -> Int64s:
    return np.sort(np.concatenate([view.compute_kernels, view.comm_rows]))


@metric("kernel_time", unit="s", over="trace")
def measure_kernel_time(trace: TraceView) -> Draft:
    """Time per step in which kernels run, of compute or communication. Covered seconds, mean over ranks; `inputs` has
    the summed durations, in which concurrent kernels count several times, and both over the whole file."""
    return _measure_covered(trace, _kernels)


@metric("compute_time", unit="s", over="trace")
def measure_compute_time(trace: TraceView) -> Draft:
    """Time per step in which compute runs. Covered seconds, mean over ranks; `inputs` has the summed seconds by class
    of kernel."""
    by_class: dict[str, JsonValue] = dict(seconds_by_class(trace))
    return _measure_covered(trace, lambda view: view.compute_kernels, {"by_class_s": by_class})


@metric("trace_span", unit="s", over="trace")
def measure_trace_span(trace: TraceView) -> Draft:
    """Time from the first start to the last end of work on the device, longest rank. `inputs` has that of all events,
    those of the host included."""
    spans: dict[int, float | None] = {}
    host = 0.0
    for rank, view in trace.ranks.items():
        table = view.table
        busy = view.busy_M2
        spans[rank] = float(busy[-1, 1] - busy[0, 0]) / 1e9 if len(busy) else None
        if len(table):
            host = max(host, float(table.end_ns.max() - table.ts_ns.min()) / 1e9)
    found = [span for span in spans.values() if span is not None]
    if not found:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no device events")
    return Draft(max(found), spans, inputs={"all_events_s": host}, needs_steps=False)


@metric("busy_frac", unit="fraction", better="higher", over="trace")
def measure_busy_frac(trace: TraceView) -> Draft:
    """Share of a step in which the device is busy with compute, communication or copies: 1 - idle_frac."""
    shares = {}
    for rank, view in trace.ranks.items():
        windows_W2 = require_windows(view)
        shares[rank] = float(covered_ns(view.busy_M2, windows_W2).sum() / view.parts.window_ns_W.sum())
    kernels = []
    for view in trace.ranks.values():
        spans = unite_spans(view.compute_M2, view.comm_M2) if len(view.comm_rows) else view.compute_M2
        kernels.append(float(covered_ns(spans, view.windows.spans_W2).sum() / view.parts.window_ns_W.sum()))
    return mean_over_ranks(shares, {"kernels_only": float(np.mean(kernels))})


@metric("comm_kernel_frac", unit="fraction", better="lower", over="trace")
def measure_comm_kernel_frac(trace: TraceView) -> Draft:
    """Share of communication in the summed time of all kernels. Overlapped and waiting time count fully, so it is not
    what a step loses: that is exposed_comm_frac."""
    shares: dict[int, float | None] = {}
    for rank, view in trace.ranks.items():
        comm = float(view.table.dur_ns[view.in_windows(view.comm_rows)].sum())
        both = comm + float(view.table.dur_ns[view.in_windows(view.compute_kernels)].sum())
        shares[rank] = comm / both if both else None
    return mean_over_ranks(shares, missing=NotAvailable(Reason.NO_GPU_EVENTS, "no kernel was recorded"))


@metric("comm_calls", unit="calls/step", over="trace", needs_times=False)
def measure_comm_calls(trace: TraceView) -> Draft:
    """Communication calls of a rank per step, mean over ranks. `inputs` has them by collective, and the calls of all
    ranks in the whole file."""
    counts: dict[int, float | None] = {}
    by_collective: dict[str, float] = {}
    for rank, view in trace.ranks.items():
        steps = max(len(require_windows(view) if trace.is_timed else view.windows.spans_W2), 1)
        rows = view.in_windows(view.comm_rows)
        counts[rank] = len(rows) / steps
        for call_id, count in enumerate(np.bincount(view.table.coll_id[rows], minlength=1).tolist()):
            if count:
                kind = str(view.table.collectives[call_id].kind)
                by_collective[kind] = by_collective.get(kind, 0.0) + count / steps / len(trace.ranks)
    inputs: dict[str, JsonValue] = {
        "by_collective": {kind: by_collective[kind] for kind in sorted(by_collective, key=lambda k: -by_collective[k])},
        "whole_file_all_ranks": sum(len(view.comm_rows) for view in trace.ranks.values()),
    }
    return mean_over_ranks(
        counts, inputs, detail="" if inputs["whole_file_all_ranks"] else "no communication was recorded"
    )


@metric("comm_mean_time", unit="s", better="lower", over="trace")
def measure_comm_mean_time(trace: TraceView) -> Draft:
    """Mean duration of a communication call, over all ranks, waiting for other ranks included. `inputs` has mean,
    median and number by collective, and the mean without waiting if the collectives are matched over ranks."""
    durations: dict[str, list[float]] = {}
    per_rank: dict[int, float | None] = {}
    for rank, view in trace.ranks.items():
        rows = view.in_windows(view.comm_rows)
        seconds = view.table.dur_ns[rows] / 1e9
        per_rank[rank] = float(seconds.mean()) if len(rows) else None
        kinds = [str(call.kind) for call in view.table.collectives]
        for call_id, value in zip(view.table.coll_id[rows].tolist(), seconds.tolist(), strict=True):
            durations.setdefault(kinds[call_id], []).append(value)
    everything = [value for values in durations.values() for value in values]
    if not everything:
        raise NotAvailable(Reason.NO_COMM_EVENTS, "no communication was recorded")
    by_collective: dict[str, JsonValue] = {
        kind: {"mean_s": float(np.mean(values)), "median_s": float(np.median(values)), "num_calls": len(values)}
        for kind, values in sorted(durations.items(), key=lambda item: -sum(item[1]))
    }
    transfers = [group.transfer_ns_K for group in trace.matching.groups] if len(trace.ranks) > 1 else []
    inputs: dict[str, JsonValue] = {"by_collective": by_collective}
    inputs["transfer_mean_s"] = float(np.concatenate(transfers).mean()) / 1e9 if transfers else None
    return Draft(float(np.mean(everything)), per_rank, inputs=inputs)


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


MAX_NAMES = 100
"""Operators named in `inputs`, the most frequent first."""


def _rows_in_steps(view: RankView, rows: Int64s) -> Int64s:
    """Return the rows of the host that start inside the markers of the steps in use; all of them without steps."""
    windows = view.windows
    return rows[np.isin(view.table.step_id[rows], windows.step_index_W)] if windows.are_steps else rows


def _largest(counts: dict[str, float], per: float) -> dict[str, JsonValue]:
    largest = sorted(counts, key=lambda name: -counts[name])[:MAX_NAMES]
    return {one_line(name, 100): counts[name] / per for name in largest}


@metric("op_calls", unit="calls/step", over="trace", needs_times=False)
def measure_op_calls(trace: TraceView) -> Draft:
    """Operators that the host calls per step, those inside others included, mean over ranks. `inputs` has them by name,
    and the Triton kernels that an execution trace records."""
    calls: dict[int, float | None] = {}
    by_name: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for rank, view in trace.ranks.items():
        table, steps = view.table, max(view.windows.num_steps, 1)
        rows = _rows_in_steps(view, view.rows(Kind.CPU_OP))
        calls[rank] = len(rows) / steps
        of_rank = [(by_name, rows)]
        if not table.is_timed:
            of_rank.append((kernels, _rows_in_steps(view, view.compute_kernels)))
        for counts, counted in of_rank:
            for name, count in enumerate(np.bincount(table.name_id[counted], minlength=1).tolist()):
                if count:
                    counts[table.names[name]] += count / steps
    if not by_name and not kernels:
        raise NotAvailable(Reason.NO_LAUNCH_RECORDS, "no operator of the host was recorded")
    inputs: dict[str, JsonValue] = {"by_name": _largest(by_name, len(calls)), "num_names": len(by_name)}
    if kernels:
        inputs["triton_kernels"] = _largest(kernels, len(calls))
    return mean_over_ranks(calls, inputs)


@metric("op_flops", unit="FLOP/step", over="trace", needs_times=False)
def measure_op_flops(trace: TraceView) -> Draft:
    """FLOP per step of matrix products, attention and convolutions, from their shapes, mean over ranks. An operator
    inside another counts once; `inputs` has them by operator, and the calls whose shapes do not determine them."""
    flops: dict[int, float | None] = {}
    by_name: dict[str, float] = defaultdict(float)
    unknown = known = 0
    for rank, view in trace.ranks.items():
        table, steps = view.table, max(view.windows.num_steps, 1)
        ops, of_op = count_ops(view)
        flops[rank] = float(of_op.sum()) / steps if len(ops) else None
        known += len(ops)
        unknown += count_undetermined(view, ops)
        for name, total in enumerate(np.bincount(table.name_id[ops], weights=of_op, minlength=1).tolist()):
            if total:
                by_name[table.names[name]] += total / steps
    missing = NotAvailable(Reason.NO_SHAPES, "no matrix product, attention or convolution records its shapes")
    inputs: dict[str, JsonValue] = {
        "by_operator": _largest(by_name, sum(value is not None for value in flops.values())),
        "num_calls": known,
        "num_calls_without_flops": unknown,
    }
    reason = Reason.NO_SHAPES if unknown else None
    detail = f"a lower bound: the shapes of {unknown} of {unknown + known} calls do not determine it" if unknown else ""
    return mean_over_ranks(flops, inputs, reason=reason, detail=detail, missing=missing)
