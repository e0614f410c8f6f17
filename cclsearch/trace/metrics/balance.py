"""How evenly the ranks, the stages and the experts are loaded."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.events import Collective, CollectiveKind, ComputeClass, Reason
from cclsearch.trace.intervals import covered_ns, subtract_spans, total_ns
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.view import RankView, TraceView, require_windows

_POINT_TO_POINT = frozenset({CollectiveKind.SEND, CollectiveKind.RECV, CollectiveKind.SEND_RECV})


def compute_seconds(trace: TraceView) -> dict[int, float]:
    """Rank -> seconds in which it computes, over the whole file (collectives are not work)."""
    return {rank: total_ns(view.compute_M2) / 1e9 for rank, view in trace.ranks.items()}


@metric(
    "compute_imbalance",
    unit="fraction",
    better="lower",
    over="trace",
    summary="compute time of the busiest rank over the mean, less 1; collectives excluded, ranks of a stage compared",
)
def measure_compute_imbalance(trace: TraceView) -> Draft:
    """Largest (max/mean - 1) over the pipeline stages; seconds of compute by rank in `per_rank`."""
    if len(trace.ranks) < 2:
        raise NotAvailable(trace.lonely_reason, "needs two ranks")
    seconds = compute_seconds(trace)
    stages: dict[int, list[float]] = defaultdict(list)
    for rank, value in seconds.items():
        stages[trace.stage_of(rank)].append(value)
    excess = {
        stage: max(values) / float(np.mean(values)) - 1
        for stage, values in stages.items()
        if len(values) > 1 and sum(values) > 0
    }
    if not excess:
        raise NotAvailable(trace.lonely_reason, "no stage has two ranks that compute")
    low = min(seconds.values())
    inputs: dict[str, JsonValue] = {
        "by_stage": {str(stage): value for stage, value in excess.items()},
        "busiest_rank": max(seconds, key=lambda rank: seconds[rank]),
        "max_over_min": max(seconds.values()) / low if low > 0 else None,
    }
    doubt = trace.device_doubt if trace.degree("pp") > 1 else ""
    reason = Reason.RANKS_MISSING if doubt else None
    return Draft(max(excess.values()), dict(seconds), reason=reason, detail=doubt, inputs=inputs)


@metric(
    "pipeline_bubble",
    unit="fraction",
    better="lower",
    over="trace",
    summary="share of a step in which a stage neither computes nor reduces: idle, or waiting for a neighbour stage",
)
def measure_pipeline_bubble(trace: TraceView) -> Draft:
    """Mean over stages of the share without compute and without collectives of the stage's own groups."""
    stages = trace.degree("pp")
    if stages < 2:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "needs a configuration with pp above 1")
    shares: dict[int, float | None] = {}
    by_stage: dict[int, list[float]] = defaultdict(list)
    for rank, view in trace.ranks.items():
        windows_W2 = require_windows(view)
        at_work = covered_ns(view.work_M2, windows_W2) + covered_ns(
            subtract_spans(collective_spans(view), view.work_M2), windows_W2
        )
        share = 1 - float(at_work.sum() / view.parts.window_ns_W.sum())
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
    missing = "a stage has no trace" if len(by_stage) < stages else trace.device_doubt
    reason = Reason.RANKS_MISSING if missing else None
    steps = min(view.windows.num_steps for view in trace.ranks.values())
    return Draft(value, shares, n_steps=steps, reason=reason, detail=missing, inputs=inputs)


def collective_spans(view: RankView) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """When a rank takes part in collectives of more than two neighbours: all but point-to-point."""
    pair = np.array([call.kind in _POINT_TO_POINT for call in view.table.collectives] or [False])
    rows = view.comm_rows
    return view.merge_rows(rows[~pair[view.table.coll_id[rows]]])


def count_micro_batches(trace: TraceView) -> int | None:
    """Micro-batches of a step on one pipeline, from card and configuration; None where they are not known."""
    if trace.card is None or trace.config is None:
        return None
    data_parallel = trace.degree("dp")
    micro_batch = trace.config.as_int("micro_batch_size", 0) or trace.config.as_int("micro_batch", 0)
    if micro_batch < 1 or trace.card.global_batch_size % (data_parallel * micro_batch):
        return None
    return trace.card.global_batch_size // (data_parallel * micro_batch)


@metric(
    "moe_balance",
    unit="ratio",
    better="lower",
    over="trace",
    summary="tokens of the busiest expert-parallel rank over the mean, from the splits of the all-to-alls",
)
def measure_moe_balance(trace: TraceView) -> Draft:
    """Mean over all-to-alls of max/mean load: a dispatch shows it in what is received, a combine in what is sent."""
    _require_experts(trace)
    ratios: list[float] = []
    calls = 0
    for group in trace.matching.groups:
        for k, first in enumerate(group.calls_K):
            if first.kind is not CollectiveKind.ALL_TO_ALL:
                continue
            calls += 1
            members = [_call_of(trace.ranks[rank], group.rows_RK[i, k]) for i, rank in enumerate(group.ranks)]
            ratios += _load_ratio(members)
    if ratios:
        return Draft(float(np.mean(ratios)), n_ranks=len(trace.ranks), inputs={"num_all_to_alls": len(ratios)})
    seen = [call for view in trace.ranks.values() for call in view.table.collectives if call.in_splits]
    own = [max(call.in_splits) * len(call.in_splits) / sum(call.in_splits) for call in seen if sum(call.in_splits)]
    if not own:
        raise NotAvailable(Reason.NO_COLLECTIVE_ARGS, "no all-to-all says how it is split")
    return Draft(
        float(np.mean(own)),
        reason=trace.lonely_reason,
        detail="what one rank sends to each: the load of a rank is the sum over all senders",
        inputs={"num_all_to_alls": len(own)},
    )


def _require_experts(trace: TraceView) -> None:
    if trace.card is None:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "needs a workload card that says whether the model has experts")
    if trace.card.arch.moe is None:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "the card's model is no mixture of experts")


def _call_of(view: RankView, row: int) -> Collective:
    return view.table.collectives[int(view.table.coll_id[row])]


def _load_ratio(members: list[Collective]) -> list[float]:
    received = [sum(call.out_splits) for call in members if call.out_splits]
    sent = [sum(call.in_splits) for call in members if call.in_splits]
    whole = [loads for loads in (received, sent) if len(loads) == len(members) and sum(loads) > 0]
    return [max(max(loads) * len(loads) / sum(loads) for loads in whole)] if whole else []


@metric(
    "moe_frac",
    unit="fraction",
    over="trace",
    summary="share of compute time in kernels that can only belong to a mixture of experts",
)
def measure_moe_frac(trace: TraceView) -> Draft:
    """len(union of MoE kernels) / len(union of compute kernels), mean over ranks; needs a card with experts."""
    _require_experts(trace)
    shares: dict[int, float | None] = {}
    for rank, view in trace.ranks.items():
        windows_W2 = require_windows(view)
        rows = view.compute_kernels
        moe = rows[view.table.name_class[view.table.name_id[rows]] == ComputeClass.MOE]
        total = covered_ns(view.compute_M2, windows_W2).sum()
        shares[rank] = float(covered_ns(view.merge_rows(moe), windows_W2).sum() / total) if total else None
    found = [share for share in shares.values() if share is not None]
    if not found:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "nothing computes")
    reason = next((v.windows.reason for v in trace.ranks.values() if v.windows.reason), None)
    return Draft(float(np.mean(found)), shares, reason=reason, detail="over the whole file" if reason else "")
