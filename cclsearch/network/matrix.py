"""The matrix of measured links: bandwidth and latency of every ordered pair of endpoints.

An endpoint is a place for one rank, or for several (a node). Places are counted through the endpoints in order: with 8
per endpoint, places 0 to 7 belong to the first. Rank r runs at place r unless a placement says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from cclsearch.core.text import one_line
from cclsearch.core.values import Model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Places = NDArray[np.int64]

MAX_ENDPOINTS = 512


Row = Annotated[
    tuple[float, ...],
    BeforeValidator(lambda row: row.split() if isinstance(row, str) else row),
    PlainSerializer(lambda row: " ".join(map(repr, row)), return_type=str),
]
"""One row of figures; written as one line of text."""


class LinkMatrix(Model):
    """Links between endpoints, each pair measured while the others were idle."""

    endpoints: tuple[str, ...] = Field(min_length=1, max_length=MAX_ENDPOINTS)
    """Name of each, unique: a host, or a host and a device."""
    nodes: tuple[str, ...] = ()
    """Node of each endpoint; empty: each is a node of its own."""
    places: int = Field(default=1, ge=1)
    """Ranks that run at one endpoint."""
    gbps: tuple[Row, ...]
    """Gbit/s (10^9 bit/s) from the row's endpoint to the column's, one direction. The diagonal is the bandwidth between
    two places of one endpoint; 0 if it has one place."""
    latency_us: tuple[Row, ...]
    """Microseconds of an empty message, of the same pairs."""
    places_per_port: int = Field(default=1, ge=1)
    """Neighbouring places of a node that share one port to other nodes: 1 if each has a network port of its own."""
    port_gbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Gbit/s that pass a port in one direction while all of its places send; None: as one pair
    alone. It is more if one pair cannot fill a port."""
    source: str = ""
    """Origin of the figures: the program that measured them, or who published them."""

    @field_validator("endpoints", "nodes")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        odd = next((name for name in names if not name or name != one_line(name, 200) or "," in name), None)
        if odd is not None:
            raise ValueError(f"a name must be a printable text without commas, not {odd!r}")
        return names

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = len(self.endpoints)
        twice = next((name for name in self.endpoints if self.endpoints.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"the endpoint {twice!r} is named twice")
        if self.nodes and len(self.nodes) != count:
            raise ValueError(f"{count} endpoints, but nodes of {len(self.nodes)}")
        for what, rows, least in (("gbps", self.gbps, "above 0"), ("latency_us", self.latency_us, "0 or more")):
            self._check_rows(what, rows, least)
        return self

    def _check_rows(self, what: str, rows: Sequence[Row], least: str) -> None:
        count = len(self.endpoints)
        lengths = [len(row) for row in rows]
        if lengths != [count] * count:
            found = f"{len(rows)} rows of {sorted(set(lengths))} values"
            raise ValueError(f"{what} must have {count} rows and columns, one for each endpoint, not {found}")
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                is_used = i != j or self.places > 1
                if is_used and not (math.isfinite(value) and (value > 0 or (value == 0 and least == "0 or more"))):
                    pair = f"from {self.endpoints[i]!r} to {self.endpoints[j]!r}"
                    raise ValueError(f"{what} {pair} must be {least}, not {value:g}")

    @property
    def num_places(self) -> int:
        """Ranks that the endpoints take together."""
        return len(self.endpoints) * self.places

    @cached_property
    def endpoint_P(self) -> Places:
        """(P,) number of the endpoint of each place."""
        import numpy as np

        return np.arange(self.num_places) // self.places

    @cached_property
    def node_P(self) -> Places:
        """(P,) number of the node of each place, by first appearance."""
        import numpy as np

        names = self.nodes or self.endpoints
        number = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return np.array([number[name] for name in names], dtype=np.int64)[self.endpoint_P]

    @cached_property
    def port_P(self) -> Places:
        """(P,) number of the network port of each place."""
        import numpy as np

        node_P = self.node_P
        inside = np.zeros(len(node_P), dtype=np.int64)
        for node in np.unique(node_P):
            inside[node_P == node] = np.arange(int(np.sum(node_P == node)))
        per_node = -(-int(inside.max() + 1) // self.places_per_port)
        return np.asarray(node_P * per_node + inside // self.places_per_port)

    @cached_property
    def bytes_s_EE(self) -> Array:
        """(E, E) bytes per second; infinite on a diagonal that no two places use."""
        import numpy as np

        rate = np.array(self.gbps, dtype=np.float64) * 1e9 / 8
        if self.places == 1:
            np.fill_diagonal(rate, np.inf)
        return rate

    @property
    def port_bytes_s(self) -> float | None:
        """Bytes per second of a port; None: as for one pair."""
        return None if self.port_gbps is None else self.port_gbps * 1e9 / 8

    @cached_property
    def latency_s_EE(self) -> Array:
        """(E, E) seconds."""
        import numpy as np

        latency = np.array(self.latency_us, dtype=np.float64) * 1e-6
        if self.places == 1:
            np.fill_diagonal(latency, 0.0)
        return latency

    @cached_property
    def is_uneven_inside(self) -> bool:
        """Whether pairs of endpoints inside a node differ."""
        import numpy as np

        node_E = self.node_P[:: self.places]
        inside = (node_E[:, None] == node_E[None, :]) & ~np.eye(len(node_E), dtype=bool)
        rates = self.bytes_s_EE[inside]
        return bool(len(rates)) and bool(rates.min() < rates.max())

    @cached_property
    def known_rings(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Orders of members inside a node that `groups.py` found."""
        return {}

    def changed(self, **fields: object) -> LinkMatrix:
        """Return a matrix with these fields instead; nothing that this one has computed is copied."""
        return LinkMatrix.model_validate({name: getattr(self, name) for name in LinkMatrix.model_fields} | fields)

    def describe(self) -> str:
        """`4 endpoints on 2 nodes, 9.6 to 98 Gbit/s, from: ...`."""
        used = [self.gbps[i][j] for i in range(len(self.gbps)) for j in range(len(self.gbps)) if i != j]
        used += [self.gbps[i][i] for i in range(len(self.gbps)) if self.places > 1]
        rates = f"{min(used):.4g} to {max(used):.4g} Gbit/s" if used else "no pair"
        nodes = len(set(self.nodes or self.endpoints))
        origin = one_line(self.source, 160) or "an unnamed source"
        return f"{len(self.endpoints)} endpoints on {nodes} nodes, {self.num_places} places, {rates}, from: {origin}"
