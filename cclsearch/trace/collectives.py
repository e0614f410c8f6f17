"""Size and duration of each collective: the samples for bandwidth, volume and link fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cclsearch.trace.events import Collective, CollectiveKind, EventTable, Kind
from cclsearch.trace.intervals import Int64s, covered_ns, total_ns
from cclsearch.trace.view import RankView, TraceView

if TYPE_CHECKING:
    from cclsearch.card.model import Card

_RING = {
    CollectiveKind.ALL_REDUCE: 2.0,
    CollectiveKind.ALL_GATHER: 1.0,
    CollectiveKind.REDUCE_SCATTER: 1.0,
    CollectiveKind.ALL_TO_ALL: 1.0,
    CollectiveKind.GATHER: 1.0,
    CollectiveKind.SCATTER: 1.0,
}
"""Collective -> bytes on a link per byte of message, over (n-1)/n; other collectives have factor 1 (nccl-tests)."""


def wire_factor(kind: CollectiveKind, size: int) -> float:
    """Return bytes on the wire per byte of message among `size` ranks, as in nccl-tests' bus bandwidth."""
    return _RING[kind] * (size - 1) / size if kind in _RING else 1.0


@dataclass(frozen=True)
class CollectiveSample:
    """One collective with a known size."""

    call: Collective
    group: str
    size: int
    """Ranks of its group."""
    message_bytes: int
    seconds: float
    """The shortest duration over ranks, or the duration on one rank if the ranks are not matched."""

    @property
    def wire_bytes(self) -> float:
        """Bytes over each rank's link."""
        return self.message_bytes * wire_factor(self.call.kind, self.size)

    @property
    def bus_gbps(self) -> float:
        """Bus bandwidth in GB/s (1 GB = 1e9 bytes)."""
        return self.wire_bytes / self.seconds / 1e9


def group_label(call: Collective) -> str:
    """Return the label of a process group in tables."""
    return call.group_desc or call.group or "default"


def covered_by_label(view: RankView, label_C: Sequence[str]) -> dict[str, tuple[float, Int64s]]:
    """Return label -> seconds per window that calls of this label cover, and their rows; one label per collective."""
    of_row = np.array(label_C or [""])[view.table.coll_id[view.comm_rows]]
    found = {}
    for label in dict.fromkeys(of_row.tolist()):
        rows = view.comm_rows[of_row == label]
        covered_W = covered_ns(view.merge_rows(rows), view.windows.spans_W2)
        found[label] = float(covered_W.sum()) / max(len(covered_W), 1) / 1e9, rows
    return found


def is_scale_up(call: Collective, size: int, domain_size: int) -> bool:
    """Return whether a call's group is inside one domain (a node): by its ranks, which fill domains in order; by its
    size if they are unknown.
    """
    if call.group_ranks:
        return len({rank // domain_size for rank in call.group_ranks}) == 1
    return size <= domain_size


def scale_up_size(card: Card) -> int:
    """Return how many accelerators the card's scale-up links connect: one node, unless the links go further."""
    return card.hardware.scale_up_domain or card.hardware.accelerators_per_node


def collect_samples(trace: TraceView) -> tuple[list[CollectiveSample], bool]:
    """Return every collective of known size, group size and duration, and whether durations exclude waiting.

    If the collectives are matched over ranks, a sample has the shortest duration over them. Otherwise each rank gives
    its own samples, whose durations include waiting.
    """
    matching = trace.matching
    if not matching.is_empty:
        matched = []
        for group in (*matching.groups, *matching.pairs):
            seconds_K = group.transfer_ns_K / 1e9
            for call, seconds in zip(group.calls_K, seconds_K.tolist(), strict=True):
                matched += _sample(call, call.group_size or group.size, seconds)
        return matched, not matching.ranks_missing
    return [sample for view in trace.ranks.values() for sample in _own_samples(view, trace)], False


def _own_samples(view: RankView, trace: TraceView) -> Iterator[CollectiveSample]:
    table = view.table
    for row in view.comm_rows.tolist():
        call = table.collectives[table.coll_id[row]]
        size = call.group_size or (len(call.group_ranks) if call.group_ranks else trace.world_size)
        if size:
            yield from _sample(call, size, int(table.dur_ns[row]) / 1e9)


def _sample(call: Collective, size: int, seconds: float) -> list[CollectiveSample]:
    message = call.message_bytes
    if not message or size < 2 or seconds <= 0 or call.kind is CollectiveKind.BARRIER:
        return []
    return [CollectiveSample(call, group_label(call), size, message, seconds)]


def explain_no_communication(trace: TraceView) -> str:
    """Return one line if the windows have no communication (none was recorded, or only outside the steps); else ""."""
    views = trace.ranks.values()
    if sum(int(covered_ns(view.comm_M2, view.windows.spans_W2).sum()) for view in views):
        return ""
    calls: Counter[str] = Counter()
    outside_ns = 0
    for view in views:
        table, rows = view.table, view.comm_rows
        calls.update(str(table.collectives[number].kind) for number in table.coll_id[rows].tolist())
        outside_ns += total_ns(view.comm_M2)
    if not calls:
        return "no communication was recorded"
    names = ", ".join(f"{count} {name}" for name, count in calls.most_common(3))
    ranks = f", summed over {len(trace.ranks)} ranks" if len(trace.ranks) > 1 else ""
    return f"no communication in the steps; outside of them the traces have {names} ({outside_ns / 1e9:.3g} s{ranks})"


def sized_share(view: RankView) -> float:
    """Return the share of communication time (without times: of the calls) in calls of known message size."""
    table = view.table
    rows = view.comm_rows
    dur_ns = table.dur_ns[rows] if table.is_timed else np.ones(len(rows), dtype=np.int64)
    if not dur_ns.sum():
        return 0.0
    known = np.array([_is_sized(call) for call in table.collectives] or [False])
    return float(dur_ns[known[table.coll_id[rows]]].sum() / dur_ns.sum())


def count_unsized(rows_by_table: Iterable[tuple[EventTable, Int64s]]) -> tuple[int, int]:
    """Count, among these rows of each table, communication rows of unknown size and all communication rows."""
    unsized = total = 0
    for table, rows in rows_by_table:
        calls = table.coll_id[rows[table.kind[rows] == Kind.COMM]]
        known = np.array([_is_sized(call) for call in table.collectives] or [False])
        total += len(calls)
        unsized += int((~known[calls]).sum())
    return unsized, total


def _is_sized(call: Collective) -> bool:
    return call.message_bytes is not None or call.kind is CollectiveKind.BARRIER


def wire_bytes_of(view: RankView, rows: Int64s, world_size: int | None) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the wire bytes of each of these communication rows; NaN if the size is unknown."""
    per_call = [_call_wire_bytes(call, world_size) for call in view.table.collectives] or [float("nan")]
    return np.array(per_call)[view.table.coll_id[rows]]


def _call_wire_bytes(call: Collective, world_size: int | None) -> float:
    if call.kind is CollectiveKind.BARRIER:
        return 0.0
    size = call.group_size or (len(call.group_ranks) if call.group_ranks else world_size)
    if call.message_bytes is None or not size:
        return float("nan")
    return call.message_bytes * wire_factor(call.kind, size)
