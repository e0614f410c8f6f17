"""Links of a cluster, routes over them, and how flows share them, as columns: every function takes all flows at once.

Each rank has a port to every tier (a network card for each accelerator). In a ring, a torus or a rail, a message to a
rank of another position first goes to the rank of its own domain at that position (NCCL calls this PXN on rails).

Long TCP and InfiniBand flows approach max-min fairness (Bertsekas and Gallager 1992, section 6.5.2): all rates grow
together until a link is full; its flows keep their rate, and the others grow on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.network.spec import ClusterSpec, Tier

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
NEAR = 1 + 1e-9
"""Shares that differ by less are equal."""


def share_flows(flow: Ids, link: Ids, num_flows: int, capacity_L: Array) -> Array:
    """(F,) max-min fair rates of flows over links: flow `flow[i]` uses link `link[i]`; infinite without links.

    In each round, every link that is full before any other link of its flows is filled, so that rounds are few.
    """
    rate = np.full(num_flows, np.inf)
    left = capacity_L.astype(np.float64).copy()
    while len(flow):
        count = np.bincount(link, minlength=len(left))
        share = np.divide(left, count, out=np.full(len(left), np.inf), where=count > 0)
        least = np.full(num_flows, np.inf)
        np.minimum.at(least, flow, share[link])
        least_of_link = np.full(len(left), np.inf)
        np.minimum.at(least_of_link, link, least[flow])
        full = (count > 0) & (share <= least_of_link * NEAR)
        done = np.unique(flow[full[link]])
        rate[done] = least[done]
        is_done = np.zeros(num_flows, dtype=bool)
        is_done[done] = True
        gone = is_done[flow]
        left -= np.bincount(link[gone], weights=rate[flow[gone]], minlength=len(left))
        left = np.maximum(left, 0.0)
        flow, link = flow[~gone], link[~gone]
    return rate


def drain(flow: Ids, link: Ids, bytes_F: Array, capacity_L: Array, after_F: Ids | None = None) -> Array:
    """(F,) seconds after which each flow is complete, with rates shared anew at each end.

    All begin together, but flow f once flow `after_F[f]` is complete, unless that is negative.
    """
    remaining = bytes_F.astype(np.float64).copy()
    finish = np.zeros(len(remaining))
    now = 0.0
    left = remaining > 0
    waits = np.zeros(len(remaining), dtype=bool) if after_F is None else after_F >= 0
    while left.any():
        active = left if after_F is None else left & ~(waits & left[after_F])
        if not active.any():
            raise ValueError("flows wait for each other")
        keep = active[flow]
        rate = share_flows(flow[keep], link[keep], len(remaining), capacity_L)
        wait = np.where(active, remaining / rate, np.inf)
        first = float(wait.min())
        now += first
        ended = active & (wait <= first * NEAR)
        remaining = np.where(active & ~ended, remaining - np.where(active, rate, 0.0) * first, remaining)
        finish[ended] = now
        left = left & ~ended
    return finish


def share_classes(flows_CL: Array, capacity_L: Array) -> Array:
    """(C,) max-min fair rates of a flow of each class; class c has `flows_CL[c, l]` flows on link l, of equal rate."""
    rate = np.full(len(flows_CL), np.inf)
    left = capacity_L.astype(np.float64).copy()
    active = flows_CL.max(axis=1, initial=0.0) > 0
    while active.any():
        count = flows_CL[active].sum(axis=0)
        share = np.divide(left, count, out=np.full(len(left), np.inf), where=count > 0)
        level = float(share.min())
        full = share <= level * NEAR
        ended = active & (flows_CL[:, full].max(axis=1) > 0)
        rate[ended] = level
        left = np.maximum(left - level * flows_CL[ended].sum(axis=0), 0.0)
        active &= ~ended
    return rate


@dataclass(frozen=True)
class Routes:
    """Routes of flows: flow `flow[i]` uses link `link[i]`."""

    flow: Ids
    link: Ids
    latency_s: Array
    """(F,) of a small message."""


@dataclass(frozen=True)
class TierLinks:
    """The links of one tier: where they begin in the network's list."""

    tier: Tier
    inner: int
    """Ranks of one unit."""
    first: int
    num_ranks: int

    @property
    def num_leaves(self) -> int:
        """Leaf switches; 1 if the tier has none."""
        tier = self.tier
        if tier.leaf is None:
            return 1
        if tier.kind == "rail":
            return self.inner * -(-self.num_ranks // (self.inner * tier.leaf))
        return -(-self.num_ranks // tier.leaf)

    def capacities(self) -> Array:
        """Return bytes per second of each link of the tier."""
        tier, ranks, rate = self.tier, self.num_ranks, self.tier.gbps / 8 * 1e9
        if tier.kind == "mesh":
            return np.full(ranks * tier.size, rate / max(tier.size - 1, 1))
        if tier.kind in ("ring", "torus"):
            axes = max(sum(size > 1 for size in tier.shape), 1)
            # an axis of two has one neighbour, which both links reach
            each = [np.full(2 * ranks, rate / axes / (1 if size == 2 else 2)) for size in tier.shape]
            return np.concatenate(each)
        ports = np.full(2 * ranks, rate)
        if tier.leaf is None:
            return ports
        return np.concatenate([ports, np.full(2 * self.num_leaves, tier.leaf * rate / tier.over)])

    def leaf_of(self, rank: Ids) -> Ids:
        """Return the leaf switch of each rank."""
        leaf = self.tier.leaf or self.num_ranks
        if self.tier.kind == "rail":
            return np.asarray(rank // self.inner // leaf * self.inner + rank % self.inner)
        return np.asarray(rank // leaf)

    def route(self, flow: Ids, source: Ids, target: Ids) -> tuple[list[Ids], list[Ids], Array]:
        """Return flows, links and seconds of latency between units of this tier."""
        kind, latency = self.tier.kind, self.tier.latency_us * 1e-6
        if kind == "mesh":
            position = target // self.inner % self.tier.size
            return [flow], [self.first + source * self.tier.size + position], np.full(len(flow), latency)
        if kind in ("ring", "torus"):
            return self._route_rings(flow, source, target)
        flows, links = [flow, flow], [self.first + source, self.first + self.num_ranks + target]
        seconds = np.full(len(flow), latency)
        if self.tier.leaf is not None:
            up, down = self.leaf_of(source), self.leaf_of(target)
            over_spine = up != down
            spine = self.first + 2 * self.num_ranks
            flows += [flow[over_spine], flow[over_spine]]
            links += [spine + up[over_spine], spine + self.num_leaves + down[over_spine]]
            seconds = seconds * np.where(over_spine, 2.0, 1.0)
        return flows, links, seconds

    def _route_rings(self, flow: Ids, source: Ids, target: Ids) -> tuple[list[Ids], list[Ids], Array]:
        """Route along one axis after the other, each in the shorter direction; ties take turns by position."""
        flows: list[Ids] = []
        links: list[Ids] = []
        hops = np.zeros(len(flow))
        at, stride, first = source.copy(), self.inner, self.first
        for size in self.tier.shape:
            here, there = at // stride % size, target // stride % size
            ahead = (there - here) % size
            forward = (2 * ahead < size) | ((2 * ahead == size) & ((here % 2 == 0) | (size == 2)))
            steps = np.where(forward, ahead, size - ahead) % size
            hops += steps
            direction = np.where(forward, 1, -1)
            for hop in range(int(steps.max(initial=0))):
                moving = steps > hop
                position = (here + direction * hop) % size
                rank = at + (position - here) * stride
                flows.append(flow[moving])
                links.append((first + np.where(forward, 0, self.num_ranks) + rank)[moving])
            at = at + (there - here) * stride
            stride *= size
            first += 2 * self.num_ranks
        return flows, links, hops * self.tier.latency_us * 1e-6


class TieredNetwork:
    """The links of a `ClusterSpec`, and routes over them."""

    capacity_L: Array
    """Bytes per second of each link, one direction."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.num_ranks = spec.num_ranks
        self.tiers: list[TierLinks] = []
        first, inner = 0, 1
        capacities: list[Array] = []
        for tier in spec.tiers:
            links = TierLinks(tier, inner, first, self.num_ranks)
            capacities.append(links.capacities())
            self.tiers.append(links)
            first += len(capacities[-1])
            inner *= tier.size
        self.capacity_L = np.concatenate(capacities)

    def route(self, source: Ids, target: Ids) -> Routes:
        """Return the routes: over the outermost tier in which the units differ, and inside a unit where needed."""
        source, target = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
        flows: list[Ids] = [np.zeros(0, dtype=np.int64)]
        links: list[Ids] = [np.zeros(0, dtype=np.int64)]
        latency = np.zeros(len(source))
        level = np.zeros(len(source), dtype=np.int64)  # number of tiers that a flow passes
        for number, tier in enumerate(self.tiers, 1):
            level = np.where(source // tier.inner != target // tier.inner, number, level)
        for number, tier in reversed(list(enumerate(self.tiers, 1))):
            chosen = np.flatnonzero(level == number)
            if not len(chosen):
                continue
            start, end = source[chosen], target[chosen]
            if tier.tier.kind in ("ring", "torus", "rail") and tier.inner > 1:
                middle = start // tier.inner * tier.inner + end % tier.inner
                inside = self.route(start, middle)
                flows.append(chosen[inside.flow])
                links.append(inside.link)
                latency[chosen] += inside.latency_s
                start = middle
            new_flows, new_links, seconds = tier.route(chosen, start, end)
            flows += new_flows
            links += new_links
            latency[chosen] += seconds
        return Routes(np.concatenate(flows), np.concatenate(links), latency)

    def axes_of(self, ranks: Ids) -> list[Ids]:
        """Return the position along each axis from the inside out: a torus has several, other tiers one."""
        axes = []
        stride = 1
        for tier in self.spec.tiers:
            for size in tier.shape:
                axes.append(ranks // stride % size)
                stride *= size
        return axes
