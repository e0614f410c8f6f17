"""Bandwidth and latency of each axis of a layout: from the two bandwidths of a machine, or from links.

Links are measured, or belong to a simulated cluster. Then an axis has the rate of its slowest group
(`network/groups.py`). Ranks are in the order of the knob `rank_order`. On measured links, the knobs `host_order` and
`device_order` put nodes, devices inside nodes, or all ranks in an order found by local improvement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from cclsearch.network.groups import GroupLink, measured_link, simulated_link
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.placement import (
    Order,
    chain_devices,
    chain_nodes,
    count_devices,
    identity_order,
    improve_order,
    spread_nodes,
)
from cclsearch.tasks.machine import Machine
from cclsearch.tasks.training.layout import Array, Layout
from cclsearch.tasks.training.memory import expert_group

Groups = NDArray[np.int64]
AXES = ("tp", "cp", "sharding", "replicated", "experts", "exchange", "pp")
"""Groups that communicate: tensor and context parallelism, gradients of a sharding group, between the replicas of HSDP,
gradients of experts, tokens to experts, pipeline stages."""


@dataclass(frozen=True, eq=False)
class AxisLink:
    """Bandwidth and latency of the slowest group of an axis; (N,) each."""

    bytes_s: Array
    latency_s: Array
    crosses: NDArray[np.bool_]
    """Whether a group leaves its scale-up domain."""


class Network:
    """The links of every configuration of a layout, axis by axis."""

    def __init__(self, layout: Layout, machine: Machine, weights: Mapping[str, Array] | None = None) -> None:
        """`weights` are the bytes of each axis per step, for rows with ordered nodes."""
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
        degrees = [layout.tp, layout.dp, layout.pp, layout.cp, layout.ep, layout.replicated]
        keys = np.stack([*degrees, layout.order, layout.hosts, layout.devices], axis=1).astype(np.int64)
        _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return first, which.reshape(-1)

    def each_mesh(self) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Yield a row of each combination of degrees and orders, and (N,) which rows have it."""
        first, which = self._meshes
        for number, row in enumerate(first.tolist()):
            yield row, which == number

    def place(self, row: int) -> Groups:
        """(R,) place of each rank of this row."""
        links, mesh, freedom = self._machine.links, Mesh.at(self._layout, row), Freedom.at(self._layout, row)
        if links is None or not freedom.any or self._weights is None:
            return np.arange(mesh.num_ranks)
        weights = {name: float(each[row]) for name, each in self._weights.items()}
        return place_ranks(links, mesh, weights, freedom, ring_per_port=self._machine.ring_per_port)

    def _links_at(self, row: int) -> dict[str, GroupLink]:
        """Return the links of each axis of this row."""
        machine, groups = self._machine, Mesh.at(self._layout, row).axis_groups().items()
        if machine.links is None:
            assert machine.cluster is not None
            return {name: simulated_link(machine.cluster, kind, each) for name, (kind, each) in groups}
        links, place_R, per_port = machine.links, self.place(row), machine.ring_per_port
        return {
            name: measured_link(links, kind, place_R[each], ring_per_port=per_port) for name, (kind, each) in groups
        }


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

    def axis_groups(self) -> dict[str, tuple[str, Groups]]:
        """Return axis -> how its groups communicate (`ring`, `exchange` or `chain`), and (G, M) ranks of each."""
        exchange, experts = self.expert_groups()
        return {
            "tp": ("ring", self.groups("tp")),
            "cp": ("ring", self.groups("cp")),
            "sharding": ("ring", self.groups("cp", "dp_shard")),
            "replicated": ("ring", self.groups("dp_replicate")),
            "experts": ("ring", experts),
            "exchange": ("exchange", exchange),
            "pp": ("chain", self.groups("pp")),
        }

    def each_position(self, per_node: int) -> Iterator[Groups]:
        """Yield (R,) the position of each rank in every order of the axes, the mesh's own first."""
        # Schedulers number the ranks of a node upwards, so the ranks of a node get its places in that order.
        shape = [size for _, size in self.sizes[::-1] if size > 1]
        ranks = np.arange(self.num_ranks).reshape(shape)
        for axes in permutations(range(len(shape))):
            position = np.empty(self.num_ranks, dtype=np.int64)
            position[ranks.transpose(axes).ravel()] = np.arange(self.num_ranks)
            node = position // max(per_node, 1)
            position[np.argsort(node, kind="stable")] = np.arange(self.num_ranks)
            yield position


@dataclass(frozen=True)
class Freedom:
    """Parts of a placement that may change."""

    nodes: bool = False
    """The order of the nodes."""
    devices: bool = False
    """The order of the devices inside nodes, the same in each."""
    ranks: bool = False
    """Whether every rank, and so the order of the degrees, may move; also against the framework's own order."""

    @classmethod
    def at(cls, layout: Layout, row: int) -> Freedom:
        """Return the freedom that the knobs of a row give."""
        hosts = int(layout.hosts[row])
        return cls(nodes=hosts > 0, ranks=hosts > 1, devices=bool(layout.devices[row]))

    @property
    def any(self) -> bool:
        """Whether anything may change."""
        return self.nodes or self.devices or self.ranks


MAX_ORDERS_IMPROVED = 4
"""Largest number of orders of the degrees, the most promising ones, for which nodes are ordered."""
# It counts that a change repairs one of several equally slow links.
TIE = 0.01
"""Weight of the mean link beside the slowest one while orders are improved."""
Cost = Callable[[Sequence[int], Sequence[int]], float]


def place_ranks(
    links: LinkMatrix, mesh: Mesh, weights: Mapping[str, float], freedom: Freedom, *, ring_per_port: bool
) -> Groups:
    """Return (R,) the place of each rank with the least communication time found, at most the time of ranks in order.

    `weights` are the bytes of each axis per step. Only nodes that the ranks fill are put in order.
    """
    used = [
        (weights[name], kind, groups)
        for name, (kind, groups) in mesh.axis_groups().items()
        if weights.get(name) and groups.shape[1] > 1
    ]

    def arrange(position: Groups, tie: float) -> Cost:
        def cost(nodes: Sequence[int], devices: Sequence[int]) -> float:
            place_R = spread_nodes(links, nodes, devices or None)[position]
            total = 0.0
            for size, kind, groups in used:
                link = measured_link(links, kind, place_R[groups], ring_per_port=ring_per_port)
                total += size * (1 / link.bytes_s + tie * link.mean_s_per_byte)
            return total

        return cost

    given = identity_order(links), tuple(range(count_devices(links)))
    positions = list(mesh.each_position(len(given[1]))) if freedom.ranks else [np.arange(mesh.num_ranks)]
    costs = [arrange(position, TIE) for position in positions]
    chains = [given[0], *(chain_nodes(links) if freedom.nodes else ())]
    promise = [min(cost(chain, given[1]) for chain in chains) for cost in costs]
    promising = sorted(range(len(costs)), key=promise.__getitem__)[:MAX_ORDERS_IMPROVED]
    found = [(index, *_improve(links, costs[index], given, freedom)) for index in sorted(promising)]
    costs = [arrange(position, 0.0) for position in positions]
    index, nodes, devices = min(found, key=lambda each: costs[each[0]](each[1], each[2]))
    if costs[0](*given) <= costs[index](nodes, devices):
        index, (nodes, devices) = 0, given
    return np.asarray(spread_nodes(links, nodes, devices or None)[positions[index]])


def _improve(links: LinkMatrix, cost: Cost, given: tuple[Order, Order], freedom: Freedom) -> tuple[Order, Order]:
    """Return the order of nodes and of devices, each improved with the other fixed, until neither helps."""

    def improve_nodes(nodes: Order, devices: Order) -> Order:
        return improve_order(nodes, lambda order: cost(order, devices), chain_nodes(links))

    def improve_devices(nodes: Order, devices: Order) -> Order:
        return improve_order(devices, lambda order: cost(nodes, order), chain_devices(links))

    nodes, devices = given
    differ = links.places < len(devices)  # otherwise the matrix says nothing of single devices
    while True:
        before = nodes, devices
        if freedom.nodes:
            nodes = improve_nodes(nodes, devices)
        if freedom.devices and differ:
            devices = improve_devices(nodes, devices)
        if (nodes, devices) == before or not (freedom.nodes and freedom.devices):
            return nodes, devices
