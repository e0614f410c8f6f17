"""The gaps in which the device is idle, and the cause of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cclsearch.trace.events import Kind, Reason
from cclsearch.trace.intervals import Int64s, gaps_in_windows
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.view import RankView, require_windows

LAUNCH_GAP_NS = 30_000
"""Gap before an already launched kernel below which it is launch overhead, not waiting."""
MIN_MATCHED = 0.9
"""Minimum share of device events with a launch record for finding causes."""
CAUSES = ("host_bound", "input", "launch_overhead", "sync", "comm_dependency", "unknown")
# Only launches that came after a gap began are the host's fault.
DIAGNOSED = {
    "host": ("host_bound", "input", "sync"),
    "launch": ("launch_overhead",),
    "unknown": ("comm_dependency", "unknown"),
}
"""Sentence of the diagnosis on each cause."""


def launch_matched_share(view: RankView) -> float:
    """Return the share of device events in the windows with a launch record; backlog of an earlier step has none."""
    rows = view.in_windows(view.device_rows)
    return float((view.table.launch[rows] >= 0).mean()) if len(rows) else 0.0


@dataclass(frozen=True)
class IdleGaps:
    """The gaps in which a device is idle inside its windows."""

    start_ns_G: Int64s
    length_ns_G: Int64s
    window_G: Int64s
    """Index of the window of each gap."""
    cause_G: Int64s
    """Index into `CAUSES`."""

    def sum_by_window(self, num_windows: int, *causes: str) -> Int64s:
        """Return the ns of idle time by these causes in each window."""
        wanted = np.isin(self.cause_G, [CAUSES.index(cause) for cause in causes])
        found = np.zeros(num_windows, dtype=np.int64)
        np.add.at(found, self.window_G[wanted], self.length_ns_G[wanted])
        return found


def split_idle_ns(view: RankView) -> dict[str, int]:
    """Return the idle ns inside the windows by cause (`find_idle_gaps`).

    Raises NotAvailable if the launches of too many device events are not recorded.
    """
    require_windows(view)
    if launch_matched_share(view) < MIN_MATCHED:
        raise NotAvailable(Reason.NO_LAUNCH_RECORDS, f"under {MIN_MATCHED:.0%} of device events have a launch record")
    gaps = find_idle_gaps(view)
    return {cause: int(gaps.length_ns_G[gaps.cause_G == i].sum()) for i, cause in enumerate(CAUSES)}


def find_idle_gaps(view: RankView, windows_W2: Int64s | None = None) -> IdleGaps:
    """Return the idle gaps inside these windows (default: those of the rank), each with its cause.

    The device event that ends a gap decides its cause. `host_bound`: launched only after the gap began
    (`input` if that event copies from the host). `launch_overhead`: launched before, gap under 30 us. `sync`: the
    host waited for the device as the gap began. `comm_dependency`: launched before, communication ended at that moment.
    `unknown`: launched before, or without a launch record.
    """
    windows_W2 = view.windows.spans_W2 if windows_W2 is None else windows_W2
    gaps_G2, window_G = gaps_in_windows(view.busy_M2, windows_W2)
    table, rows = view.table, view.device_rows
    at = np.searchsorted(table.ts_ns[rows], gaps_G2[:, 1], side="left")
    found = at < len(rows)
    row_G = rows[np.minimum(at, len(rows) - 1)]
    launch_G = table.launch[row_G]
    start_G, length_G = gaps_G2[:, 0], gaps_G2[:, 1] - gaps_G2[:, 0]
    has_launch = found & (launch_G >= 0)
    is_late = has_launch & (table.ts_ns[launch_G] >= start_G)
    is_short = length_G < LAUNCH_GAP_NS
    cause_G = np.full(len(start_G), CAUSES.index("unknown"), np.int64)
    cause_G[is_late] = CAUSES.index("host_bound")
    cause_G[has_launch & ~is_late & is_short] = CAUSES.index("launch_overhead")
    late, early = np.flatnonzero(is_late), np.flatnonzero(has_launch & ~is_late & ~is_short)
    cause_G[late[_covers(view.sync_M2, start_G[late])]] = CAUSES.index("sync")
    copies_in = np.array(["HtoD" in name or "Host-to-Device" in name for name in table.names] or [False])
    copies = late[table.kind[row_G[late]] == Kind.MEMCPY]
    cause_G[copies[copies_in[table.name_id[row_G[copies]]]]] = CAUSES.index("input")
    cause_G[early[np.isin(start_G[early], view.comm_M2[:, 1])]] = CAUSES.index("comm_dependency")
    return IdleGaps(start_G, length_G, window_G, cause_G)


def _covers(spans_M2: Int64s, time_ns: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, for each time, whether it is inside the merged spans, ends included."""
    if not len(spans_M2):
        return np.zeros(len(time_ns), dtype=bool)
    at = np.searchsorted(spans_M2[:, 0], time_ns, side="right") - 1
    return np.asarray((at >= 0) & (time_ns <= spans_M2[np.maximum(at, 0), 1]))
