"""Quality of the trace itself."""

from __future__ import annotations

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.collectives import sized_share
from cclsearch.trace.diagnosis.gaps import launch_matched_share
from cclsearch.trace.events import Kind
from cclsearch.trace.file_summary import summarize_file
from cclsearch.trace.intervals import total_ns
from cclsearch.trace.metric import Draft, metric
from cclsearch.trace.status import FileStatus
from cclsearch.trace.view import RankView, TraceView


def unattributed_share(view: RankView) -> float:
    """Return the share of device time outside steps: backlog of an earlier step, or work launched between steps."""
    rows = view.device_rows
    dur_ns = view.table.dur_ns[rows]
    if not len(view.table.steps) or not dur_ns.sum():
        return 0.0
    return float(dur_ns[view.table.step_id[rows] < 0].sum() / dur_ns.sum())


@metric("trace_quality", unit="fraction", over="trace")
def measure_trace_quality(trace: TraceView) -> Draft:
    """Smallest share of: complete files, ranks found, launches matched, device time in steps. Other metrics depend on
    these shares; `inputs` has each by name, and `args_coverage`, the share of communication time of known size."""
    shares: dict[str, float] = {}
    views = list(trace.ranks.values())
    shares["complete_files"] = float(np.mean([view.table.status == FileStatus.COMPLETE for view in views]))
    if trace.world_size:
        shares["ranks_seen"] = min(len(views) / trace.world_size, 1.0)
    with_launches = [view for view in views if len(view.device_rows) and (view.table.launch >= 0).any()]
    if with_launches:
        shares["launch_matched"] = min(launch_matched_share(view) for view in with_launches)
    with_steps = [view for view in views if view.table.steps and len(view.device_rows)]
    if with_steps and any((view.table.step_id[view.device_rows] >= 0).any() for view in with_steps):
        shares["attributed"] = min(1 - unattributed_share(view) for view in with_steps)
    communicating = [view for view in views if len(view.comm_rows)]
    sized = min((sized_share(view) for view in communicating), default=None)
    per_rank: dict[int, float | None] = {
        view.rank: min([float(view.table.status == FileStatus.COMPLETE), 1 - unattributed_share(view)])
        for view in views
    }
    inputs: dict[str, JsonValue] = dict(shares)
    inputs["args_coverage"] = sized
    inputs["unattributed_frac"] = max(unattributed_share(view) for view in views)
    inputs["profiler_overhead_frac"] = max(_overhead_share(view) for view in views)
    error_ns = trace.matching.clock_error_ns
    inputs["clock_error_s"] = None if error_ns is None else error_ns / 1e9
    inputs["mismatched_groups"] = list(trace.matching.mismatched)
    inputs["whole_file_s"] = {str(view.rank): _describe_file(view) for view in views}
    weakest = min(shares, key=lambda name: shares[name])
    inputs["weakest"] = weakest
    detail = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items())
    if sized is not None and sized < 1:
        detail += (
            f"; {sized:.1%} of communication time is of known size (metrics of sizes and bandwidths cover only that)"
        )
    return Draft(shares[weakest], per_rank, detail=detail, inputs=inputs, needs_steps=False)


def _describe_file(view: RankView) -> dict[str, JsonValue]:
    """Return seconds over the whole file, regardless of steps, to compare with other tools."""
    summary = summarize_file(view)
    return {
        "span": summary.span_ns / 1e9,
        "busy": summary.busy_ns / 1e9,
        "compute": summary.compute_ns / 1e9,
        "comm": summary.comm_ns / 1e9,
        "exposed_comm": summary.exposed_comm_ns / 1e9,
        "overlap_frac": summary.overlap,
        "idle_frac": summary.idle_frac,
    }


def _overhead_share(view: RankView) -> float:
    spans = view.merge_rows(view.rows(Kind.OVERHEAD))
    if not len(spans) or not len(view.busy_M2):
        return 0.0
    return total_ns(spans) / max(int(view.busy_M2[-1, 1] - view.busy_M2[0, 0]), 1)
