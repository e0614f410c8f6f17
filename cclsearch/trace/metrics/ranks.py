"""Metrics that compare ranks: waiting and stragglers in collectives, balance of ranks, stages and experts."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.diagnosis.causes import is_point_to_point
from cclsearch.trace.events import Collective, CollectiveKind, Reason
from cclsearch.trace.intervals import Int64s, covered_ns, total_ns, unite_spans
from cclsearch.trace.matching import WORLD, Matching
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import TraceView, require_windows


def require_matching(trace: TraceView) -> Matching:
    """Return the matched collectives; raises NotAvailable with the reason if there are none."""
    if not any(len(view.comm_rows) for view in trace.ranks.values()):
        raise NotAvailable(Reason.NO_COMM_EVENTS, "no communication was recorded")
    if len(trace.ranks) < 2:
        raise NotAvailable(trace.unmatched_reason, "a trace of one rank cannot separate waiting from data transfer")
    matching = trace.matching
    if matching.groups:
        return matching
    if matching.mismatched:
        raise NotAvailable(Reason.SEQUENCE_MISMATCH, matching.mismatched[0])
    if matching.misaligned:
        raise NotAvailable(Reason.NO_CLOCK_ALIGNMENT, matching.misaligned)
    if matching.pairs:
        raise NotAvailable(Reason.NO_COMM_EVENTS, "no collectives, only point-to-point messages")
    raise NotAvailable(Reason.NO_COLLECTIVE_ARGS, "no collective records its group of ranks")


def find_caveat(trace: TraceView) -> tuple[Reason | None, str]:
    """Return why a figure over matched collectives is only partial; (None, "") if it is complete."""
    if trace.matching.mismatched:
        return Reason.SEQUENCE_MISMATCH, f"not included: {'; '.join(trace.matching.mismatched)}"
    if trace.matching.misaligned:
        return Reason.NO_CLOCK_ALIGNMENT, f"not included: {trace.matching.misaligned}"
    if trace.matching.ranks_missing:
        return Reason.RANKS_MISSING, "some groups have ranks without a trace: waiting for those ranks is not included"
    if trace.device_count_caveat and any(group.key[0] == WORLD for group in trace.matching.groups):
        return Reason.RANKS_MISSING, trace.device_count_caveat
    return None, ""


@metric("comm_wait_frac", unit="fraction", better="lower", over="trace")
def measure_comm_wait_frac(trace: TraceView) -> Draft:
    """Share of the time in collectives that ranks spend waiting for other ranks. Sum of (duration - shortest duration
    over ranks) over the sum of durations, over the whole file."""
    matching = require_matching(trace)
    wait_ns = dict.fromkeys(trace.ranks, 0)
    spent_ns = dict.fromkeys(trace.ranks, 0)
    for group in matching.groups:
        for i, rank in enumerate(group.ranks):
            wait_ns[rank] += int((group.dur_ns_RK[i] - group.transfer_ns_K).sum())
            spent_ns[rank] += int(group.dur_ns_RK[i].sum())
    shares: dict[int, float | None] = {
        rank: wait_ns[rank] / spent if spent else None for rank, spent in spent_ns.items()
    }
    reason, detail = find_caveat(trace)
    return mean_over_ranks(
        shares,
        {
            "wait_s_by_rank": {str(rank): ns / 1e9 for rank, ns in wait_ns.items()},
            "comm_s_by_rank": {str(rank): ns / 1e9 for rank, ns in spent_ns.items()},
            "num_collectives": sum(len(group.calls_K) for group in matching.groups),
        },
        reason=reason,
        detail=detail,
    )


def _aligned_starts(trace: TraceView) -> list[tuple[tuple[int, ...], Int64s]]:
    """Return the ranks of each group and the starts of its matched collectives on one clock, shape (R, K)."""
    matching = require_matching(trace)
    if matching.offset_ns is None:
        raise NotAvailable(Reason.NO_CLOCK_ALIGNMENT, "the clocks of the ranks cannot be aligned")
    offsets = matching.offset_ns
    return [(group.ranks, group.on_one_clock(offsets)) for group in matching.groups]


@metric("start_skew", unit="s", better="lower", over="trace")
def measure_start_skew(trace: TraceView) -> Draft:
    """Latest minus earliest start of a collective over its ranks: median over collectives. `per_rank` has the mean
    lateness of each rank."""
    aligned = _aligned_starts(trace)
    skew_ns = np.concatenate([starts.max(axis=0) - starts.min(axis=0) for _, starts in aligned])
    late: dict[int, list[float]] = {rank: [] for rank in trace.ranks}
    for ranks, starts in aligned:
        for i, rank in enumerate(ranks):
            late[rank].extend((starts[i] - starts.min(axis=0)).tolist())
    reason, detail = find_caveat(trace)
    return Draft(
        value=float(np.median(skew_ns)) / 1e9,
        per_rank={rank: float(np.mean(ns)) / 1e9 if ns else None for rank, ns in late.items()},
        reason=reason,
        detail=detail,
        inputs={
            "p95_s": float(np.percentile(skew_ns, 95)) / 1e9,
            "max_s": float(skew_ns.max()) / 1e9,
            "clock_error_s": None if trace.matching.clock_error_ns is None else trace.matching.clock_error_ns / 1e9,
        },
    )


@metric("last_arriver", unit="rank", over="trace")
def measure_last_arriver(trace: TraceView) -> Draft:
    """The straggler: the rank that most often enters collectives last (not the one with the most time in them). Its
    cost is the time between the second-last arrival and its own."""
    counts: Counter[int] = Counter(dict.fromkeys(trace.ranks, 0))
    cost_ns = dict.fromkeys(trace.ranks, 0)
    total = 0
    for ranks, starts in _aligned_starts(trace):
        last_K = starts.argmax(axis=0)
        behind_K = np.sort(starts, axis=0)[-1] - np.sort(starts, axis=0)[-2]
        total += starts.shape[1]
        for i, rank in enumerate(ranks):
            counts[rank] += int((last_K == i).sum())
            cost_ns[rank] += int(behind_K[last_K == i].sum())
    worst = max(counts, key=lambda rank: (counts[rank], cost_ns[rank]))
    reason, detail = find_caveat(trace)
    return Draft(
        value=float(worst),
        per_rank={rank: float(count) for rank, count in counts.items()},
        reason=reason,
        detail=detail,
        inputs={
            "num_collectives": total,
            "times_last_by_rank": {str(rank): count for rank, count in counts.items()},
            "straggler_cost_s": sum(cost_ns.values()) / 1e9,
            "cost_s_by_rank": {str(rank): ns / 1e9 for rank, ns in cost_ns.items()},
        },
    )


@metric("compute_imbalance", unit="fraction", better="lower", over="trace")
def measure_compute_imbalance(trace: TraceView) -> Draft:
    """Compute time (without collectives) of the busiest rank over the mean of its pipeline stage, minus 1. Largest over
    the pipeline stages; `per_rank` has the compute seconds. Ranks without compute have another role and are left out;
    the others must have recorded the same work: steps, matched collectives, or the same kernels."""
    if len(trace.ranks) < 2:
        raise NotAvailable(trace.unmatched_reason, "needs at least two ranks")
    seconds = {rank: total_ns(view.compute_M2) / 1e9 for rank, view in trace.ranks.items()}  # over the whole file
    stages: dict[int, list[int]] = defaultdict(list)
    for rank, value in seconds.items():
        if value > 0:
            stages[trace.stage_of(rank)].append(rank)
    stages = {stage: ranks for stage, ranks in stages.items() if len(ranks) > 1}
    if not stages:
        raise NotAvailable(trace.unmatched_reason, "no pipeline stage has two ranks that compute")
    if not all(_recorded_the_same_work(trace, ranks) for ranks in stages.values()):
        reason = (
            trace.unmatched_reason if any(len(v.comm_rows) for v in trace.ranks.values()) else Reason.NO_COMM_EVENTS
        )
        raise NotAvailable(
            reason, "neither steps nor matched collectives nor equal kernels: the ranks' files may differ"
        )
    compared = [seconds[rank] for ranks in stages.values() for rank in ranks]
    excess = {
        stage: max(seconds[rank] for rank in ranks) / float(np.mean([seconds[rank] for rank in ranks])) - 1
        for stage, ranks in stages.items()
    }
    inputs: dict[str, JsonValue] = {
        "by_stage": {str(stage): value for stage, value in excess.items()},
        "busiest_rank": max(seconds, key=lambda rank: seconds[rank]),
        "max_over_min": max(compared) / min(compared),
    }
    idle = [rank for rank, value in seconds.items() if not value]
    left_out = f"without rank {', '.join(map(str, idle))}, which does not compute" if idle else ""
    caveat = trace.device_count_caveat if trace.degree("pp") > 1 else ""
    reason_or_none = Reason.RANKS_MISSING if caveat else None
    detail = "; ".join(filter(None, (caveat, left_out)))
    return Draft(
        max(excess.values()), dict(seconds), reason=reason_or_none, detail=detail, inputs=inputs, needs_steps=False
    )


def _recorded_the_same_work(trace: TraceView, ranks: list[int]) -> bool:
    """Whether these ranks' compute can be compared: they have steps, their collectives match, or their kernels do."""
    views = [trace.ranks[rank] for rank in ranks]
    if not trace.matching.is_empty or all(view.windows.are_steps for view in views):
        return True
    kernels = [
        Counter(view.table.names[number] for number in view.table.name_id[view.compute_kernels]) for view in views
    ]
    return all(found == kernels[0] for found in kernels)


@metric("pipeline_bubble", unit="fraction", better="lower", over="trace")
def measure_pipeline_bubble(trace: TraceView) -> Draft:
    """Share of a step in which a pipeline stage is idle or only in point-to-point communication. Mean over stages;
    compute, copies and collectives of the stage's own groups are its work."""
    stages = trace.degree("pp")
    if stages < 2:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "needs a configuration (--config) with pp > 1")
    shares: dict[int, float | None] = {}
    by_stage: dict[int, list[float]] = defaultdict(list)
    for rank, view in trace.ranks.items():
        collectives_M2 = view.merge_rows(view.comm_rows[~is_point_to_point(view, view.comm_rows)])
        working = covered_ns(unite_spans(view.work_M2, collectives_M2), require_windows(view))
        share = 1 - float(working.sum() / view.parts.window_ns_W.sum())
        shares[rank] = share
        by_stage[trace.stage_of(rank)].append(share)
    inputs: dict[str, JsonValue] = {
        "by_stage": {str(stage): float(np.mean(values)) for stage, values in sorted(by_stage.items())}
    }
    micro_batches = count_micro_batches(trace)
    if micro_batches:
        inputs["ideal"] = (stages - 1) / (micro_batches + stages - 1)
        inputs["num_micro_batches"] = micro_batches
    value = float(np.mean([np.mean(values) for values in by_stage.values()]))
    missing = "a pipeline stage has no trace" if len(by_stage) < stages else trace.device_count_caveat
    reason = Reason.RANKS_MISSING if missing else None
    return Draft(value, shares, reason=reason, detail=missing, inputs=inputs)


def count_micro_batches(trace: TraceView) -> int | None:
    """Return the number of micro-batches per step and pipeline, from card and configuration; None if unknown."""
    if trace.card is None or trace.config is None:
        return None
    data_parallel = trace.degree("dp")
    micro_batch = trace.config.as_int("micro_batch_size", 0) or trace.config.as_int("micro_batch", 0)
    if micro_batch < 1 or trace.card.number("global_batch_size") % (data_parallel * micro_batch):
        return None
    return trace.card.number("global_batch_size") // (data_parallel * micro_batch)


@metric("moe_balance", unit="ratio", better="lower", over="trace")
def measure_moe_balance(trace: TraceView) -> Draft:
    """Tokens of the busiest expert-parallel rank over the mean, from the split sizes of all-to-alls. Mean over
    all-to-alls: of received tokens for a dispatch, of sent tokens for a combine."""
    _require_experts(trace)
    ratios: list[float] = []
    calls = 0
    for group in trace.matching.groups:
        for k, first in enumerate(group.calls_K):
            if first.kind is not CollectiveKind.ALL_TO_ALL:
                continue
            calls += 1
            tables = [trace.ranks[rank].table for rank in group.ranks]
            members = [t.collectives[t.coll_id[row]] for t, row in zip(tables, group.rows_RK[:, k], strict=True)]
            ratios += _load_ratio(members)
    if ratios:
        return Draft(float(np.mean(ratios)), inputs={"num_all_to_alls": len(ratios)})
    seen = [call for view in trace.ranks.values() for call in view.table.collectives if call.in_splits]
    own = [max(call.in_splits) * len(call.in_splits) / sum(call.in_splits) for call in seen if sum(call.in_splits)]
    if not own:
        raise NotAvailable(Reason.NO_COLLECTIVE_ARGS, "no all-to-all records its split sizes")
    return Draft(
        float(np.mean(own)),
        reason=trace.unmatched_reason,
        detail="from what single ranks send to each rank; the full load of a rank is the sum over all senders",
        inputs={"num_all_to_alls": len(own)},
    )


def _require_experts(trace: TraceView) -> None:
    if trace.card is None:
        raise NotAvailable(
            Reason.CARD_MISSING_FIELD, "needs a workload card (--card): it states whether the model has experts"
        )
    if trace.card.arch.moe is None:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "the card's model is not a mixture of experts")


def _load_ratio(members: list[Collective]) -> list[float]:
    received = [sum(call.out_splits) for call in members if call.out_splits]
    sent = [sum(call.in_splits) for call in members if call.in_splits]
    complete = [loads for loads in (received, sent) if len(loads) == len(members) and sum(loads) > 0]
    return [max(max(loads) * len(loads) / sum(loads) for loads in complete)] if complete else []


@metric("moe_frac", unit="fraction", over="trace")
def measure_moe_frac(trace: TraceView) -> Draft:
    """Share of compute time in kernels that only mixture-of-experts models use. Covered time, mean over ranks; needs a
    card with experts."""
    _require_experts(trace)
    shares: dict[int, float | None] = {}
    for rank, view in trace.ranks.items():
        windows_W2 = require_windows(view)
        rows = view.compute_kernels
        moe = rows[view.table.name_class[view.table.name_id[rows]] == ComputeClass.MOE]
        total = covered_ns(view.compute_M2, windows_W2).sum()
        shares[rank] = float(covered_ns(view.merge_rows(moe), windows_W2).sum() / total) if total else None
    return mean_over_ranks(shares, missing=NotAvailable(Reason.NO_GPU_EVENTS, "no compute was recorded"))
