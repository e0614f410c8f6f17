"""Collective algorithms as segments: which links carry how many bytes, how often, and with what latency.

All groups of one kind of parallelism communicate at once, so a segment has the traffic of all of them. Rings and
halving-doubling: Thakur et al. 2005; double binary trees: Sanders et al. 2009, as NCCL uses them; hierarchical: reduce
inside each axis of the network before the next one, in pieces that overlap (Cho et al. 2019, BlueConnect).

Message sizes count as in nccl-tests: all-reduce and broadcast the buffer, all-gather the gathered output,
reduce-scatter the input, all-to-all what a rank sends to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, permutations

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.network.topology import Array, Ids, TieredNetwork, drain

PIECES = 4
"""Number of pieces of a pipelined hierarchical collective: ASTRA-sim's usual `preferred-dataset-splits`."""
MAX_FLOWS = 1 << 21
"""An exchange with more flows than this is computed from some of its shifts (rank r to rank r + shift)."""
MAX_DRAINED = 4096
"""Number of flows of unequal size up to which their rates are shared anew at each end."""
NEVER_FASTEST = frozenset({"turns"})
"""Modelled as some library does it; never chosen by `auto`, since another one is always faster."""
ORDERS = 24
"""Number of orders of arrival at an exchange with turns that the mean is of; up to four members: all orders."""


@dataclass(frozen=True)
class Compression:
    """Compressed collectives, in the structure of NCCLZ (Wang, Ye and Yu 2026, arXiv:2605.12396, abstract).

    Quantization runs once at each end, outside of the collective; entropy coding runs inside its steps and overlaps
    with the transfer, so that a step takes the longer of the two. The abstract is all that we read: it states the
    structure and no figure of its parts, so every parameter is the user's.
    """

    ratio: float
    """Bytes of a message over bytes on the wire."""
    quantize_bytes_s: float = math.inf
    """Bytes of message per second that quantization, and its inverse, process."""
    code_bytes_s: float = math.inf
    """Bytes of message per second that entropy coding processes in a step."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a collective in which the same flows repeat; its links may be shared with other segments."""

    links: Ids
    flows: Array
    """(L,) flows on each of these links, each of `flow_bytes`: bytes on the link over the mean size of a flow."""
    flow_bytes: float
    alone_s: float
    """Seconds of the transfer of one repetition if nothing else uses the links."""
    latency_s: float
    """Latency of one repetition: of its longest route; in a ring of the mean one, since a message passes all."""
    sent_bytes: float = 0.0
    """Most bytes that a rank sends in one repetition."""
    repeats: float = 1.0
    floor_s: float = 0.0
    """Seconds that one repetition takes at least, however fast the links are (coding)."""
    pattern: int = field(default_factory=count().__next__)
    """Number that segments of the same flows share at any size."""

    @property
    def seconds(self) -> float:
        """Seconds of all repetitions if nothing else uses the links."""
        return self.repeats * (self.latency_s + max(self.alone_s, self.floor_s))


@dataclass(frozen=True, eq=False)
class Schedule:
    """Segments of a collective, one after the other."""

    algorithm: str
    segments: tuple[Segment, ...]
    extra_s: float = 0.0
    """Work before and after that uses no link (quantization)."""

    @property
    def seconds(self) -> float:
        """Seconds if nothing else uses the links."""
        return self.extra_s + sum(segment.seconds for segment in self.segments)


@dataclass(eq=False)
class Collectives:
    """The collectives of one network; the load of a pattern on the links is computed once."""

    network: TieredNetwork
    one_way: bool = False
    """Rings in one direction only; else in both at once, which doubles the bandwidth of ring and torus links."""
    compression: Compression | None = None
    _patterns: dict[tuple[object, ...], Segment] = field(default_factory=dict)
    _schedules: dict[tuple[object, ...], Schedule] = field(default_factory=dict)

    def schedule(
        self, kind: str, groups_GM: Ids, message_bytes: float, algorithm: str = "auto", pieces: int = 1
    ) -> Schedule:
        """Return how all groups run the collective at once; `auto` is the fastest algorithm for this size.

        `pieces`: parts of the message that go one after the other. UserError if there is no such algorithm.
        """
        options = ALGORITHMS.get(kind)
        if options is None:
            raise UserError(f"no collective {kind!r}: it is one of {', '.join(ALGORITHMS)}")
        if algorithm not in ("auto", *options):
            raise UserError(f"no algorithm {algorithm!r} of {kind}: it is one of auto, {', '.join(options)}")
        if groups_GM.shape[1] < 2:
            return Schedule("none", ())
        key = (kind, groups_GM.shape, groups_GM.tobytes(), message_bytes, algorithm, pieces)
        if key not in self._schedules:
            self._schedules[key] = self._make(kind, groups_GM, message_bytes, algorithm, pieces)
        return self._schedules[key]

    def _make(self, kind: str, groups_GM: Ids, message_bytes: float, algorithm: str, pieces: int) -> Schedule:
        options = ALGORITHMS[kind]
        wire, extra_s, code_s = message_bytes, 0.0, 0.0
        if self.compression is not None:
            wire = message_bytes / self.compression.ratio
            extra_s = 2 * message_bytes / self.compression.quantize_bytes_s
            code_s = self.compression.ratio / self.compression.code_bytes_s  # for a byte on the wire
        names = [name for name in options if name not in NEVER_FASTEST] if algorithm == "auto" else [algorithm]
        found = []
        for name in names:
            segments = options[name](self, kind, groups_GM, wire / pieces)
            if segments is not None:
                parts = (
                    replace(one, repeats=one.repeats * pieces, floor_s=one.sent_bytes * code_s) for one in segments
                )
                found.append(Schedule(name, tuple(parts), extra_s))
        if not found:
            raise UserError(f"{algorithm} cannot run {kind} in groups of {groups_GM.shape[1]} on this network")
        return min(found, key=lambda each: each.seconds)

    def pattern(
        self,
        name: str,
        groups_GM: Ids,
        make: Callable[[], tuple[Ids, Ids, Array]],
        *,
        passes_all: bool = False,
        afters: Sequence[Ids] = (),
    ) -> Segment:
        """Return the segment of flows of relative sizes; `make` returns source, target and size of each flow.

        `passes_all`: a message passes all routes one after the other, so that their mean latency counts.
        `afters`: ways in which flows wait for flows, as `drain` has them; the time is the mean over them.
        """
        key = (name, groups_GM.shape, groups_GM.tobytes())
        if key not in self._patterns:
            source, target, size = make()
            self._patterns[key] = self._measure(source, target, size, passes_all, afters)
        return self._patterns[key]

    def _measure(self, source: Ids, target: Ids, size: Array, passes_all: bool, afters: Sequence[Ids] = ()) -> Segment:
        moves = (source != target) & (size > 0)
        source, target, size = source[moves], target[moves], size[moves]
        if not len(source):
            return Segment(np.zeros(0, dtype=np.int64), np.zeros(0), 0.0, 0.0, 0.0)
        capacity = self.network.capacity_L
        routes = self.network.route(source, target)
        load = np.bincount(routes.link, weights=size[routes.flow], minlength=len(capacity))
        links = np.flatnonzero(load)
        # flows of equal size that begin together end, at the latest, with the fullest link's: all others are faster
        alone = float((load[links] / capacity[links]).max(initial=0.0))
        if size.min() != size.max() and len(size) <= MAX_DRAINED:
            alone = float(drain(routes.flow, routes.link, size, capacity).max())
        if afters:
            ends = [drain(routes.flow, routes.link, size, capacity, after).max() for after in afters]
            alone = float(np.mean(ends))
        mean = float(size.mean())
        latency_s = float(routes.latency_s.mean() if passes_all else routes.latency_s.max())
        sent = float(np.bincount(source, weights=size).max())
        return Segment(links, load[links] / mean, mean, alone, latency_s, sent)


Segments = tuple[Segment, ...]
Algorithm = Callable[[Collectives, str, Ids, float], Segments | None]


def _sized(segment: Segment, factor: float, repeats: float) -> Segment:
    return replace(
        segment,
        flow_bytes=segment.flow_bytes * factor,
        alone_s=segment.alone_s * factor,
        sent_bytes=segment.sent_bytes * factor,
        repeats=float(repeats),
    )


def _edges(source: Ids, target: Ids, size: float = 1.0) -> tuple[Ids, Ids, Array]:
    return source.ravel(), target.ravel(), np.full(source.size, size)


def _ring_pattern(on: Collectives, groups_GM: Ids) -> Segment:
    """One step of a ring in which each member passes 1 byte on, half of it in each direction."""

    def make() -> tuple[Ids, Ids, Array]:
        ahead = np.roll(groups_GM, -1, axis=1)
        if on.one_way:
            return _edges(groups_GM, ahead)
        source, target = np.concatenate([groups_GM, ahead]), np.concatenate([ahead, groups_GM])
        return _edges(source, target, 0.5)

    return on.pattern("one-way ring" if on.one_way else "ring", groups_GM, make, passes_all=True)


def _ring(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments:
    size = groups_GM.shape[1]
    steps = (size - 1) * (2 if kind == "all_reduce" else 1)
    return (_sized(_ring_pattern(on, groups_GM), message / size, steps),)


def _ring_with_turns(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments:
    """A ring as Gloo's all-gather has it: two members send to each other, in two pieces, and take turns as in `_turns`.

    The second piece of one overlaps with the first of the other: three pieces one after the other, in place of two.
    """
    (step,) = _ring(on, kind, groups_GM, message)
    return (replace(step, repeats=step.repeats * (1.5 if groups_GM.shape[1] == 2 else 1.0)),)


def _chain(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments:
    """A pipelined chain: every link carries the whole message, and a small message passes all of them."""
    step = on.pattern("chain", groups_GM, lambda: _edges(groups_GM[:, :-1], groups_GM[:, 1:]), passes_all=True)
    step = _sized(step, message, 1)
    return (replace(step, latency_s=step.latency_s * (groups_GM.shape[1] - 1)),)


def _binomial(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments:
    """A binomial tree in which a member sends the whole message to all its children at once (as in Gloo)."""
    size = groups_GM.shape[1]
    child = np.arange(1, size)
    parent = child - (1 << np.floor(np.log2(child)).astype(np.int64))
    depth = np.array([number.bit_count() for number in parent.tolist()])
    layers = []
    for level in range(int(depth.max()) + 1):
        low, high = groups_GM[:, parent[depth == level]], groups_GM[:, child[depth == level]]
        ends = (low, high) if kind == "broadcast" else (high, low)
        step = on.pattern(f"binomial {kind} {level}", groups_GM, lambda ends=ends: _edges(*ends))  # type: ignore[misc]
        layers.append(_sized(step, message, 1))
    return tuple(layers if kind == "broadcast" else layers[::-1])


def _binary_edges(size: int) -> tuple[Ids, Ids]:
    """Return child and parent of an in-order binary tree, in which every second member is a leaf (as in NCCL)."""
    children, parents = [], []
    for child in range(1, size):
        bit = child & -child
        up = (child ^ bit) | (bit << 1)
        parents.append(up if up < size else child ^ bit)
        children.append(child)
    return np.array(children, dtype=np.int64), np.array(parents, dtype=np.int64)


def _tree(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments:
    """Two binary trees, each with half of the message; a leaf in one is an inner node of the other."""
    size = groups_GM.shape[1]

    def make() -> tuple[Ids, Ids, Array]:
        child, parent = _binary_edges(size)
        sources, targets = [], []
        for shift in (0, 1):
            low, high = groups_GM[:, (child + shift) % size], groups_GM[:, (parent + shift) % size]
            sources += [low] * (kind != "broadcast") + [high] * (kind != "reduce")
            targets += [high] * (kind != "broadcast") + [low] * (kind != "reduce")
        return _edges(np.concatenate(sources), np.concatenate(targets), 0.5)

    step = _sized(on.pattern(f"tree {kind}", groups_GM, make), message, 1)
    depth = math.ceil(math.log2(size)) * (2 if kind in ("all_reduce", "barrier") else 1)
    return (replace(step, latency_s=step.latency_s * depth),)


def _halving(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments | None:
    """Recursive halving, doubling, or both, in exchanges over distance 1, 2, 4, ..., the near ones with most bytes."""
    size = groups_GM.shape[1]
    whole = 1 << (size.bit_length() - 1)
    if whole != size and kind != "all_reduce":
        return None
    segments = []
    core = groups_GM[:, :whole]
    both = 2 if kind == "all_reduce" else 1
    if whole != size:  # the members beyond the power of two send all to a partner, and get the result
        rest, partner = groups_GM[:, whole:], groups_GM[:, : size - whole]
        fold = on.pattern("fold", groups_GM, lambda: _edges(rest, partner))
        back = on.pattern("unfold", groups_GM, lambda: _edges(partner, rest))
        segments += [_sized(fold, message, 1), _sized(back, message, 1)]
    for level in range(int(math.log2(whole))):
        partner = core[:, np.arange(whole) ^ (1 << level)]
        step = on.pattern(f"exchange {1 << level}", core, lambda partner=partner: _edges(core, partner))  # type: ignore[misc]
        segments.append(_sized(step, message / 2 ** (level + 1), both))
    return tuple(segments)


def _direct(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments:
    """Every member sends to every other at once (all-to-all, and gather and scatter of the first member)."""
    groups, size = groups_GM.shape

    def make() -> tuple[Ids, Ids, Array]:
        if kind in ("gather", "scatter"):
            root = np.repeat(groups_GM[:, :1], size - 1, axis=1)
            others = groups_GM[:, 1:]
            return _edges(others, root) if kind == "gather" else _edges(root, others)
        shifts = np.arange(1, size)
        most = max(MAX_FLOWS // (groups * size), 1)
        if len(shifts) > most:
            shifts = np.random.default_rng(0).choice(shifts, most, replace=False)
        source = np.concatenate([groups_GM] * len(shifts))
        target = np.concatenate([np.roll(groups_GM, -shift, axis=1) for shift in shifts])
        return _edges(source, target, (size - 1) / len(shifts))

    step = on.pattern(f"direct {kind}", groups_GM, make)
    return (_sized(step, message / size, 1),)


def _turns(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments | None:
    """Every member sends to every other, as Gloo does: some pairs send one after the other, not both at once.

    A member posts, for distance 1, 2, ..., a send to the member so far ahead and a receive from the one so far behind
    (gloo/alltoall.cc). The word that a receive is posted goes through the queue of that pair's socket
    (gloo/transport/tcp/pair.cc), so that it waits behind a message that was posted before. In a pair the member that
    posts its send first, if it is also the later one to arrive, finds the other ready and sends at once: its own
    receive is then announced behind that message. The time is the mean over some orders of arrival.
    """
    groups, size = groups_GM.shape
    if groups * size * (size - 1) > MAX_DRAINED:
        return None
    shifts = np.arange(1, size)
    target_DM = (np.arange(size) + shifts[:, None]) % size
    group = np.arange(groups)[None, :, None]
    reverse_DGM = ((size - 1 - shifts)[:, None, None] * groups + group) * size + target_DM[:, None]

    def waits(arrival_M: Ids) -> Ids:
        """Return, of each flow, the flow that goes first; -1 if it waits for none."""
        held_DM = (2 * shifts[:, None] >= size) & (arrival_M[target_DM] > arrival_M)
        return np.where(held_DM[:, None], reverse_DGM, -1).ravel()

    def make() -> tuple[Ids, Ids, Array]:
        source = np.concatenate([groups_GM] * len(shifts))
        return _edges(source, np.concatenate([np.roll(groups_GM, -shift, axis=1) for shift in shifts]))

    step = on.pattern("turns", groups_GM, make, afters=[waits(order) for order in list_arrivals(size)])
    return (_sized(step, message / size, 1),)


def list_arrivals(size: int) -> list[Ids]:
    """Return orders in which members arrive: (M,) the position of each; some, if there are more than `ORDERS`."""
    if math.factorial(size) <= ORDERS:
        return [np.array(order) for order in permutations(range(size))]
    generator = np.random.default_rng(0)
    return [generator.permutation(size) for _ in range(ORDERS)]


def _point(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments:
    step = on.pattern("point", groups_GM, lambda: _edges(groups_GM[:, 0], groups_GM[:, 1]))
    return (_sized(step, message, 1),)


def split_axes(on: TieredNetwork, groups_GM: Ids) -> list[Ids] | None:
    """Return, for each axis of the network that groups extend over, the subgroups along it; None if irregular.

    Subgroups of the first axis are innermost. Groups are regular if each is a full grid of the axes.
    """
    groups, size = groups_GM.shape
    axes = on.axes_of(groups_GM.ravel())
    coordinates = np.stack([axis.reshape(groups, size) for axis in axes])  # (A, G, M)
    counts = [len(np.unique(axis[0])) for axis in coordinates]
    if math.prod(counts) != size:
        return None
    order = np.lexsort(tuple(coordinates), axis=-1)
    arranged = np.take_along_axis(coordinates, order[None], axis=2).reshape(-1, groups, *counts[::-1])
    for number, axis in enumerate(arranged):  # along every other axis the coordinate must not change
        moved = np.moveaxis(axis, -1 - number, -1)
        if (moved != moved[:, *([slice(0, 1)] * (moved.ndim - 2)), :]).any():
            return None
    grid = np.take_along_axis(groups_GM, order, axis=1).reshape(groups, *counts[::-1])
    return [np.moveaxis(grid, -1 - number, -1).reshape(-1, count) for number, count in enumerate(counts) if count > 1]


def _time_of(segments: Segments) -> float:
    return sum(segment.seconds for segment in segments)


def _hierarchical(pieces: int) -> Algorithm:
    """Along one axis after the other, each with the fastest algorithm; pieces overlap on different axes.

    Then the slowest axis is always busy, once the first piece has passed the axes inside of it.
    """

    def run(on: Collectives, kind: str, groups_GM: Ids, message: float) -> Segments | None:
        along = split_axes(on.network, groups_GM)
        if along is None or len(along) < 2:
            return None
        share, stages = message / pieces, []
        for number, subgroups in enumerate(along):
            options = [_ring(on, kind, subgroups, share), _halving(on, kind, subgroups, share)]
            if kind == "all_reduce" and number == len(along) - 1:
                options.append(_tree(on, kind, subgroups, share))
            stages.append(min((each for each in options if each is not None), key=_time_of))
            share /= subgroups.shape[1]
        times = [_time_of(stage) for stage in stages]
        if pieces > 1 and kind == "all_reduce":
            # it comes back through the axes that it passed first, while the pieces behind it use the others
            filled = [pieces * times[number] + sum(times[:number]) for number in range(len(times))]
            slowest = filled.index(max(filled))
            before = stages[:slowest]
        else:
            slowest = times.index(max(times))
            before = stages[:slowest] + stages[slowest + 1 :]
        busy = tuple(replace(each, repeats=each.repeats * pieces) for each in stages[slowest])
        return (*(segment for stage in before for segment in stage), *busy)

    return run


_ONE_PIECE, _PIECES = _hierarchical(1), _hierarchical(PIECES)
_SPREAD: dict[str, Algorithm] = {
    "ring": _ring,
    "halving-doubling": _halving,
    "hierarchical": _ONE_PIECE,
    "hierarchical-pipelined": _PIECES,
}
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": _SPREAD | {"tree": _tree},
    "all_gather": _SPREAD | {"turns": _ring_with_turns},
    "reduce_scatter": _SPREAD,
    "all_to_all": {"direct": _direct, "turns": _turns},
    "gather": {"direct": _direct},
    "scatter": {"direct": _direct},
    "broadcast": {"chain": _chain, "tree": _tree, "binomial": _binomial},
    "reduce": {"chain": _chain, "tree": _tree, "binomial": _binomial},
    "barrier": {"tree": _tree},
    "send": {"direct": _point},
}
"""Collective -> its algorithms; `send` is point to point, from the first member of a group to the second."""
