"""Measures all pairs of endpoints, shared ports and all-reduces, by whatever library moves the bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

REPEATS = 3


class Links(Protocol):
    """The links between ranks; every process of the job makes the same calls in the same order."""

    names: list[str]
    """Of each rank."""
    nodes: list[str]
    """The host of each rank."""
    backend: str

    def measure(self, pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Return bytes per second and seconds of latency from source to target of the slowest of these pairs of ranks,
        which all work at once."""
        ...

    def reduce_together(self, size: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes over all ranks."""
        ...


def measure_all(links: Links, max_ranks: int) -> dict[str, Any]:
    """Return what `evidence.jsonl` has. An endpoint is a rank, or a node if there are more than `max_ranks` ranks."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(links.nodes):
        by_node.setdefault(node, []).append(rank)
    by_rank = len(links.nodes) <= max_ranks
    leads = list(range(len(links.nodes))) if by_rank else [ranks[0] for ranks in by_node.values()]
    rates = [[0.0] * len(leads) for _ in leads]
    latencies = [[0.0] * len(leads) for _ in leads]
    for i, j in itertools.permutations(range(len(leads)), 2):
        rates[i][j], latencies[i][j] = links.measure([(leads[i], leads[j])])
    if not by_rank:
        for i, ranks in enumerate(by_node.values()):
            if len(ranks) > 1:
                rates[i][i], latencies[i][i] = links.measure([(ranks[0], ranks[1])])
    return {
        "endpoints": links.names if by_rank else list(by_node),
        "nodes": links.nodes if by_rank else list(by_node),
        "places": 1 if by_rank else len(next(iter(by_node.values()))),
        "bytes_s": rates,
        "latency_s": latencies,
        **_measure_port(links, list(by_node.values())),
        "all_reduce": [{"bytes": size, "seconds": links.reduce_together(size)} for size in (1 << 10, 1 << 20, 1 << 22)],
        "backend": links.backend,
    }


NEARLY_WHOLE = 0.15
"""Deviation from a whole number up to which the ranks that share a port are counted."""


def _measure_port(links: Links, nodes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return how many ranks of a node share a network port: all of the first two nodes send at once.

    If that leaves each rank neither a whole part of what it has alone nor all of it, one rank cannot fill a port: then
    the ports of a node count as one, with what passes them together.
    """
    sharers = min(len(nodes[0]), len(nodes[1])) if len(nodes) > 1 else 1
    if sharers < 2:
        return {"places_per_port": 1}
    alone, _ = links.measure([(nodes[0][0], nodes[1][0])])
    together, _ = links.measure(list(zip(nodes[0], nodes[1], strict=False)))
    parts = alone / together
    whole = min(sharers, max(1, round(parts)))
    if parts > 1 and abs(parts / whole - 1) > NEARLY_WHOLE:
        return {"places_per_port": sharers, "port_bytes_s": sharers * together}
    return {"places_per_port": whole}
