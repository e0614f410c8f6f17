"""Bandwidth and latency that each axis of a layout gets: from the two bandwidths of a machine, or from links.

The links are measured, or those of a simulated cluster (`simulator/axis.py`).

With a matrix of links an axis gets what its slowest group gets (`links/groups.py`), with the ranks in the order of the
knob `rank_order` and, if the knob `host_order` asks for it, with the nodes in an order found by local improvement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.errors import UserError
from cclsearch.links.groups import ALONE, GroupLink, slowest_chain, slowest_exchange, slowest_ring
from cclsearch.links.matrix import LinkMatrix
from cclsearch.links.placement import chain_nodes, identity_order, improve_order, spread_nodes
from cclsearch.simulator.axis import collectives_on, group_link
from cclsearch.simulator.spec import ClusterSpec
from cclsearch.tasks.machine import Machine
from cclsearch.tasks.training.layout import Array, Layout
from cclsearch.tasks.training.memory import expert_group

Groups = NDArray[np.int64]
AXES = ("tp", "cp", "sharding", "replicated", "experts", "exchange", "pp")
"""What communicates: tensor and context parallelism, gradients of a sharding group, between the replicas of HSDP,
gradients of experts, tokens to experts, pipeline stages."""


@dataclass(frozen=True, eq=False)
class AxisLink:
    """What the slowest group of an axis gets; (N,) each."""

    bytes_s: Array
    latency_s: Array
    crosses: NDArray[np.bool_]
    """Whether a group leaves its scale-up domain."""


class Network:
    """The links of every configuration of a layout, axis by axis."""

    def __init__(self, layout: Layout, machine: Machine, weights: Mapping[str, Array] | None = None) -> None:
        """`weights` are the bytes of each axis per step, for rows whose nodes are put in order."""
        self._layout, self._machine, self._weights = layout, machine, weights

    def axis(self, name: str) -> AxisLink:
        """Return the links of one of `AXES`."""
        if self._machine.has_network:
            return self._of_links[name]
        return self._nominal(name)

    def _nominal(self, name: str) -> AxisLink:
        machine, layout = self._machine, self._layout
        if name == "pp":  # pipeline stages are outermost in [M] and its descendants
            crosses = (layout.ranks > machine.node) & (layout.pp > 1)
            rate = np.where(crosses, machine.out_bytes_s, machine.up_bytes_s)
            return AxisLink(rate, np.where(crosses, machine.out_latency_s, machine.up_latency_s), crosses)
        if name == "exchange":
            crosses = layout.ep > machine.node
            return AxisLink(
                np.full(len(layout), machine.up_bytes_s),
                np.where(crosses, machine.out_latency_s, machine.up_latency_s),
                crosses,
            )
        apart, group = self._spans(name)
        crosses = apart * group > machine.node
        members = np.clip(machine.node / apart, 1.0, None)  # of one group inside one node, each with its own link
        out = np.minimum(machine.out_bytes_s * members, machine.up_bytes_s)
        latency = np.where(crosses, machine.out_latency_s, machine.up_latency_s)
        if name != "cp":  # most hops of a reduction stay inside a node; blocks of keys and values wait for the slowest
            latency = machine.up_latency_s + (latency - machine.up_latency_s) / members
        return AxisLink(np.where(crosses, out, machine.up_bytes_s), latency, crosses)

    def _spans(self, name: str) -> tuple[Array, Array]:
        """Return how many ranks apart the members of a group are, and how many they are."""
        layout = self._layout
        if name == "experts":
            return expert_group(layout)
        return {
            "tp": (np.ones(len(layout)), layout.tp),
            "cp": (layout.tp, layout.cp),
            "sharding": (layout.tp, layout.sharding),
            "replicated": (layout.tp * layout.sharding, layout.replicated),
        }[name]

    @cached_property
    def _of_links(self) -> dict[str, AxisLink]:
        """The links of every axis: computed once for all rows with the same degrees and order."""
        first, which = self._meshes
        found: dict[str, list[GroupLink]] = {name: [] for name in AXES}
        for row in first:
            for name, link in self._links_at(int(row)).items():
                found[name].append(link)
        return {
            name: AxisLink(
                np.array([link.bytes_s for link in each])[which],
                np.array([link.latency_s for link in each])[which],
                np.array([link.crosses for link in each], dtype=bool)[which],
            )
            for name, each in found.items()
        }

    @cached_property
    def _meshes(self) -> tuple[Groups, Groups]:
        """A row of each combination of degrees and orders, and (N,) which combination each row has."""
        layout = self._layout
        degrees = [layout.tp, layout.dp, layout.pp, layout.cp, layout.ep, layout.replicated, layout.order, layout.hosts]
        keys = np.stack(degrees, axis=1).astype(np.int64)
        _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return first, which.reshape(-1)

    def each_mesh(self) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Yield a row of each combination of degrees and orders, and (N,) which rows have it."""
        first, which = self._meshes
        for number, row in enumerate(first.tolist()):
            yield row, which == number

    def place(self, row: int) -> Groups:
        """(R,) place of each rank of this row."""
        links, mesh = self._machine.links, Mesh.at(self._layout, row)
        return np.arange(mesh.num_ranks) if links is None else self._place(links, mesh, row)

    def _links_at(self, row: int) -> dict[str, GroupLink]:
        """Return the links of each axis of this row."""
        links, mesh = self._machine.links, Mesh.at(self._layout, row)
        if links is not None:
            return links_of(links, mesh, self._place(links, mesh, row), ring_per_port=self._machine.ring_per_port)
        assert self._machine.cluster is not None
        return links_on(self._machine.cluster, mesh)

    def _place(self, links: LinkMatrix, mesh: Mesh, row: int) -> Groups:
        """(R,) place of each rank of this row."""
        if not self._layout.hosts[row] or self._weights is None:
            return np.arange(mesh.num_ranks)
        weights = {name: float(each[row]) for name, each in self._weights.items()}
        return place_ranks(links, mesh, weights, ring_per_port=self._machine.ring_per_port)


@dataclass(frozen=True)
class Mesh:
    """The axes of one configuration, innermost first."""

    sizes: tuple[tuple[str, int], ...]
    """(axis, size): tp, cp, dp_shard, dp_replicate and pp in the order of the ranks."""
    ep: int = 1

    @classmethod
    def at(cls, layout: Layout, row: int) -> Mesh:
        """Return the mesh of a row of a layout; data parallelism has its shards inside its replicas."""
        replicas = int(layout.replicated[row])
        size = {
            "tp": (("tp", int(layout.tp[row])),),
            "cp": (("cp", int(layout.cp[row])),),
            "dp": (("dp_shard", max(int(layout.dp[row]) // replicas, 1)), ("dp_replicate", replicas)),
            "pp": (("pp", int(layout.pp[row])),),
        }
        order = layout.orders[int(layout.order[row])]
        return cls(tuple(axis for name in order for axis in size[name]), int(layout.ep[row]))

    @property
    def num_ranks(self) -> int:
        """Product of the sizes."""
        return math.prod(size for _, size in self.sizes)

    def groups(self, *axes: str) -> Groups:
        """(G, M) ranks of each group along these axes, in the order of the ranks."""
        outer_first = self.sizes[::-1]
        ranks = np.arange(self.num_ranks).reshape([size for _, size in outer_first])
        chosen = [k for k, (name, _) in enumerate(outer_first) if name in axes]
        moved = np.moveaxis(ranks, chosen, range(ranks.ndim - len(chosen), ranks.ndim))
        return np.asarray(moved.reshape(-1, math.prod(outer_first[k][1] for k in chosen)))

    def expert_groups(self) -> tuple[Groups, Groups]:
        """Groups that exchange tokens, and groups of ranks with the same experts, in each pipeline stage."""
        stages = self.groups("tp", "cp", "dp_shard", "dp_replicate")
        if self.ep <= 1 or stages.shape[1] % self.ep:
            return stages[:, :1], self.groups("cp", "dp_shard")
        split = stages.reshape(len(stages), -1, self.ep)
        return split.reshape(-1, self.ep), np.moveaxis(split, 1, 2).reshape(-1, split.shape[1])


def links_of(links: LinkMatrix, mesh: Mesh, place_R: Groups, *, ring_per_port: bool) -> dict[str, GroupLink]:
    """Return the links of each axis for ranks at these places."""

    def ring(*axes: str) -> GroupLink:
        return slowest_ring(links, place_R[mesh.groups(*axes)], ring_per_port=ring_per_port)

    if mesh.num_ranks > links.num_places:
        raise ValueError(f"{mesh.num_ranks} ranks, but the links have {links.num_places} places")
    exchange, experts = mesh.expert_groups()
    alone = mesh.ep <= 1
    return {
        "tp": ring("tp"),
        "cp": ring("cp"),
        "sharding": ring("cp", "dp_shard"),
        "replicated": ring("dp_replicate"),
        "experts": slowest_ring(links, place_R[experts], ring_per_port=ring_per_port),
        "exchange": ALONE if alone else slowest_exchange(links, place_R[exchange]),
        "pp": slowest_chain(links, place_R[mesh.groups("pp")]),
    }


def links_on(cluster: ClusterSpec, mesh: Mesh) -> dict[str, GroupLink]:
    """Return the links of each axis on a simulated cluster, whose first ranks are those of the mesh."""
    if mesh.num_ranks > cluster.num_ranks:
        raise UserError(f"{mesh.num_ranks} ranks, but the cluster {cluster.describe()} has {cluster.num_ranks}")
    on, domain = collectives_on(cluster), cluster.domain

    def link(kind: str, groups: Groups) -> GroupLink:
        return group_link(on, kind, groups, domain)

    exchange, experts = mesh.expert_groups()
    return {
        "tp": link("ring", mesh.groups("tp")),
        "cp": link("ring", mesh.groups("cp")),
        "sharding": link("ring", mesh.groups("cp", "dp_shard")),
        "replicated": link("ring", mesh.groups("dp_replicate")),
        "experts": link("ring", experts),
        "exchange": ALONE if mesh.ep <= 1 else link("exchange", exchange),
        "pp": link("chain", mesh.groups("pp")),
    }


def place_ranks(links: LinkMatrix, mesh: Mesh, weights: Mapping[str, float], *, ring_per_port: bool) -> Groups:
    """Return (R,) the place of each rank, with the nodes in the order of the least communication time found.

    `weights` are the bytes of each axis per step. Only nodes that the ranks fill are put in order.
    """

    def cost(order: Sequence[int]) -> float:
        place_R = spread_nodes(links, order)[: mesh.num_ranks]
        found = links_of(links, mesh, place_R, ring_per_port=ring_per_port)
        return sum(size / found[name].bytes_s for name, size in weights.items() if size)

    return spread_nodes(links, improve_order(identity_order(links), cost, chain_nodes(links)))[: mesh.num_ranks]
