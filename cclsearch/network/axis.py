"""Bandwidth and latency of groups of ranks that communicate at once, on measured or simulated links."""

from __future__ import annotations

from functools import cache

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.network.collectives import Collectives
from cclsearch.network.groups import ALONE, GroupLink, slowest_chain, slowest_exchange, slowest_ring
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.sharing import Ids
from cclsearch.network.spec import ClusterSpec
from cclsearch.network.topology import TieredNetwork

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
