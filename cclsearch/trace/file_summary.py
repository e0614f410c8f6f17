"""Summary of one rank's whole file, with or without steps."""

from __future__ import annotations

from dataclasses import dataclass

from cclsearch.trace.intervals import covered_ns, total_ns
from cclsearch.trace.view import RankView


@dataclass(frozen=True)
class FileSummary:
    """Nanoseconds of device time over a whole file, by what the device did."""

    span_ns: int
    """First start to last end."""
    busy_ns: int
    compute_ns: int
    comm_ns: int
    exposed_comm_ns: int
    hidden_comm_ns: int
    """Communication during which something computes."""

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
