"""Quality of the trace itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.collectives import sized_share
from cclsearch.trace.diagnosis.causes import launch_matched_share
from cclsearch.trace.events import Kind
from cclsearch.trace.intervals import covered_ns, total_ns
from cclsearch.trace.metric import Draft, metric
from cclsearch.trace.view import RankView, TraceView


@dataclass(frozen=True)
class FileSummary:
    """Nanoseconds of device time over a whole file, by the device's activity."""

    span_ns: int
    """First start to last end."""
    busy_ns: int
    compute_ns: int
    comm_ns: int
    exposed_comm_ns: int
    hidden_comm_ns: int
    """Communication with compute at the same time."""

    @property
    def idle_frac(self) -> float | None:
        """Share of the span without any device event; None without device events."""
        return 1 - self.busy_ns / self.span_ns if self.span_ns else None

    @property
    def overlap(self) -> float | None:
        """Share of communication time hidden by compute; None without communication."""
        return self.hidden_comm_ns / self.comm_ns if self.comm_ns else None


def summarize_file(view: RankView) -> FileSummary:
    """Return span, busy time and its parts over the whole file of a rank."""
    busy = view.busy_M2
    busy_ns = total_ns(busy)
    return FileSummary(
        span_ns=int(busy[-1, 1] - busy[0, 0]) if len(busy) else 0,
        busy_ns=busy_ns,
        compute_ns=total_ns(view.compute_M2),
        comm_ns=total_ns(view.comm_M2),
        exposed_comm_ns=busy_ns - total_ns(view.work_M2),
        hidden_comm_ns=int(covered_ns(view.compute_M2, view.comm_M2).sum()),
    )


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
    complete: dict[int, bool] = {}
    unattributed: dict[int, float] = {}
    launched, sized, overhead, has_attributed, in_steps = [], [], [], False, []
    whole_file: dict[str, JsonValue] = {}
    for rank, view in trace.ranks.items():  # one rank after the other: the columns of many need much memory
        table, rows = view.table, view.device_rows
        complete[rank], unattributed[rank] = not table.reasons, unattributed_share(view)
        if len(rows) and (table.launch >= 0).any():
            launched.append(launch_matched_share(view))
        if len(rows) and table.steps:
            in_steps.append(1 - unattributed[rank])
            has_attributed |= bool((table.step_id[rows] >= 0).any())
        if len(view.comm_rows):
            sized.append(sized_share(view))
        overhead.append(_overhead_share(view))
        whole_file[str(rank)] = _describe_file(view)
    shares = {"complete_files": float(np.mean(list(complete.values())))}
    if trace.world_size:
        shares["ranks_seen"] = min(len(complete) / trace.world_size, 1.0)
    if launched:
        shares["launch_matched"] = min(launched)
    if has_attributed:
        shares["attributed"] = min(in_steps)
    per_rank: dict[int, float | None] = {
        rank: min(float(is_complete), 1 - unattributed[rank]) for rank, is_complete in complete.items()
    }
    inputs: dict[str, JsonValue] = dict(shares)
    args_coverage = min(sized, default=None)
    inputs["args_coverage"] = args_coverage
    inputs["unattributed_frac"] = max(unattributed.values())
    inputs["profiler_overhead_frac"] = max(overhead)
    error_ns = trace.matching.clock_error_ns
    inputs["clock_error_s"] = None if error_ns is None else error_ns / 1e9
    inputs["mismatched_groups"] = list(trace.matching.mismatched)
    inputs["whole_file_s"] = whole_file
    weakest = min(shares, key=lambda name: shares[name])
    inputs["weakest"] = weakest
    detail = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items())
    if args_coverage is not None and args_coverage < 1:
        detail += f"; {args_coverage:.1%} of communication time is of known size"
        detail += " (metrics of sizes and bandwidths cover only that)"
    return Draft(shares[weakest], per_rank, detail=detail, inputs=inputs, needs_steps=False)


def _describe_file(view: RankView) -> dict[str, JsonValue]:
    """Return seconds over the whole file, regardless of steps, to compare with other tools."""
    summary = summarize_file(view)
    seconds = {
        name: getattr(summary, f"{name}_ns") / 1e9 for name in ("span", "busy", "compute", "comm", "exposed_comm")
    }
    return {**seconds, "overlap_frac": summary.overlap, "idle_frac": summary.idle_frac}


def _overhead_share(view: RankView) -> float:
    spans = view.merge_rows(view.rows(Kind.OVERHEAD))
    if not len(spans) or not len(view.busy_M2):
        return 0.0
    return total_ns(spans) / max(int(view.busy_M2[-1, 1] - view.busy_M2[0, 0]), 1)
