"""Describes the network of a cluster: tiers from the inside out, as a model and as one line of text.

    switch:8:2400:2.5/fat-tree:64:200:8:leaf=32:over=2

is 64 domains of 8 accelerators. In a domain, a switch gives each accelerator 2400 Gbit/s in each direction, with 2.5 us
for a message. Between domains, each accelerator has a port of 200 Gbit/s to a fat tree with 32 ports a leaf switch, and
the uplinks of a leaf switch have half of the bandwidth of its ports.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from cclsearch.core.errors import UserError
from cclsearch.core.values import Model
from cclsearch.core.yaml_file import validate_mapping

TierKind = Literal["switch", "mesh", "ring", "torus", "fat-tree", "rail"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MAX_RANKS = 1 << 16
HAS_LEAVES = ("fat-tree", "rail")
FORM = "KIND:SIZE:GBPS:US[:leaf=N][:over=X], tiers separated by /, such as switch:8:2400:2.5/fat-tree:64:200:8"


class Tier(Model):
    """One level of a network: how `size` units of the level below are connected."""

    kind: TierKind
    """`switch`: one switch that never blocks; `mesh`: a link between every two; `ring`; `torus`: a ring along each
    axis; `fat-tree`: leaf switches of neighbouring ranks under a spine; `rail`: leaf switches of ranks with the same
    position in their domain (rail-optimised)."""
    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=4)]
    """Units along each axis; only a torus has more than one."""
    gbps: Positive
    """Gbit/s of each rank in one direction, over all its links of this tier together."""
    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Latency of a small message: through a switch, or over one link of a ring, torus or mesh; a spine doubles it."""
    leaf: Annotated[int, Field(ge=1)] | None = None
    """Ports of a leaf switch to ranks; None: one leaf switch for all."""
    over: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Oversubscription: bandwidth of a leaf switch's ports to ranks over the bandwidth of its uplinks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind != "torus" and len(self.shape) != 1:
            raise ValueError(f"a {self.kind} has one size, not {'x'.join(map(str, self.shape))}")
        if self.kind not in HAS_LEAVES and (self.leaf is not None or self.over != 1):
            raise ValueError(f"a {self.kind} has no leaf switches: leaf= and over= are for {' and '.join(HAS_LEAVES)}")
        return self

    @property
    def size(self) -> int:
        """Units of the level below."""
        return math.prod(self.shape)

    def describe(self) -> str:
        """Return the text that `parse_cluster` reads."""
        more = (f":leaf={self.leaf}" if self.leaf else "") + (f":over={self.over:g}" if self.over != 1 else "")
        return f"{self.kind}:{'x'.join(map(str, self.shape))}:{self.gbps:.10g}:{self.latency_us:.10g}{more}"


class ClusterSpec(Model):
    """A network: tiers from the inside out. Ranks fill the innermost units in order."""

    tiers: Annotated[tuple[Tier, ...], Field(min_length=1, max_length=4)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"at most {MAX_RANKS} ranks can be simulated, not {self.num_ranks}")
        return self

    @property
    def num_ranks(self) -> int:
        """Ranks of the cluster."""
        return math.prod(tier.size for tier in self.tiers)

    @property
    def domain(self) -> int:
        """Ranks of one scale-up domain: one unit of the innermost tier."""
        return self.tiers[0].size

    def describe(self) -> str:
        """Return the text that `parse_cluster` reads."""
        return "/".join(tier.describe() for tier in self.tiers)

    def scaled(self, *, up: float = 1.0, out: float = 1.0, latency: float = 1.0) -> ClusterSpec:
        """Return the cluster with other links: `up` inside the scale-up domain, `out` between domains."""
        factors = [up] + [out] * (len(self.tiers) - 1)
        tiers = [
            tier.model_copy(update={"gbps": tier.gbps * factor, "latency_us": tier.latency_us * latency})
            for tier, factor in zip(self.tiers, factors, strict=True)
        ]
        return ClusterSpec(tiers=tuple(tiers))

    def with_domain(self, size: int) -> ClusterSpec:
        """Return the cluster of as many ranks with scale-up domains of this size; UserError if it does not divide."""
        inner = self.tiers[0]
        rest = self.num_ranks / size
        outer = self.tiers[1:] if rest > 1 else ()
        if len(self.tiers) > 2 or rest != int(rest) or "torus" in {inner.kind, *(tier.kind for tier in outer)}:
            raise UserError(f"the cluster {self.describe()} cannot have scale-up domains of {size} ranks")
        sizes = zip((inner, *outer), (size, int(rest)), strict=False)
        return ClusterSpec(tiers=tuple(tier.model_copy(update={"shape": (each,)}) for tier, each in sizes))


def parse_cluster(text: str) -> ClusterSpec:
    """Return the cluster that one line describes; UserError if it cannot be read."""
    where = f"cluster {text!r}"
    try:
        tiers = [validate_mapping(Tier, _read_fields(part, where), where) for part in text.strip().split("/")]
        return validate_mapping(ClusterSpec, {"tiers": tiers}, where)
    except UserError as error:
        raise UserError(f"{error}; the form is {FORM}") from None


def _read_fields(text: str, where: str) -> dict[str, Any]:
    """Return the fields of a tier as texts, which its model reads."""
    kind, *fields = text.strip().split(":")
    if len(fields) < 3:
        raise UserError(f"{where}: {text!r} has too few fields")
    found = {"kind": kind, "shape": fields[0].split("x"), "gbps": fields[1], "latency_us": fields[2]}
    for field in fields[3:]:
        name, _, value = field.partition("=")
        if name not in ("leaf", "over") or name in found:
            raise UserError(f"{where}: {field!r} is not leaf=N or over=X")
        found[name] = value
    return found
