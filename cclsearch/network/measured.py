"""The network of a matrix of measured links: flows are limited by their pair and by shared ports."""

from __future__ import annotations

import numpy as np

from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.sharing import Ids
from cclsearch.network.topology import LinkNetwork, Routes


class MeasuredNetwork(LinkNetwork):
    """Ranks at the places of a link matrix, in order.

    Links are a pair of places each, then the ports out of the nodes, then those into them. A port has the bandwidth
    that was measured while all of its places sent, or that of the fastest pair through it.
    """

    def __init__(self, matrix: LinkMatrix) -> None:
        self.matrix = matrix
        self.num_ranks = matrix.num_places
        rate = matrix.bytes_s_EE
        endpoint, port = matrix.endpoint_P, matrix.port_P
        self._ports = int(port.max()) + 1
        between = matrix.node_P[:, None] != matrix.node_P[None, :]
        pairs = rate[endpoint[:, None], endpoint[None, :]]
        out, into = np.zeros(self._ports), np.zeros(self._ports)
        np.maximum.at(out, port, np.where(between, pairs, 0.0).max(axis=1))
        np.maximum.at(into, port, np.where(between, pairs, 0.0).max(axis=0))
        ports = np.concatenate([out, into])
        if matrix.port_bytes_s is not None:
            ports = np.where(ports > 0, np.maximum(ports, matrix.port_bytes_s), ports)
        self.capacity_L = np.concatenate([pairs.ravel(), np.where(ports > 0, ports, np.inf)])

    def route(self, source: Ids, target: Ids) -> Routes:
        """Return the routes: the pair, and between nodes the ports at both ends."""
        matrix, flow = self.matrix, np.arange(len(source))
        endpoint, port, node = matrix.endpoint_P, matrix.port_P, matrix.node_P
        leaves = (node[source] != node[target]) & (source != target)
        moves = source != target
        first = self.num_ranks**2
        flows = [flow[moves], flow[leaves], flow[leaves]]
        links = [
            (source * self.num_ranks + target)[moves],
            first + port[source[leaves]],
            first + self._ports + port[target[leaves]],
        ]
        latency = np.where(moves, matrix.latency_s_EE[endpoint[source], endpoint[target]], 0.0)
        return Routes(np.concatenate(flows), np.concatenate(links), latency)

    def axes_of(self, ranks: Ids) -> list[Ids]:
        """Return the position inside the node, and the node."""
        node = self.matrix.node_P
        inside = np.zeros(len(node), dtype=np.int64)
        for each in np.unique(node):
            inside[node == each] = np.arange(int(np.sum(node == each)))
        return [inside[ranks], node[ranks]]
