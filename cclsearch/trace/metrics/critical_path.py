"""The critical path of a step, and an upper bound on the gain of faster links."""

from __future__ import annotations

from pydantic import JsonValue

from cclsearch.trace.collectives import explain_no_communication
from cclsearch.trace.diagnosis.causes import Cause, median_causes
from cclsearch.trace.diagnosis.critical_path import PATH_PARTS, require_launches, walk_critical_path
from cclsearch.trace.events import Reason
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import TraceView


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
