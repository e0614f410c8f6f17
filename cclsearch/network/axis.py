"""What groups of ranks get on a simulated network, in the form in which measured links say it."""

from __future__ import annotations

from functools import cache

import numpy as np

from cclsearch.network.collectives import Collectives
from cclsearch.network.groups import ALONE, GroupLink
from cclsearch.network.sharing import Ids
from cclsearch.network.spec import ClusterSpec
from cclsearch.network.topology import TieredNetwork

LARGE = 1e10
"""Bytes of a message whose time is all bandwidth."""


@cache
def collectives_on(cluster: ClusterSpec) -> Collectives:
    """Return the collectives of a cluster, once for all that ask."""
    return Collectives(TieredNetwork(cluster))


def group_link(on: Collectives, kind: str, groups_GM: Ids, domain: int) -> GroupLink:
    """Return bandwidth and latency that each member gets while all groups communicate.

    `kind`: `ring` (all-gather with its fastest algorithm, as bytes that pass each rank in a ring), `exchange`
    (all-to-all, as bytes that leave a rank) or `chain` (messages to the next member).
    """
    size = groups_GM.shape[1]
    if size < 2:
        return ALONE
    crosses = bool(np.any(groups_GM // domain != groups_GM[:, :1] // domain))
    if kind == "chain":
        seconds = on.schedule("broadcast", groups_GM, LARGE, "chain").seconds
        small = on.schedule("broadcast", groups_GM, 0.0, "chain").seconds / (size - 1)
        return GroupLink(LARGE / seconds, small, crosses)
    collective = "all_gather" if kind == "ring" else "all_to_all"
    seconds = on.schedule(collective, groups_GM, LARGE).seconds
    small = on.schedule("all_gather", groups_GM, 0.0, "ring").seconds / (size - 1)
    return GroupLink((size - 1) / size * LARGE / seconds, small, crosses)
