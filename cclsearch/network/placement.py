"""Finds an order of nodes, and of the devices inside each, for the ranks, by local improvement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from cclsearch.network.matrix import LinkMatrix

if TYPE_CHECKING:
    from cclsearch.network.matrix import Array, Places

MAX_TRIED = 3000
"""Orders that one improvement tries at most."""
NEARLY = 1e-9
"""Relative gain that counts as one."""

Order = tuple[int, ...]
"""Numbers of nodes, or of the devices of a node; the first one has the first ranks."""


def identity_order(links: LinkMatrix) -> Order:
    """Return the nodes as the matrix has them."""
    return tuple(range(int(links.node_P.max()) + 1))


def count_devices(links: LinkMatrix) -> int:
    """Return the places of a node; 0 if nodes have unlike numbers of them."""
    counts = np.bincount(links.node_P)
    return int(counts[0]) if (counts == counts[0]).all() else 0


def spread_nodes(links: LinkMatrix, order: Sequence[int], devices: Sequence[int] | None = None) -> Places:
    """(P,) place of each rank if the nodes have ranks in this order, each all of its places.

    `devices` are the places of a node in the order of its ranks, the same in every node; None: as the matrix has them.
    """
    inside = slice(None) if devices is None else list(devices)
    return np.concatenate([np.flatnonzero(links.node_P == node)[inside] for node in order])


def chain_nodes(links: LinkMatrix) -> list[Order]:
    """Return an order from each node on, which continues with the fastest link to a remaining node.

    Nodes of one zone or switch become neighbours in any given order.
    """
    first_P = np.array([int(np.flatnonzero(links.node_P == node)[0]) for node in identity_order(links)])
    return _chain(_rates(links, first_P))


def chain_devices(links: LinkMatrix) -> list[Order]:
    """Return the same for the devices of a node; a pair has its slowest rate over the nodes."""
    nodes = [np.flatnonzero(links.node_P == node) for node in identity_order(links)]
    return _chain(np.min([_rates(links, place_D) for place_D in nodes], axis=0))


def _rates(links: LinkMatrix, place_N: Places) -> Array:
    """(N, N) bytes per second between these places in the slower direction."""
    at = links.endpoint_P[place_N]
    rate = links.bytes_s_EE[np.ix_(at, at)]
    return np.asarray(np.minimum(rate, rate.T))


def _chain(rate_NN: Array) -> list[Order]:
    found = []
    for start in range(len(rate_NN)):
        order, left = [start], [other for other in range(len(rate_NN)) if other != start]
        while left:
            here = order[-1]
            order.append(max(left, key=lambda other: (rate_NN[here, other], -other)))
            left.remove(order[-1])
        found.append(tuple(order))
    return found


def improve_order(start: Order, cost: Callable[[Sequence[int]], float], others: Sequence[Order] = ()) -> Order:
    """Return an order of at most the start's cost, by swaps, moves and turned pieces, the first that helps each time.

    It improves the start, and the best of `others` if that is better. It stops when no change helps, or after
    `MAX_TRIED` orders; the same input gives the same order.
    """
    best = min((start, *others), key=cost)
    least, tried, is_better = cost(best), 1 + len(others), True
    while is_better and tried < MAX_TRIED:
        is_better = False
        for order in _changes(best):
            tried += 1
            if (value := cost(order)) < least - abs(least) * NEARLY:
                best, least, is_better = order, value, True
                break
            if tried >= MAX_TRIED:
                break
    return best


def _changes(order: Order) -> list[Order]:
    """Return the orders that differ by one swap, one turned piece, or one moved node."""
    found = []
    for i, j in combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        found.append(tuple(swapped))
        if j - i > 1:
            found.append((*order[:i], *order[i : j + 1][::-1], *order[j + 1 :]))
            found.append((*order[:i], *order[i + 1 : j + 1], order[i], *order[j + 1 :]))
    return found
