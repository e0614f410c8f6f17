"""Launches: delay from the host's call to the start on the device, queue length, idle time, and the critical path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.collectives import explain_no_communication
from cclsearch.trace.diagnosis.causes import CAUSES, DIAGNOSED, Cause, median_causes, split_idle_ns
from cclsearch.trace.diagnosis.critical_path import PATH_PARTS, require_launches, walk_critical_path
from cclsearch.trace.events import Reason
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import RankView, TraceView

LONG_DELAY_NS = 100_000
LONG_CALL_NS = 50_000
"""Limits of HolisticTraceAnalysis' launch statistics: `launch_delay_cutoff` and `runtime_cutoff`."""


def _launched(view: RankView) -> Int64s:
    """Return the device rows in the windows with a launch record; raises NotAvailable if there are none."""
    rows = view.in_windows(view.device_rows)
    rows = rows[view.table.launch[rows] >= 0]
    if not len(rows):
        raise NotAvailable(Reason.NO_LAUNCH_RECORDS, "no event of the device has a launch record")
    return rows


@metric("launch_delay", unit="s", over="trace")
def measure_launch_delay(trace: TraceView) -> Draft:
    """Time from the end of the host's call to the start on the device: median, mean over ranks. As
    HolisticTraceAnalysis defines it; 0 if the device starts first. `inputs` has percentiles (mean over
    ranks) and counts: delays above 100 us, calls above 50 us, and events shorter than their own launch call."""
    percentiles: dict[int, list[float]] = {5: [], 50: [], 95: [], 99: []}
    ranks: list[int] = []
    launches = long_delays = long_calls = short_events = total = longest = 0
    for rank, view in trace.ranks.items():
        table, rows = view.table, _launched(view)
        launch = table.launch[rows]
        delays = np.maximum(table.ts_ns[rows] - table.ts_ns[launch] - table.dur_ns[launch], 0)
        ranks.append(rank)  # keep figures, not delays: the arrays of many ranks need much memory
        for percent, seconds in zip(percentiles, np.percentile(delays, list(percentiles)) / 1e9, strict=True):
            percentiles[percent].append(float(seconds))
        launches += len(delays)
        long_delays += int((delays > LONG_DELAY_NS).sum())
        longest = max(longest, int(delays.max()))
        calls = np.unique(launch)
        long_calls += int((table.dur_ns[calls] > LONG_CALL_NS).sum())
        short_events += int((table.dur_ns[rows] < table.dur_ns[launch]).sum())
        total += len(view.in_windows(view.device_rows))
    medians: dict[int, float | None] = dict(zip(ranks, percentiles[50], strict=True))
    inputs: dict[str, JsonValue] = {
        **{f"p{p}_s": float(np.mean(percentiles[p])) for p in (5, 95, 99)},
        "max_s": longest / 1e9,
        "num_launches": launches,
        "num_delays_above_100_us": long_delays,
        "num_calls_above_50_us": long_calls,
        "num_events_shorter_than_their_call": short_events,
        "coverage": launches / max(total, 1),
    }
    return mean_over_ranks(medians, inputs)


@dataclass(frozen=True)
class QueueLength:
    """Number of events launched and not yet started, over time."""

    at_ns: Int64s
    length: Int64s
    """The length from this time on, until the next."""

    def quantile(self, share: float) -> float:
        """Return the length that is not exceeded during this share of the time."""
        held_ns = np.diff(self.at_ns)
        order = np.argsort(self.length[:-1], kind="stable")
        reached = np.cumsum(held_ns[order])
        at = int(np.searchsorted(reached, share * reached[-1]))
        return float(self.length[:-1][order][min(at, len(order) - 1)])

    @property
    def mean(self) -> float:
        """The length, weighted by time."""
        return float(np.average(self.length[:-1], weights=np.diff(self.at_ns)))


def find_queue_length(view: RankView) -> QueueLength:
    """Return the queue of a device over the whole file, from its first launch to its last start."""
    table = view.table
    rows = view.device_rows
    rows = rows[table.launch[rows] >= 0]
    if not len(rows):
        raise NotAvailable(Reason.NO_LAUNCH_RECORDS, "no event of the device has a launch record")
    started = table.ts_ns[rows]
    launched = np.minimum(table.ts_ns[table.launch[rows]], started)
    at_ns = np.concatenate([launched, started])
    change = np.concatenate([np.ones(len(rows), np.int64), -np.ones(len(rows), np.int64)])
    order = np.argsort(at_ns, kind="stable")
    return QueueLength(at_ns[order], np.cumsum(change[order]))


@metric("queue_length", unit="events", over="trace")
def measure_queue_length(trace: TraceView) -> Draft:
    """Events launched and not yet started on the device: mean over time, then over ranks. Over the whole file;
    `inputs` has percentiles over time and the largest."""
    means: dict[int, float | None] = {}
    quantiles: dict[int, list[float]] = {percent: [] for percent in (5, 50, 95)}
    longest = 0
    for rank, view in trace.ranks.items():  # keep figures, not queues: the arrays of many ranks need much memory
        queue = find_queue_length(view)
        if queue.at_ns[-1] > queue.at_ns[0]:
            means[rank] = queue.mean
            longest = max(longest, int(queue.length.max()))
            for percent, found in quantiles.items():
                found.append(queue.quantile(percent / 100))
    if not means:
        raise NotAvailable(Reason.NO_LAUNCH_RECORDS, "all launches and starts are at the same time")
    inputs: dict[str, JsonValue] = {f"p{percent}": float(np.mean(found)) for percent, found in quantiles.items()}
    inputs["max"] = longest
    value = float(np.mean([mean for mean in means.values() if mean is not None]))
    return Draft(value, means, inputs=inputs, needs_steps=False)


@metric("idle_cause", unit="fraction", over="trace")
def measure_idle_cause(trace: TraceView) -> Draft:
    """Share of device idle time that the host causes (all causes in --json). The host is late with launches or with
    input; `inputs` has the shares of all causes, and of the diagnosis' three: host (also after a synchronization),
    launch and unknown."""
    totals = dict.fromkeys(CAUSES, 0)
    shares: dict[int, float | None] = {}
    for rank, view in trace.ranks.items():
        causes = split_idle_ns(view)
        idle = sum(causes.values())
        shares[rank] = (causes["host_bound"] + causes["input"]) / idle if idle else None
        for cause, ns in causes.items():
            totals[cause] += ns
    idle = sum(totals.values())
    if not idle:
        return Draft(0.0, shares, detail="the device is never idle")
    inputs: dict[str, JsonValue] = {
        "shares": {cause: ns / idle for cause, ns in totals.items()},
        "diagnosed": {group: sum(totals[cause] for cause in causes) / idle for group, causes in DIAGNOSED.items()},
        "idle_s": idle / 1e9,
        "main": max(totals, key=lambda cause: totals[cause]),
    }
    return mean_over_ranks(shares, inputs)


@metric("what_if_link", unit="fraction", over="trace")
def measure_what_if_link(trace: TraceView) -> Draft:
    """Upper bound on the gain from links twice as fast: half of the exposed transfer over the step time. It ignores
    latency and dependencies."""
    by_rank = median_causes(trace)
    if not by_rank:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no device events")
    if not any(len(view.comm_rows) for view in trace.ranks.values()):
        raise NotAvailable(Reason.NO_COMM_EVENTS, "no communication was recorded")
    gains = {rank: causes[Cause.EXPOSED_TRANSFER] / 2 / sum(causes.values()) for rank, causes in by_rank.items()}
    reason = None
    detail = "upper bound"
    if trace.matching.is_empty:
        reason = trace.window_reason or trace.unmatched_reason
        detail = "upper bound; includes waiting, which faster links do not shorten"
    if absent := explain_no_communication(trace):
        detail = absent
    return mean_over_ranks(gains, {"is_bound": "upper"}, reason=reason, detail=detail)


@metric("critical_path", unit="fraction", over="trace")
def measure_critical_path(trace: TraceView) -> Draft:
    """Share of compute on the longest path through launches, streams and collectives (others in --json). Of one median
    step; `inputs` has host, launch, idle, transfer, wait and memcpy."""
    require_launches(trace)
    path_ns = walk_critical_path(trace)
    total = sum(path_ns.values())
    if not total:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no device event in a step")
    inputs: dict[str, JsonValue] = {f"{name}_share": path_ns[name] / total for name in PATH_PARTS}
    inputs["path_s"] = total / 1e9
    crosses = bool(trace.matching.groups) and trace.matching.offset_ns is not None
    inputs["crosses_ranks"] = crosses
    view = next(iter(trace.ranks.values()))
    reason = view.windows.reason or (
        None if crosses or len(trace.ranks) == trace.num_devices else trace.unmatched_reason
    )
    communicates = any(len(view.comm_rows) for view in trace.ranks.values())
    detail = "within one rank: time in collectives includes waiting" if communicates and not crosses else ""
    return Draft(path_ns["compute"] / total, n_steps=1, reason=reason, detail=detail, inputs=inputs)
