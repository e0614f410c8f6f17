"""Time of a step: its period, its four shares by activity, throughput, and scaling between two traces."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

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
from cclsearch.trace.view import NO_TIMES, StepParts, TraceView, require_windows
from cclsearch.trace.windows import NO_STEPS, first_reason

if TYPE_CHECKING:
    from cclsearch.card.model import Card


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
    whole = reason in NO_STEPS
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


@metric("trace_step_time", unit="s", better="lower", over="trace")
def measure_step_time(trace: TraceView) -> Draft:
    """Period of a step on the device with the profiler on: median over steps, slowest rank."""
    medians: dict[int, float | None] = {}
    by_number: dict[int, list[float]] = {}
    periods: list[float] = []
    for rank, view in trace.ranks.items():
        if not view.windows.are_steps:
            medians[rank] = None
            continue
        seconds = view.parts.window_ns_W / 1e9
        medians[rank] = float(np.median(seconds))
        periods.extend(seconds.tolist())
        for number, value in zip(view.windows.numbers, seconds, strict=True):
            by_number.setdefault(number, []).append(float(value))
    found = {rank: value for rank, value in medians.items() if value is not None}
    if not found:
        return _measure_marker_period(trace)
    slowest = max(found, key=lambda rank: found[rank])
    alone = any(trace.ranks[rank].windows.reason is Reason.TOO_FEW_STEPS for rank in found)
    return Draft(
        value=found[slowest],
        per_rank=medians,
        per_step=tuple(max(values) for _, values in sorted(by_number.items())),
        n_steps=min(trace.ranks[rank].windows.num_steps for rank in found),
        reason=Reason.TOO_FEW_STEPS if alone else Reason.NO_STEP_MARKERS if len(found) < len(medians) else None,
        detail="one step only: the time that its work takes, not the time from one step to the next" if alone else "",
        inputs=_describe_periods(trace, periods, slowest),
    )


def _measure_marker_period(trace: TraceView) -> Draft:
    """Return the period of the host's markers, which is the device's over many steps; for traces without launches."""
    markers = {rank: sorted(s.start_ns for s in view.table.steps) for rank, view in trace.ranks.items()}
    medians = {r: float(np.median(np.diff(starts))) / 1e9 for r, starts in markers.items() if len(starts) > 1}
    medians = {rank: value for rank, value in medians.items() if value > 0}
    reason = trace.window_reason or Reason.NO_STEP_MARKERS
    if not medians:
        raise NotAvailable(reason, "no rank has step markers" if reason is Reason.NO_STEP_MARKERS else NO_STEPS[reason])
    return Draft(
        value=max(medians.values()),
        per_rank=medians,
        n_steps=min(len(markers[rank]) for rank in medians) - 1,
        reason=reason,
        detail=f"from marker to marker on the host: {NO_STEPS.get(reason, '')}",
        needs_steps=False,
    )


def _describe_periods(trace: TraceView, periods: list[float], slowest: int) -> dict[str, JsonValue]:
    view = trace.ranks[slowest]
    inputs: dict[str, JsonValue] = {
        "slowest_rank": slowest,
        "step_source": view.table.step_source,
        "p95_s": float(np.percentile(periods, 95)),
        "step_numbers": list(view.windows.numbers),
    }
    if len(periods) > 1:
        inputs["cv"] = statistics.stdev(periods) / statistics.fmean(periods)
    host = [
        (view.table.steps[i].end_ns - view.table.steps[i].start_ns) / 1e9
        for i in view.windows.step_index_W.tolist()
        if i >= 0 and view.table.step_source != "gpu_annotation"
    ]
    if host:
        inputs["cpu_step_time_s"] = statistics.median(host)
    if view.launch_lag_s is not None:
        inputs["host_ahead_s"] = view.launch_lag_s
    return inputs


def require_card(trace: TraceView, phase: str = "") -> Card:
    """Return the card; raises NotAvailable if there is none or it is for another phase."""
    if trace.card is None:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "needs a workload card (--card)")
    card = trace.card
    stated = if_available(lambda: card.phase)
    if phase and stated is not None and stated != phase:
        raise NotAvailable(Reason.PHASE_MISMATCH, f"the card is for {card.task}, not for {phase}")
    return card


def tokens_per_step(card: Card) -> int:
    """Return `cclsearch.card.arch.tokens_per_step`, whose import takes as long as scoring a small trace."""
    from cclsearch.card import arch

    return arch.tokens_per_step(card)


@metric("tokens_per_s", unit="tokens/s", better="higher", over="trace")
def measure_tokens_per_s(trace: TraceView) -> Draft:
    """Tokens of the card's global batch over trace_step_time. `inputs` has the rate per device."""
    card = require_card(trace, "training")
    step = measure_step_time(trace)
    rate = tokens_per_step(card) / step.value
    return Draft(
        value=rate,
        n_steps=step.n_steps,
        reason=step.reason,
        detail=step.detail,
        inputs={
            "tokens_per_step": tokens_per_step(card),
            "trace_step_time_s": step.value,
            "tokens_per_s_per_device": rate / trace.num_devices,
        },
    )


@metric("tokens_per_s_per_device", unit="tokens/s", better="higher", over="trace")
def measure_tokens_per_s_per_device(trace: TraceView) -> Draft:
    """tokens_per_s over the number of accelerators."""
    total = measure_tokens_per_s(trace)
    return Draft(
        value=total.value / trace.num_devices,
        n_steps=total.n_steps,
        reason=total.reason or (Reason.RANKS_MISSING if trace.device_count_caveat else None),
        detail="; ".join(filter(None, (total.detail, trace.device_count_caveat))),
        inputs={"num_devices": trace.num_devices, "tokens_per_s": total.value},
    )


Rule = Literal["strong", "weak"]


@metric("scaling_efficiency", unit="fraction", better="higher", over="trace")
def measure_scaling_efficiency(trace: TraceView) -> Draft:
    """Throughput at N over N/N0 times the throughput at N0 (the first of two traces), split by cause. `inputs` has the
    seconds lost to each cause.

    The cards decide: the same card or the same tokens per step is strong scaling; a base card with other tokens per
    step is weak scaling. Without cards the batch is assumed to be the same (strong), and the result is `partial`.
    """
    if trace.baseline is None:
        raise NotAvailable(Reason.NO_TRACE_FILES, "needs a base trace: ccl-search score BASE TRACE")
    if not trace.baseline.is_timed:
        raise NotAvailable(Reason.NO_TIMES, f"the base trace: {NO_TIMES}")
    base, (rule, work_ratio, stated) = trace.baseline, _batch_rule(trace, trace.baseline)
    here, there = measure_step_time(trace), measure_step_time(base)
    ratio = trace.num_devices / base.num_devices
    value = work_ratio * there.value / here.value / ratio
    change = {}
    for name, measure in (
        ("compute", measure_compute_frac),
        ("exposed_comm", measure_exposed_comm_frac),
        ("exposed_mem", measure_exposed_mem_frac),
        ("idle", measure_idle_frac),
    ):
        ideal = measure(base).value * there.value * work_ratio / ratio
        change[f"lost_to_{name}_s"] = measure(trace).value * here.value - ideal
    caveat = trace.device_count_caveat or base.device_count_caveat
    reason = Reason.RANKS_MISSING if caveat else None if stated else Reason.CARD_MISSING_FIELD
    assumed = "" if stated else "assumes the same batch: no card states it"
    return Draft(
        value=value,
        n_steps=min(here.n_steps or 0, there.n_steps or 0),
        reason=here.reason or there.reason or reason,
        detail="; ".join(filter(None, (f"{rule} scaling", assumed, caveat))),
        inputs={
            "num_devices": trace.num_devices,
            "base_num_devices": base.num_devices,
            "step_time_s": here.value,
            "base_step_time_s": there.value,
            "rule": rule,
            **change,
        },
    )


def _batch_rule(trace: TraceView, base: TraceView) -> tuple[Rule, float, bool]:
    """Return strong or weak, the ratio of tokens per step to the base, and whether cards state it."""
    if trace.card is None or base.card is None:
        return "strong", 1.0, False
    card, other = require_card(trace, "training"), require_card(base, "training")
    ratio = tokens_per_step(card) / tokens_per_step(other)
    return ("strong" if ratio == 1 else "weak"), ratio, True
