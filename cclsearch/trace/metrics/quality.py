"""Quality of the trace itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.collectives import sized_share
from cclsearch.trace.diagnosis.causes import launch_matched_share
from cclsearch.trace.events import FileStatus, Kind
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


@dataclass(frozen=True)
class _RankQuality:
    """Quality of one rank's trace."""

    is_complete: bool
    launch_matched: float | None
    """Share of device rows with a launch record; None without any."""
    has_steps: bool
    has_attributed_rows: bool
    unattributed: float
    sized: float | None
    """Share of communication time of known size; None without communication."""
    overhead: float
    whole_file: dict[str, JsonValue]


def _describe_rank(view: RankView) -> _RankQuality:
    table, rows = view.table, view.device_rows
    has_steps = bool(len(table.steps) and len(rows))
    return _RankQuality(
        is_complete=table.status == FileStatus.COMPLETE,
        launch_matched=launch_matched_share(view) if len(rows) and (table.launch >= 0).any() else None,
        has_steps=has_steps,
        has_attributed_rows=has_steps and bool((table.step_id[rows] >= 0).any()),
        unattributed=unattributed_share(view),
        sized=sized_share(view) if len(view.comm_rows) else None,
        overhead=_overhead_share(view),
        whole_file=_describe_file(view),
    )


@metric("trace_quality", unit="fraction", over="trace")
def measure_trace_quality(trace: TraceView) -> Draft:
    """Smallest share of: complete files, ranks found, launches matched, device time in steps. Other metrics depend on
    these shares; `inputs` has each by name, and `args_coverage`, the share of communication time of known size."""
    shares: dict[str, float] = {}
    ranks = {rank: _describe_rank(view) for rank, view in trace.ranks.items()}
    found = list(ranks.values())
    shares["complete_files"] = float(np.mean([one.is_complete for one in found]))
    if trace.world_size:
        shares["ranks_seen"] = min(len(found) / trace.world_size, 1.0)
    launched = [one.launch_matched for one in found if one.launch_matched is not None]
    if launched:
        shares["launch_matched"] = min(launched)
    in_steps = [one for one in found if one.has_steps]
    if any(one.has_attributed_rows for one in in_steps):
        shares["attributed"] = min(1 - one.unattributed for one in in_steps)
    sized = min((one.sized for one in found if one.sized is not None), default=None)
    per_rank: dict[int, float | None] = {
        rank: min(float(one.is_complete), 1 - one.unattributed) for rank, one in ranks.items()
    }
    inputs: dict[str, JsonValue] = dict(shares)
    inputs["args_coverage"] = sized
    inputs["unattributed_frac"] = max(one.unattributed for one in found)
    inputs["profiler_overhead_frac"] = max(one.overhead for one in found)
    error_ns = trace.matching.clock_error_ns
    inputs["clock_error_s"] = None if error_ns is None else error_ns / 1e9
    inputs["mismatched_groups"] = list(trace.matching.mismatched)
    inputs["whole_file_s"] = {str(rank): one.whole_file for rank, one in ranks.items()}
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
