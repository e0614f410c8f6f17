"""Time of a step by activity: four shares that add up to 1 for every rank and step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.collectives import (
    covered_by_label,
    explain_no_communication,
    group_label,
    is_scale_up,
    scale_up_size,
)
from cclsearch.trace.events import Reason
from cclsearch.trace.intervals import Int64s, covered_ns, intersect_spans, unite_spans
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.result import if_available, mean_over_ranks
from cclsearch.trace.view import StepParts, TraceView, require_windows
from cclsearch.trace.windows import first_reason


def _measure_share(trace: TraceView, pick: Callable[[StepParts], Int64s]) -> Draft:
    """Return the mean over ranks of one part's share of the rank's windows, with the share of each step."""
    shares: dict[int, float | None] = {}
    by_number: dict[int, list[float]] = {}
    for rank, view in trace.ranks.items():
        if not len(view.busy_M2):
            shares[rank] = None
            continue
        parts = view.parts
        shares[rank] = float(pick(parts).sum() / parts.window_ns_W.sum())
        for number, ns, window in zip(view.windows.numbers, pick(parts), parts.window_ns_W, strict=True):
            by_number.setdefault(number, []).append(float(ns / window))
    found = [share for share in shares.values() if share is not None]
    if not found:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no device events")
    windows = [view.windows for rank, view in trace.ranks.items() if shares[rank] is not None]
    reason = first_reason(windows)
    whole = reason is Reason.NO_STEP_MARKERS
    return Draft(
        value=float(np.mean(found)),
        per_rank=shares,
        per_step=() if whole else tuple(float(np.mean(values)) for _, values in sorted(by_number.items())),
        n_steps=min(w.num_steps for w in windows),
        reason=reason,
        detail=trace.covered if whole else "one step only" if reason else "",
        inputs={"max": max(found), "min": min(found), "spread": max(found) - min(found)},
    )


@metric("compute_frac", unit="fraction", better="higher", over="trace")
def measure_compute_frac(trace: TraceView) -> Draft:
    """Share of a step in which compute runs."""
    return _measure_share(trace, lambda parts: parts.compute_ns_W)


@metric("exposed_comm_frac", unit="fraction", better="lower", over="trace")
def measure_exposed_comm_frac(trace: TraceView) -> Draft:
    """Exposed communication: share of a step with communication but without compute or copies. `at_least_waiting_rank`
    is the share of the rank that the others wait for."""
    draft = _measure_share(trace, lambda parts: parts.exposed_comm_ns_W)
    rank = find_least_waiting_rank(trace)
    inputs = {"at_least_waiting_rank": draft.per_rank.get(rank), "least_waiting_rank": rank} if rank is not None else {}
    return replace(draft, detail=explain_no_communication(trace) or draft.detail, inputs={**draft.inputs, **inputs})


@metric("exposed_mem_frac", unit="fraction", better="lower", over="trace")
def measure_exposed_mem_frac(trace: TraceView) -> Draft:
    """Exposed copies: share of a step with memory copies but without compute."""
    return _measure_share(trace, lambda parts: parts.exposed_mem_ns_W)


@metric("idle_frac", unit="fraction", better="lower", over="trace")
def measure_idle_frac(trace: TraceView) -> Draft:
    """Share of a step in which the device is idle."""
    return _measure_share(trace, lambda parts: parts.idle_ns_W)


@metric("comm_time", unit="s", better="lower", over="trace")
def measure_comm_time(trace: TraceView) -> Draft:
    """Time per step in which communication runs. Covered seconds, mean over ranks; `inputs` has them by collective and
    by group."""
    seconds = {
        rank: float(covered_ns(view.comm_M2, require_windows(view)).mean()) / 1e9 for rank, view in trace.ranks.items()
    }
    inputs: dict[str, JsonValue] = {"max_s": max(seconds.values())}
    inputs["by_collective_s"] = _split_comm_time(trace, lambda call: str(call.kind))
    inputs["by_group_s"] = _split_comm_time(trace, group_label)
    card, world = trace.card, trace.num_devices
    per_node = if_available(lambda: scale_up_size(card)) if card is not None else None
    if per_node is not None:
        domain = per_node
        inputs["by_link_s"] = _split_comm_time(
            trace,
            lambda call: "intra_node" if is_scale_up(call, call.group_size or world, domain) else "inter_node",
        )
    return mean_over_ranks(seconds, inputs, detail=explain_no_communication(trace))


def _split_comm_time(trace: TraceView, label: Callable[..., str]) -> dict[str, JsonValue]:
    """Return the covered seconds per step by label of the call, mean over ranks."""
    totals: dict[str, float] = defaultdict(float)
    for view in trace.ranks.values():
        for name, (seconds, _) in covered_by_label(view, [label(call) for call in view.table.collectives]).items():
            totals[name] += seconds / len(trace.ranks)
    return {name: totals[name] for name in sorted(totals, key=lambda name: -totals[name])}


@metric("overlap", unit="fraction", better="higher", over="trace")
def measure_overlap(trace: TraceView) -> Draft:
    """Share of communication time that overlaps with compute. Weighted over ranks by communication time."""
    hidden_ns, comm_ns = {}, {}
    for rank, view in trace.ranks.items():
        windows_W2 = require_windows(view)
        comm_ns[rank] = int(covered_ns(view.comm_M2, windows_W2).sum())
        inside = intersect_spans(view.comm_M2, unite_spans(windows_W2))
        hidden_ns[rank] = int(covered_ns(view.compute_M2, inside).sum())
    if not sum(comm_ns.values()):
        raise NotAvailable(Reason.NO_COMM_EVENTS, explain_no_communication(trace))
    return Draft(
        value=sum(hidden_ns.values()) / sum(comm_ns.values()),
        per_rank={rank: hidden_ns[rank] / ns if ns else None for rank, ns in comm_ns.items()},
        inputs={"comm_s": sum(comm_ns.values()) / 1e9, "hidden_s": sum(hidden_ns.values()) / 1e9},
    )


def find_least_waiting_rank(trace: TraceView) -> int | None:
    """Return the rank that waits least in collectives: the others wait for it. None if collectives do not match."""
    waits: dict[int, int] = {}
    for rank, (rows, transfer_ns) in trace.matching.transfers.items():
        waits[rank] = int((trace.ranks[rank].table.dur_ns[rows] - transfer_ns).sum())
    return min(waits, key=lambda rank: waits[rank]) if len(waits) > 1 else None
