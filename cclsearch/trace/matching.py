"""Match the collectives of one rank with the other ranks', and measure how the ranks' clocks differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cclsearch.trace.events import POINT_TO_POINT, Collective, CollectiveKind, EventTable, Kind
from cclsearch.trace.files.cache import release_memory
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.names.kinds import BLOCKING

MAX_CLOCK_ERROR_NS = 200_000
"""Difference of the ends of blocking collectives above which the clocks count as not aligned."""
MAX_MISALIGNED_SHARE = 0.5
"""Share of a group's blocking collectives without overlap in time above which they are not the same calls."""

GroupKey = tuple[str, ...]
PAIR = "pair"
"""First part of the key of two ranks that send to each other."""
WORLD = "world"
"""First part of the key of a group without a name in any trace: assumed to be all ranks."""


@dataclass(frozen=True)
class _Sequence:
    """The calls of one rank in one group, in order of start: all that matching needs of the rank's table."""

    rows: Int64s
    start_ns: Int64s
    """Absolute start by the rank's own clock."""
    dur_ns: Int64s
    calls: tuple[Collective, ...]


@dataclass(frozen=True)
class MatchedGroup:
    """The collectives of one process group, matched over its R ranks: column k is the k-th collective of each."""

    key: GroupKey
    ranks: tuple[int, ...]
    size: int
    """Ranks of the group, with or without a trace."""
    rows_RK: Int64s
    """Row of each collective in the table of its rank."""
    start_ns_RK: Int64s
    """Absolute start by the rank's own clock."""
    dur_ns_RK: Int64s
    calls_K: tuple[Collective, ...]
    """The calls, from the first rank's trace."""

    @property
    def is_pair(self) -> bool:
        """Whether these are point-to-point messages between two ranks instead of collectives."""
        return self.key[0] == PAIR

    def on_one_clock(self, offset_ns: Mapping[int, int]) -> Int64s:
        """Return the starts with each rank's offset added, shape (R, K)."""
        return self.start_ns_RK + np.array([[offset_ns[rank]] for rank in self.ranks], dtype=np.int64)

    @property
    def transfer_ns_K(self) -> Int64s:
        """The shortest duration over ranks: the transfer without waiting."""
        return np.asarray(self.dur_ns_RK.min(axis=0))


BlockingCalls = tuple[MatchedGroup, Int64s]
"""A group, and the columns of its blocking collectives."""


@dataclass(frozen=True)
class Matching:
    """All matched collectives, and the problems of those that could not be matched."""

    groups: tuple[MatchedGroup, ...] = ()
    """Groups of collectives."""
    pairs: tuple[MatchedGroup, ...] = ()
    """Messages between two ranks."""
    mismatched: tuple[str, ...] = ()
    """One line for each group whose sequences differ between its ranks."""
    ranks_missing: bool = False
    """Whether a group has ranks without a trace."""
    offset_ns: Mapping[int, int] | None = None
    """Rank -> offset to add to its absolute times to align the clocks; None if they cannot be aligned."""
    clock_error_ns: float | None = None
    """Median distance of a rank's ends of blocking collectives from the others' after alignment, for the worst rank."""
    misaligned: str = ""
    """One line if ranks end collectives before others begin them: these are different calls, and left out here."""
    transfers: Mapping[int, tuple[Int64s, Int64s]] = field(default_factory=dict)
    """Rank -> the matched rows of its table, sorted, and the transfer part of their durations in ns."""

    @property
    def is_empty(self) -> bool:
        """Whether no collective of a rank could be matched with one of another."""
        return not self.groups and not self.pairs

    def transfer_ns_of(self, rank: int, rows: Int64s) -> Int64s:
        """Return for each of these rows of a rank's table the transfer part of its duration; -1 for unmatched rows."""
        matched, transfer_ns = self.transfers.get(rank, ((), ()))
        if not len(matched):
            return np.full(len(rows), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(matched, rows), len(matched) - 1)
        return np.where(np.take(matched, at) == rows, np.take(transfer_ns, at), -1)


def match_collectives(tables: Mapping[int, EventTable], world_size: int | None) -> Matching:
    """Match the k-th collective of each process group over the ranks that have a table.

    A group whose ranks differ in number, kind or size of collectives is left out and named in `mismatched`. The columns
    of one rank at a time are in memory.
    """
    sequences: dict[GroupKey, dict[int, _Sequence]] = defaultdict(dict)
    sizes: dict[GroupKey, int] = {}
    for rank, table in tables.items():
        for key, size, sequence in _sequences_of(rank, table, world_size or len(tables)):
            sequences[key][rank] = sequence
            sizes[key] = size
        release_memory(table)
    groups, mismatched, missing = [], [], False
    for key, by_rank in sorted(sequences.items()):
        missing |= len(by_rank) < sizes[key] and key[0] != PAIR
        if len(by_rank) < 2:
            continue
        problem = _find_mismatch(by_rank)
        if problem and key[0] == PAIR:
            continue
        if problem:
            mismatched.append(f"{_describe_group(key)}: {problem}")
        else:
            groups.append(_make_group(key, sizes[key], by_rank))
    on_one_clock = share_clock(tables.values())
    offset_ns = dict.fromkeys(tables, 0) if on_one_clock else _fit_offsets(_blocking_of(groups))
    misaligned = {group.key: line for group in groups if (line := _find_misaligned_calls(group, offset_ns))}
    groups = [group for group in groups if group.key not in misaligned]
    error_ns = _clock_error_ns(_blocking_of(groups), offset_ns)
    misaligned_rank = _find_misaligned_rank(_blocking_of(groups), error_ns)
    if misaligned_rank:
        groups = []
    not_aligned = set(offset_ns) != set(tables) or (error_ns is None and not (on_one_clock and not misaligned))
    too_far = error_ns is not None and error_ns > _tolerated_error_ns(tables, _blocking_of(groups))
    return Matching(
        groups=tuple(group for group in groups if not group.is_pair),
        pairs=tuple(group for group in groups if group.is_pair),
        mismatched=tuple(mismatched),
        ranks_missing=missing,
        offset_ns=None if not_aligned or too_far else offset_ns,
        clock_error_ns=error_ns,
        misaligned="; ".join(filter(None, (*misaligned.values(), misaligned_rank))),
        transfers=_transfers_by_rank(groups),
    )


def _describe_group(key: GroupKey) -> str:
    if key[0] == WORLD:
        return "the group of all ranks"
    name = f" {key[-1]!r}" if key[-1] else ""
    return f"process group{name} of ranks {key[1]}" if key[0] == "ranks" else f"process group{name}"


def _sequences_of(rank: int, table: EventTable, world_size: int) -> Iterator[tuple[GroupKey, int, _Sequence]]:
    """Yield key, size and calls of each process group of one rank."""
    if not table.collectives:
        return
    rows = np.flatnonzero((table.kind == Kind.COMM) & (table.coll_id >= 0))
    rows = rows[np.argsort(table.ts_ns[rows], kind="stable")]
    keys = [_group_of(rank, call, table, world_size) for call in table.collectives]
    order = {key: number for number, key in enumerate(dict.fromkeys(k for k in keys if k))}
    group_of_call = np.array([order[key] if key else -1 for key in keys], dtype=np.int64)
    number_of_row = group_of_call[table.coll_id[rows]] if len(rows) else rows
    for (key, size), number in order.items():
        own = rows[number_of_row == number]
        if len(own):
            calls = tuple(table.collectives[i] for i in table.coll_id[own].tolist())
            yield key, size, _Sequence(own, table.ts_ns[own] + table.base_ns, np.array(table.dur_ns[own]), calls)


def _group_of(rank: int, call: Collective, table: EventTable, world_size: int) -> tuple[GroupKey, int] | None:
    """Return key and size of a call's group, equal on all its ranks; None if unknown."""
    if call.kind is CollectiveKind.SEND_RECV and not call.has_args:
        return (WORLD, "send_recv"), world_size  # before NCCL 2.17 an all-to-all ran as a kernel of that name
    if call.kind in POINT_TO_POINT:
        return _pair_of(rank, call)
    ranks = call.group_ranks or _ranks_by_description(call, table)
    if ranks:
        return ("ranks", ",".join(map(str, ranks)), call.group or call.group_desc or ""), len(ranks)
    if call.group is not None:
        return ("group", call.group), call.group_size or world_size
    if call.group_size not in (None, world_size):
        return None
    if len({group.ranks for group in table.groups if group.ranks}) > 1:
        return None
    return (WORLD,), world_size


def _pair_of(rank: int, call: Collective) -> tuple[GroupKey, int] | None:
    """Return the pair of a point-to-point call: the k-th send to a rank is the k-th receive there."""
    others = [other for other in call.group_ranks or () if other != rank]
    peer = call.peer if call.peer is not None else others[0] if len(others) == 1 else None
    if peer is None or peer == rank:
        return None
    if call.kind is CollectiveKind.SEND_RECV:
        return (PAIR, f"{min(rank, peer)} and {max(rank, peer)}"), 2
    source, target = (rank, peer) if call.kind is CollectiveKind.SEND else (peer, rank)
    return (PAIR, f"{source} to {target}"), 2


def _ranks_by_description(call: Collective, table: EventTable) -> tuple[int, ...] | None:
    if not call.group_desc:
        return None
    for group in table.groups:
        if group.desc == call.group_desc or group.desc.endswith(f"_{call.group_desc}"):
            return group.ranks or None
    return None


def _find_mismatch(by_rank: Mapping[int, _Sequence]) -> str:
    """One line on how the sequences differ; "" if they agree."""
    (first, sequence), *others = by_rank.items()
    expected = [_signature(call) for call in sequence.calls]
    for rank, other in others:
        if len(other.calls) != len(expected):
            return f"{len(expected)} collectives on rank {first}, {len(other.calls)} on rank {rank}"
        for k, (a, call) in enumerate(zip(expected, other.calls, strict=True)):
            b = _signature(call)
            if a != b:
                return f"collective {k} is {_call_words(*a)} on rank {first}, {_call_words(*b)} on rank {rank}"
    return ""


def _call_words(kind: str, size: int | None) -> str:
    return kind if size is None else f"{kind} of {size} bytes"


def _signature(call: Collective) -> tuple[str, int | None]:
    """Return kind and size of a call that must be equal on all ranks; no size for uneven splits, which may differ."""
    if call.kind in POINT_TO_POINT:
        return "point-to-point", None
    uneven = call.kind is CollectiveKind.ALL_TO_ALL or call.in_splits or call.out_splits
    return str(call.kind), None if uneven else call.message_bytes


def _make_group(key: GroupKey, size: int, by_rank: Mapping[int, _Sequence]) -> MatchedGroup:
    ranks = tuple(sorted(by_rank))
    sequences = [by_rank[rank] for rank in ranks]
    return MatchedGroup(
        key=key,
        ranks=ranks,
        size=size,
        rows_RK=np.stack([one.rows for one in sequences]),
        start_ns_RK=np.stack([one.start_ns for one in sequences]),
        dur_ns_RK=np.stack([one.dur_ns for one in sequences]),
        calls_K=sequences[0].calls,
    )


def _transfers_by_rank(groups: Sequence[MatchedGroup]) -> dict[int, tuple[Int64s, Int64s]]:
    """Return the matched rows of each rank, sorted, and the transfer part of each."""
    found: dict[int, list[tuple[Int64s, Int64s]]] = defaultdict(list)
    for group in groups:
        for rank, rows_K in zip(group.ranks, group.rows_RK, strict=True):
            found[rank].append((rows_K, group.transfer_ns_K))
    transfers = {}
    for rank, parts in sorted(found.items()):
        rows, transfer_ns = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(rows, kind="stable")
        transfers[rank] = rows[order], transfer_ns[order]
    return transfers


def _tolerated_error_ns(tables: Mapping[int, EventTable], blocking: Sequence[BlockingCalls]) -> float:
    """Return how far a rank's ends may be from the others'.

    Ranks on CPU cores of one host end a collective when a core is free for them, at any clock: their ends may differ by
    the duration of a collective.
    """
    if not share_clock(tables.values()) or any(table.accelerator != "cpu" for table in tables.values()):
        return MAX_CLOCK_ERROR_NS
    return max(_median_duration_ns(blocking), MAX_CLOCK_ERROR_NS)


def _median_duration_ns(blocking: Sequence[BlockingCalls]) -> float:
    durations = [group.dur_ns_RK[:, columns].ravel() for group, columns in blocking]
    return float(np.median(np.concatenate(durations))) if durations else 0.0


def _find_misaligned_rank(blocking: Sequence[BlockingCalls], error_ns: float | None) -> str:
    """One line if a rank's ends are further from the others' than a collective takes; else ""."""
    median_ns = _median_duration_ns(blocking)
    if error_ns is None or error_ns <= max(median_ns, MAX_CLOCK_ERROR_NS):
        return ""
    return (
        f"a rank ends collectives {error_ns / 1e9:.3g} s away from the other ranks, while the median collective takes"
        f" {median_ns / 1e9:.3g} s"
    )


def share_clock(tables: Iterable[EventTable]) -> bool:
    """Whether all tables have one clock: they are of the same file (devices of one report), or name the same host."""
    hosts, sources = zip(*((table.host, table.source) for table in tables), strict=True)
    return any(len(set(names)) == 1 and names[0] for names in (hosts, sources))


def blocking_groups(table: EventTable, rank: int, world_size: int) -> frozenset[GroupKey]:
    """Return the groups in which this rank calls blocking collectives."""
    found = (_group_of(rank, call, table, world_size) for call in table.collectives if call.kind in BLOCKING)
    return frozenset(placed[0] for placed in found if placed)


def _find_misaligned_calls(group: MatchedGroup, offsets: Mapping[int, int]) -> str:
    """One line if a group's collectives mostly do not overlap in time on the aligned clock; else ""."""
    columns = _blocking_columns(group)
    if not len(columns) or not all(rank in offsets for rank in group.ranks):
        return ""
    start_RK = group.on_one_clock(offsets)[:, columns]
    end_RK = start_RK + group.dur_ns_RK[:, columns]
    gap_ns_K = start_RK.max(axis=0) - end_RK.min(axis=0)
    misaligned_K = gap_ns_K > MAX_CLOCK_ERROR_NS
    if misaligned_K.mean() <= MAX_MISALIGNED_SHARE:
        return ""
    return (
        f"{_describe_group(group.key)}: {int(misaligned_K.sum())} of {len(columns)} collectives end on one rank"
        f" {float(np.median(gap_ns_K[misaligned_K])) / 1e9:.3g} s before another begins them"
    )


def _blocking_of(groups: Sequence[MatchedGroup]) -> list[BlockingCalls]:
    return [(group, columns) for group in groups if len(columns := _blocking_columns(group))]


def _blocking_columns(group: MatchedGroup) -> Int64s:
    return np.array([k for k, call in enumerate(group.calls_K) if call.kind in BLOCKING], dtype=np.int64)


def _fit_offsets(blocking: Sequence[BlockingCalls]) -> dict[int, int]:
    """Return the offset of each rank: the median difference of its ends from a rank's with known offset."""
    offsets: dict[int, int] = {}
    pending = list(blocking)
    if pending:
        offsets[pending[0][0].ranks[0]] = 0
    while pending:
        ready = next((item for item in pending if any(rank in offsets for rank in item[0].ranks)), None)
        if ready is None:
            break
        pending.remove(ready)
        group, columns = ready
        ends_RK = (group.start_ns_RK + group.dur_ns_RK)[:, columns]
        anchor = next(i for i, rank in enumerate(group.ranks) if rank in offsets)
        for i, rank in enumerate(group.ranks):
            if rank not in offsets:
                behind = int(np.median(ends_RK[anchor] - ends_RK[i]))
                offsets[rank] = offsets[group.ranks[anchor]] + behind
    return offsets


def _clock_error_ns(blocking: Sequence[BlockingCalls], offsets: Mapping[int, int]) -> float | None:
    """Return the largest median distance of a rank's ends from the median end of the collective, over ranks."""
    errors: dict[int, list[Int64s]] = defaultdict(list)
    for group, columns in blocking:
        if not all(rank in offsets for rank in group.ranks):
            continue
        ends_RK = (group.on_one_clock(offsets) + group.dur_ns_RK)[:, columns]
        ends_RK = ends_RK - ends_RK.min(axis=0)  # absolute nanoseconds do not fit into the floats of a median
        distance_RK = np.abs(ends_RK - np.median(ends_RK, axis=0))
        for rank, distance_K in zip(group.ranks, distance_RK, strict=True):
            errors[rank].append(distance_K)
    return max((float(np.median(np.concatenate(found))) for found in errors.values()), default=None)
