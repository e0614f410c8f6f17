"""Bandwidth and latency of groups of ranks that communicate at once, on measured or simulated links.

On measured links the slowest group decides, and in it the slowest link.

All groups of an axis work at the same time, and share the network ports of their nodes. A ring passes every link
between neighbours (Thakur et al. 2005). NCCL builds a ring for each network port of a node, so that a group with
several members in a node uses the ports of all of them; gloo has one ring. NCCL also orders the members inside a node
by its search over their links (src/graph/search.cc), and keeps the order of the nodes; gloo's ring is in the order of
the ranks. If devices have several links, NCCL has a ring on each: its rings together are faster than the one ring that
counts here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.errors import UserError
from cclsearch.network.collectives import Collectives
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.spec import ClusterSpec
from cclsearch.network.topology import Ids, TieredNetwork


@dataclass(frozen=True)
class GroupLink:
    """Bandwidth and latency of each member, in the slowest of all groups of an axis."""

    bytes_s: float
    """Infinite for groups of one member."""
    latency_s: float
    """Latency of one message over the slowest link."""
    crosses: bool
    """Whether any group leaves its node."""
    mean_s_per_byte: float = 0.0
    """Mean over all links of all groups: compares placements whose slowest links are equally slow."""


ALONE = GroupLink(float("inf"), 0.0, False)
"""Groups of one member."""


def slowest_ring(links: LinkMatrix, groups_GM: Ids, *, ring_per_port: bool) -> GroupLink:
    """Return the rate and latency of rings over these groups; each row has the places of a group in ring order."""
    if groups_GM.shape[1] < 2:
        return ALONE
    if ring_per_port and links.is_uneven_inside:
        groups_GM = np.array([_order_inside(links, tuple(row)) for row in groups_GM.tolist()])
    return _slowest(links, groups_GM, np.roll(groups_GM, -1, axis=1), ring_per_port=ring_per_port)


MAX_ORDERED = 8
"""Number of members inside a node up to which the ring with the fastest slowest link is found exactly."""


def _order_inside(links: LinkMatrix, group: tuple[int, ...]) -> list[int]:
    """Return a group with its members inside each node in the order of the fastest ring, or path through the node."""
    parts = [list(part) for _, part in itertools.groupby(group, key=lambda place: int(links.node_P[place]))]
    is_ring = len(parts) == 1
    return [place for part in parts for place in _fastest_path(links, tuple(part), is_ring=is_ring)]


def _fastest_path(links: LinkMatrix, members: tuple[int, ...], *, is_ring: bool) -> tuple[int, ...]:
    """Return the members in an order whose slowest link is fastest; the given order if none is better."""
    if not 2 < len(members) <= MAX_ORDERED:
        return members
    key = (is_ring, *members)
    if key not in links.known_rings:
        at = links.endpoint_P[list(members)]
        rate = np.minimum(links.bytes_s_EE[np.ix_(at, at)], links.bytes_s_EE[np.ix_(at, at)].T)
        given = [float(rate[k, k + 1]) for k in range(len(members) - 1)] + [float(rate[-1, 0])] * is_ring
        found = tuple(range(len(members)))
        for least in sorted({float(each) for each in rate[~np.eye(len(rate), dtype=bool)]}, reverse=True):
            if least <= min(given):
                break
            starts = ((0,),) if is_ring else tuple((k,) for k in range(len(members)))
            order = next((o for start in starts if (o := _walk(rate >= least, start, is_ring=is_ring))), None)
            if order is not None:
                found = order
                break
        links.known_rings[key] = tuple(members[k] for k in found)
    return links.known_rings[key]


def _walk(joined: NDArray[np.bool_], order: tuple[int, ...], *, is_ring: bool) -> tuple[int, ...] | None:
    """Return the order continued through all that are joined, each once (and back to its start, as a ring)."""
    if len(order) == len(joined):
        return order if not is_ring or joined[order[-1], order[0]] else None
    for following in np.flatnonzero(joined[order[-1]]).tolist():
        if following not in order and (found := _walk(joined, (*order, following), is_ring=is_ring)):
            return found
    return None


def slowest_chain(links: LinkMatrix, groups_GM: Ids) -> GroupLink:
    """Return the rate and latency of members that pass messages on to the next one, such as pipeline stages."""
    if groups_GM.shape[1] < 2:
        return ALONE
    return _slowest(links, groups_GM[:, :-1], groups_GM[:, 1:], ring_per_port=False)


def slowest_exchange(links: LinkMatrix, groups_GM: Ids) -> GroupLink:
    """Return the rate and latency of an all-to-all: each member sends an equal share to every other, one after the
    other.

    `bytes_s` counts the bytes that leave the member.
    """
    members = groups_GM.shape[1]
    if members < 2:
        return ALONE
    source = np.repeat(groups_GM, members - 1, axis=1)
    others = [np.delete(groups_GM, k, axis=1) for k in range(members)]
    target = np.concatenate(others, axis=1)
    rate, latency, apart = _pairs(links, source, target)
    # the ranks of a port send to other nodes in turn
    port, node = links.port_P, links.node_P
    sharers = np.bincount(port[np.unique(groups_GM)], minlength=int(port.max()) + 1)
    fastest = rate if links.port_bytes_s is None else links.port_bytes_s
    seconds = np.where(apart, np.maximum(1 / rate, sharers[port[source]] / fastest), 1 / rate)
    per_member = seconds.reshape(len(groups_GM), members, members - 1).sum(axis=2) / (members - 1)
    crosses = bool(np.any(node[source] != node[target]))
    return GroupLink(float(1 / per_member.max()), float(latency.max()), crosses, float(per_member.mean()))


def _pairs(
    links: LinkMatrix, source: Ids, target: Ids
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return bytes per second in the slower direction, seconds of latency, and whether the nodes differ."""
    a, b = links.endpoint_P[source], links.endpoint_P[target]
    rate = np.minimum(links.bytes_s_EE[a, b], links.bytes_s_EE[b, a])
    latency = np.maximum(links.latency_s_EE[a, b], links.latency_s_EE[b, a])
    return rate, latency, links.node_P[source] != links.node_P[target]


def _slowest(links: LinkMatrix, source: Ids, target: Ids, *, ring_per_port: bool) -> GroupLink:
    """Return the slowest edge; edges between nodes share the ports at both ends."""
    rate, latency, apart = _pairs(links, source, target)
    if apart.any():
        groups = np.broadcast_to(np.arange(len(source))[:, None], source.shape)
        ends = np.stack([source, target])
        rates, share = _port_share(links, groups, ends, apart, ring_per_port=ring_per_port)
        port = links.port_bytes_s
        shared = rate * share if port is None else np.minimum(rate * rates, port * share)
        rate = np.where(apart, shared, rate)
    return GroupLink(float(rate.min()), float(latency.max()), bool(apart.any()), float((1 / rate).mean()))


def _port_share(
    links: LinkMatrix, groups: Ids, ends: Ids, apart: NDArray[np.bool_], *, ring_per_port: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rings of each edge, one for each of its group's members in the node, and the ports that it has.

    A port is shared by the groups whose members use it.
    """
    port, node = links.port_P, links.node_P
    ports = int(port.max()) + 1
    if not ring_per_port:
        out = np.bincount(port[ends[0][apart]], minlength=ports)
        into = np.bincount(port[ends[1][apart]], minlength=ports)
        each = 1.0 / np.maximum(np.stack([out[port[ends[0]]], into[port[ends[1]]]]), 1)
        return np.ones(apart.shape), np.asarray(np.where(apart, each.min(axis=0), 1.0))
    rows = np.isin(groups, np.unique(groups[apart]))
    users = np.unique(np.stack([np.tile(groups[rows], 2), ends[:, rows].ravel()]), axis=1)
    pairs = np.unique(np.stack([users[0], port[users[1]]]), axis=1)  # (group, port) that is used
    flows = np.bincount(pairs[1], minlength=ports)
    port_node = np.zeros(ports, dtype=np.int64)
    port_node[port] = node
    shape = int(groups.max()) + 1, int(node.max()) + 1
    share, members = np.zeros(shape), np.zeros(shape)
    np.add.at(share, (pairs[0], port_node[pairs[1]]), 1.0 / flows[pairs[1]])
    np.add.at(members, (users[0], node[users[1]]), 1.0)
    at = np.stack([groups, groups]), node[ends]
    return members[at].min(axis=0), np.asarray(np.where(apart, share[at].min(axis=0), 1.0))


LARGE = 1e10
"""Bytes of a message whose time is all bandwidth."""


def measured_link(links: LinkMatrix, kind: str, places_GM: Ids, *, ring_per_port: bool) -> GroupLink:
    """Return the rate and latency of groups at these places on measured links; `kind` as in `simulated_link`."""
    if kind == "ring":
        return slowest_ring(links, places_GM, ring_per_port=ring_per_port)
    return slowest_exchange(links, places_GM) if kind == "exchange" else slowest_chain(links, places_GM)


@cache
def _collectives_on(cluster: ClusterSpec) -> Collectives:
    return Collectives(TieredNetwork(cluster))


def simulated_link(cluster: ClusterSpec, kind: str, groups_GM: Ids) -> GroupLink:
    """Return bandwidth and latency that each member gets on a simulated cluster; UserError if it has too few ranks.

    `kind`: `ring` (all-gather with its fastest algorithm, as bytes that pass each rank in a ring), `exchange`
    (all-to-all, as bytes that leave a rank) or `chain` (messages to the next member).
    """
    size = groups_GM.shape[1]
    if groups_GM.max() >= cluster.num_ranks:
        raise UserError(f"rank {groups_GM.max()} is not on the cluster {cluster.describe()} of {cluster.num_ranks}")
    if size < 2:
        return ALONE
    on, domain_GM = _collectives_on(cluster), groups_GM // cluster.domain
    collective, small, algorithm = {
        "ring": ("all_gather", "all_gather", "ring"),
        "exchange": ("all_to_all", "all_gather", "ring"),
        "chain": ("broadcast", "broadcast", "chain"),
    }[kind]
    moved = LARGE if kind == "chain" else (size - 1) / size * LARGE
    seconds = on.schedule(collective, groups_GM, LARGE, "chain" if kind == "chain" else "auto").seconds
    latency_s = on.schedule(small, groups_GM, 0.0, algorithm).seconds / (size - 1)
    return GroupLink(moved / seconds, latency_s, bool(np.any(domain_GM != domain_GM[:, :1])))
