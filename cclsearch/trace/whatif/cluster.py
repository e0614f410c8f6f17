"""A trace's step on a simulated cluster: its events as tasks, its collectives over the cluster's shared links.

Events depend on each other as in `graph.py`. A collective takes its measured time times the ratio of simulated times on
the new and on the recorded cluster, and longer while others use its links. So an unchanged cluster changes nothing, and
effects that no model has (protocols, stragglers, the host) stay as measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cclsearch.card.hardware import Accelerator, match_accelerator
from cclsearch.core.errors import UserError
from cclsearch.network.collectives import ALGORITHMS, Collectives, Compression
from cclsearch.network.engine import Work
from cclsearch.network.spec import ClusterSpec
from cclsearch.network.sweep import Speeds
from cclsearch.network.topology import Array, Ids, TieredNetwork
from cclsearch.trace.collectives import count_unsized
from cclsearch.trace.events import POINT_TO_POINT, Collective, Kind, Reason
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.names.kernels import PRODUCTS
from cclsearch.trace.view import TraceView
from cclsearch.trace.whatif.graph import Event, RankGraph, StepTimer
from cclsearch.trace.whatif.projection import Replay

MAX_EVENTS = 300_000
"""Number of events of all ranks above which the slowest rank represents all."""


@dataclass(eq=False)
class ClusterReplay:
    """Times a replay on other clusters; `base` is the cluster on which it was recorded."""

    replay: Replay
    base: ClusterSpec
    base_on: Collectives = field(init=False)
    base_s: float = field(init=False)
    """Seconds that the simulation gives for the recorded step on the recorded cluster."""

    def __post_init__(self) -> None:
        self.base_on = Collectives(TieredNetwork(self.base))
        self.graphs = self._choose_graphs()
        self.base_s = self._seconds(self.base_on, Speeds())
        if self.base_s <= 0:
            raise NotAvailable(Reason.NO_GPU_EVENTS, "the step has no event that takes time")

    @property
    def measured_s(self) -> float:
        """Seconds of the recorded step."""
        return self.replay.step_time_s

    def step_s(
        self,
        cluster: ClusterSpec,
        speeds: Speeds | None = None,
        *,
        algorithm: str = "auto",
        compression: Compression | None = None,
    ) -> float:
        """Return seconds of the step on another cluster; UserError if its size does not suit the trace's groups."""
        on = Collectives(TieredNetwork(cluster), compression=compression)
        return self.replay.step_time_s * self._seconds(on, speeds or Speeds(), algorithm) / self.base_s

    @property
    def notes(self) -> tuple[str, ...]:
        """Limits of the answers, one sentence each."""
        notes = []
        off = self.base_s / self.replay.window_s - 1
        if abs(off) > 0.05:
            notes.append(
                f"the simulated step on the recorded cluster takes {100 * (1 + off):.0f} % of the measured time; times"
                " are scaled by that, and changes may be wrong by as much"
            )
        unsized, total = count_unsized((self.replay.trace.ranks[graph.rank].table, graph.rows) for graph in self.graphs)
        if unsized:
            notes.append(
                f"{unsized} of {total} collectives have no recorded size: it is inferred from their measured time"
                " and the recorded cluster's links"
            )
        if len(self.graphs) == 1 and self.base.num_ranks > 1:
            notes.append(f"rank {self.graphs[0].rank} represents all {self.base.num_ranks} ranks")
        return (*self.replay.notes, *notes)

    def _choose_graphs(self) -> tuple[RankGraph, ...]:
        """Return all ranks if the trace has them all on one clock, and they are not too many; else the slowest."""
        graphs = self.replay.graphs
        complete = len(graphs) == self.base.num_ranks and self.replay.trace.matching.offset_ns is not None
        if complete and sum(len(graph.rows) for graph in graphs) <= MAX_EVENTS:
            return graphs
        return tuple(graph for graph in graphs if graph.rank == self.replay.slowest) or graphs[:1]

    def _groups_of(self, graph: RankGraph, call: Collective, ranks: int) -> Ids | None:
        """Return the groups of all ranks that make this call at the same time; None if it cannot be simulated.

        A group that spans the recorded cluster, alone or with the groups inside of it, spans the new one; others keep
        their size.
        """
        if _kind_of(call) not in ALGORITHMS:
            return None
        recorded = self.base.num_ranks
        if call.kind in POINT_TO_POINT:
            apart = abs((call.peer if call.peer is not None else graph.rank + 1) - graph.rank) or 1
            starts = [rank for rank in range(ranks - apart) if rank // apart % 2 == 0]
            return np.array([[rank, rank + apart] for rank in starts], dtype=np.int64) if starts else None
        size = call.group_size or (len(call.group_ranks) if call.group_ranks else recorded)
        apart = 1
        if call.group_ranks and len(call.group_ranks) > 1:
            steps = np.diff(sorted(call.group_ranks))
            if (steps != steps[0]).any():
                inside = max(call.group_ranks) < ranks
                return np.array([sorted(call.group_ranks)], dtype=np.int64) if inside else None
            apart = int(steps[0])
        if size * apart >= recorded and ranks != recorded:
            size = ranks // apart
        if size < 2:
            return None
        if ranks % (size * apart):
            raise UserError(
                f"a cluster of {ranks} ranks does not divide into groups of {size} ranks that are {apart} apart, which"
                f" the trace has: choose a multiple of {size * apart}"
            )
        return np.moveaxis(np.arange(ranks).reshape(-1, size, apart), 1, 2).reshape(-1, size)

    def _size_of(self, call: Collective, groups_GM: Ids, moving_s: float) -> float:
        """Return the recorded size, else the one that takes as long on the recorded cluster, with two digits."""
        if call.message_bytes:
            return float(call.message_bytes)
        small, large = (self.base_on.schedule(_kind_of(call), groups_GM, size).seconds for size in (0.0, 1e9))
        size = max(moving_s - small, 0.0) / max(large - small, 1e-12) * 1e9
        return float(f"{size:.1e}")

    @cached_property
    def _timer(self) -> StepTimer:
        return StepTimer(self.graphs, self.replay.trace.matching, apart=False)

    def _seconds(self, on: Collectives, speeds: Speeds, algorithm: str = "auto") -> float:
        seconds = [self._durations(graph, speeds) for graph in self.graphs]
        moves = [self._move(data.ending, on, algorithm) for data in self._timer.moving]
        return self._timer.time(seconds, moves, on.network.capacity_L)

    def _move(self, members: Sequence[Event], on: Collectives, algorithm: str) -> Work:
        """Return the work that moves the data of a collective: on links if simulated, else the measured time."""
        g, i = members[0]
        graph = self.graphs[g]
        table = self.replay.trace.ranks[graph.rank].table
        call = table.collectives[int(table.coll_id[graph.rows[i]])]
        moving, waiting = max(int(self.graphs[g].transfer_ns[i]) for g, i in members) / 1e9, 0.0
        if len(members) == 1:  # one rank keeps its measured waiting; of several, the simulation says who is late
            waiting = max(int(graph.end_ns[i] - graph.start_ns[i]) / 1e9 - moving, 0.0)
        old = self._groups_of(graph, call, self.base.num_ranks)
        if old is None or moving <= 0:
            return Work(waiting + moving)
        kind, size = _kind_of(call), self._size_of(call, old, moving)
        new = self._groups_of(graph, call, on.network.num_ranks)
        assert new is not None
        schedule = on.schedule(kind, new, size, algorithm if algorithm in ALGORITHMS[kind] else "auto")
        before = self.base_on.schedule(kind, old, size).seconds
        return Work(waiting, schedule, stretch=moving / before if before > 0 else 1.0)

    def _durations(self, graph: RankGraph, speeds: Speeds) -> Array:
        """Return seconds of each event, collectives as measured."""
        table = self.replay.trace.ranks[graph.rank].table
        factor = np.ones(len(graph.rows))
        classes = table.name_class[table.name_id[graph.rows]]
        is_compute = graph.kind == Kind.COMPUTE
        factor[is_compute] = np.where(np.isin(classes[is_compute], PRODUCTS), speeds.flops, speeds.memory)
        factor[np.isin(graph.kind, (Kind.MEMCPY, Kind.MEMSET))] = speeds.copies
        return np.asarray((graph.end_ns - graph.start_ns) / 1e9 / factor)


def _kind_of(call: Collective) -> str:
    return "send" if call.kind in POINT_TO_POINT else str(call.kind)


def cluster_of(chip: Accelerator, ranks: int, domain: int) -> ClusterSpec:
    """Return the usual cluster of an accelerator: a slice of a TPU is a torus; else domains, and a switch between."""
    up, out = chip.scale_up_gbps, chip.scale_out_gbps
    up_us, out_us = chip.scale_up_latency_us, chip.scale_out_latency_us
    if chip.kind == "tpu":
        shape = next((shape for shape in chip.slices if math.prod(shape) == ranks), None) or _near_square(ranks)
        return ClusterSpec.model_validate(
            {"tiers": [{"kind": "torus", "shape": shape, "gbps": up, "latency_us": up_us}]}
        )
    domain = min(domain, ranks)
    if ranks % domain:
        raise UserError(f"{ranks} ranks do not fill scale-up domains of {domain}: choose a multiple")
    tiers = [{"kind": "switch", "shape": (domain,), "gbps": up, "latency_us": up_us}]
    if ranks > domain:
        tiers.append({"kind": "switch", "shape": (ranks // domain,), "gbps": out, "latency_us": out_us})
    return ClusterSpec.model_validate({"tiers": tiers})


def _near_square(ranks: int) -> tuple[int, int]:
    side = max(size for size in range(1, math.isqrt(ranks) + 1) if ranks % size == 0)
    return side, ranks // side


def grow(cluster: ClusterSpec, ranks: int) -> ClusterSpec:
    """Return the cluster with this many ranks: more units of its outermost tier; UserError if they do not divide."""
    *inner, outer = cluster.tiers
    unit = cluster.num_ranks // outer.size
    if len(cluster.tiers) == 1 or outer.kind == "torus" or ranks % unit:
        raise UserError(
            f"--ranks {ranks}: the cluster {cluster.describe()} cannot grow to it: describe the larger one with"
            " --cluster"
        )
    return ClusterSpec(tiers=(*inner, outer.model_copy(update={"shape": (ranks // unit,)})))


def find_chip(trace: TraceView) -> Accelerator | None:
    """Return the accelerator that the trace or the card names; None if neither does, or if it is unknown."""
    for view in trace.ranks.values():
        for device in view.table.devices:
            if device.name and (found := match_accelerator(device.name, (device.memory_bytes or 0) / 2**30 or None)):
                return found
    return trace.card.hardware.chip if trace.card is not None and not trace.card.hardware.nominal else None


def compare_chips(old: Accelerator | None, new: Accelerator) -> Speeds:
    """Return how much faster the new one computes, by data sheets, in 16 bits; 1 if the old one is unknown."""
    if old is None:
        return Speeds()
    memory = new.memory_gb_per_s / old.memory_gb_per_s
    return Speeds(flops=new.rate_for("bf16")[1] / old.rate_for("bf16")[1], memory=memory, copies=1.0)
