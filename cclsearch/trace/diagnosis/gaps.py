"""The gaps in which the device is idle, and the cause of each."""

from __future__ import annotations

import numpy as np

from cclsearch.trace.events import Kind, Reason
from cclsearch.trace.intervals import Int64s, invert_spans, unite_spans
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.view import RankView, require_windows

LAUNCH_GAP_NS = 30_000
"""A shorter gap before a kernel that was already launched is launch overhead, not waiting."""
MIN_MATCHED = 0.9
"""Minimum share of device events with a launch record for finding causes."""
CAUSES = ("host_bound", "input", "launch_overhead", "sync", "comm_dependency", "unknown")


def launch_matched_share(view: RankView) -> float:
    """Return the share of device events in the windows with a launch record; backlog of an earlier step has none."""
    rows = view.in_windows(view.device_rows)
    return float((view.table.launch[rows] >= 0).mean()) if len(rows) else 0.0


def split_idle_ns(view: RankView) -> dict[str, int]:
    """Return the idle ns inside the windows by cause; raises NotAvailable if launches are not recorded.

    The device event that ends a gap decides its cause. `host_bound`: launched only after the gap began
    (`input` if that event copies from the host). `launch_overhead`: launched before, gap under 30 us. `sync`: the
    host waited for the device as the gap began. `comm_dependency`: launched before, communication ended at that moment.
    """
    require_windows(view)
    if launch_matched_share(view) < MIN_MATCHED:
        raise NotAvailable(Reason.NO_LAUNCH_RECORDS, f"under {MIN_MATCHED:.0%} of device events have a launch record")
    gaps_G2 = _gaps(view)
    table, rows = view.table, view.device_rows
    rows = rows[np.argsort(table.ts_ns[rows], kind="stable")]
    at = np.searchsorted(table.ts_ns[rows], gaps_G2[:, 1], side="left")
    found = at < len(rows)
    row_G = rows[np.minimum(at, len(rows) - 1)]
    launch_G = table.launch[row_G]
    launched_late = table.ts_ns[launch_G] >= gaps_G2[:, 0]
    length_G = gaps_G2[:, 1] - gaps_G2[:, 0]
    copies_in = np.array(["HtoD" in name or "Host-to-Device" in name for name in table.names] or [False])
    is_input = (table.kind[row_G] == Kind.MEMCPY) & copies_in[table.name_id[row_G]]
    after_sync = _covers(_sync_spans(view), gaps_G2[:, 0])
    after_comm = np.isin(gaps_G2[:, 0], view.comm_M2[:, 1])
    conditions = [
        ~found | (launch_G < 0),
        launched_late & is_input,
        launched_late & after_sync,
        launched_late,
        length_G < LAUNCH_GAP_NS,
        after_comm,
    ]
    labels = ["unknown", "input", "sync", "host_bound", "launch_overhead", "comm_dependency"]
    cause_G = np.select(conditions, list(range(len(labels))), default=0)
    return {cause: int(length_G[cause_G == labels.index(cause)].sum()) for cause in CAUSES}


def _gaps(view: RankView) -> Int64s:
    gaps = [invert_spans(view.busy_M2, start, end) for start, end in view.windows.spans_W2.tolist()]
    return np.concatenate(gaps) if gaps else np.zeros((0, 2), np.int64)


def _sync_spans(view: RankView) -> Int64s:
    """Return the spans in which the host waits for the device."""
    table = view.table
    waits = np.array(["Synchronize" in name or "StreamWaitEvent" in name for name in table.names] or [False])
    runtime = view.rows(Kind.RUNTIME)
    return unite_spans(view.merge_rows(runtime[waits[table.name_id[runtime]]]), view.merge_rows(view.rows(Kind.SYNC)))


def _covers(spans_M2: Int64s, time_ns: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, for each time, whether it is inside the merged spans, ends included."""
    if not len(spans_M2):
        return np.zeros(len(time_ns), dtype=bool)
    at = np.searchsorted(spans_M2[:, 0], time_ns, side="right") - 1
    return np.asarray((at >= 0) & (time_ns <= spans_M2[np.maximum(at, 0), 1]))
