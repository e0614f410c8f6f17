"""Unlike hardware in one job: groups of accelerators in the order of the ranks, and the links that follow from them.

hardware:
  groups:
    - {accelerator: h100, num_accelerators: 8, scale_out_gbps: 400, outside_gbps: 100}
    - {accelerator: a100-80, num_accelerators: 8, scale_out_gbps: 200, outside_gbps: 100}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic import Field

from cclsearch.card.hardware import Accelerator, find_usual, hint_accelerator, match_accelerator
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Model
from cclsearch.core.yaml_file import validate_mapping
from cclsearch.network.matrix import MAX_ENDPOINTS, LinkMatrix


class HardwareGroup(Model):
    """Accelerators of one kind in a job of several kinds; ranks use the groups in their order."""

    accelerator: str
    """A name of `ccl-search accelerators`."""
    num_accelerators: int = Field(ge=1, le=1_000_000, strict=True)
    accelerators_per_node: int | None = Field(default=None, ge=1, strict=True)
    """Accelerators of one node; None: the card's number, or all of the group if it has fewer."""
    memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    speed: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    """Share of the accelerator's rates that it reaches, such as under a power limit. Ranks on CPUs are held to it."""
    scale_up_gbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Gbit/s per accelerator inside a node; None: the accelerator's own."""
    scale_out_gbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Gbit/s per accelerator between nodes of the group; None: the accelerator's own."""
    outside_gbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Gbit/s per accelerator to other groups, where the slower side counts; None: `scale_out_gbps`."""

    @property
    def chip(self) -> Accelerator:
        """The accelerator's figures; UserError if there is none of that name."""
        found = match_accelerator(self.accelerator, self.memory_gib) or find_usual(self.accelerator)
        if found is None:
            name = one_line(self.accelerator, 80)
            raise UserError(f"there is no accelerator {name!r}{hint_accelerator(self.accelerator)}")
        return found

    @property
    def gib(self) -> float:
        """Memory of one accelerator."""
        return self.memory_gib or self.chip.memory_gib


Groups = tuple[HardwareGroup, ...]


def read_groups(entries: Any, where: str) -> Groups:
    """Return the groups of a card's or profile's list; UserError in one line that names the entry."""
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, Mapping) for entry in entries):
        example = "`{accelerator: NAME, num_accelerators: N}`"
        raise UserError(f"{where}: groups must be a list of {example}, not {one_line(repr(entries), 80)}")
    found = tuple(validate_mapping(HardwareGroup, entry, f"{where}: groups[{i}]") for i, entry in enumerate(entries))
    for number, group in enumerate(found):
        try:
            kinds = {found[0].chip.kind, group.chip.kind}
        except UserError as error:
            raise UserError(f"{where}: groups[{number}]: {error}") from None
        if len(kinds) > 1 and "tpu" in kinds:
            raise UserError(f"{where}: groups[{number}]: TPUs and {group.chip.kind}s cannot be in one job")
    return found


def fill_from_groups(groups: Groups, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields that a list of groups gives: the first group's properties, and the count of all.

    UserError if `values` (`num_accelerators`, `accelerators_per_node`, `accelerator`) contradict it.
    """
    total, first = sum(group.num_accelerators for group in groups), groups[0]
    stated = values.get("num_accelerators")
    if stated is not None and stated != total:
        raise UserError(f"{where}: the groups have {total} accelerators together, but {stated} are stated: state one")
    name = values.get("accelerator")
    if name is not None and (match_accelerator(str(name)) or find_usual(str(name))) != first.chip:
        shown = one_line(str(name), 60)
        raise UserError(f"{where}: groups[0] is of {first.chip.name}, but the accelerator {shown!r} is stated")
    per_node = values.get("accelerators_per_node") or first.accelerators_per_node or first.num_accelerators
    filled = {"accelerator": first.accelerator, "num_accelerators": total, "accelerators_per_node": per_node}
    if "memory_gib" not in values:
        filled["memory_gib"] = first.gib
    return filled


def has_unlike_links(groups: Groups) -> bool:
    """Whether the groups differ in their links, or are connected more slowly than inside."""
    rates = [(*_rates(group), group.outside_gbps or _rates(group)[1]) for group in groups]
    return any(a != b for a, b in pairwise(rates)) or any(outside < out for _, out, outside in rates)


def make_links(groups: Groups, per_node: int) -> LinkMatrix:
    """Return the links of all pairs of nodes, of `per_node` accelerators where a group states no number.

    UserError if there are more nodes than a matrix can have.
    """
    sizes = [min(group.accelerators_per_node or per_node, group.num_accelerators) for group in groups]
    for group, size in zip(groups, sizes, strict=True):
        if group.num_accelerators % size:
            raise UserError(
                f"a group of {group.num_accelerators} {one_line(group.accelerator, 40)} has no whole nodes of {size}:"
                " state its accelerators_per_node"
            )
    places = math.gcd(*sizes)
    node_of, group_of = [], []
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        for node in range(group.num_accelerators // size):
            node_of += [f"g{number}n{node}"] * (size // places)
            group_of += [number] * (size // places)
    if len(node_of) > MAX_ENDPOINTS:
        raise UserError(
            f"{len(node_of)} endpoints of {places} accelerators are more than {MAX_ENDPOINTS}: give all groups nodes of"
            " one size"
        )
    pairs = [[_pair(groups, group_of, node_of, a, b) for b in range(len(node_of))] for a in range(len(node_of))]
    return LinkMatrix(
        endpoints=tuple(f"{name}:{number}" for number, name in enumerate(node_of)),
        nodes=tuple(node_of),
        places=places,
        gbps=tuple(tuple(rate for rate, _ in row) for row in pairs),
        latency_us=tuple(tuple(latency for _, latency in row) for row in pairs),
        source="the groups of the hardware",
    )


def _pair(groups: Groups, group_of: Sequence[int], node_of: Sequence[str], a: int, b: int) -> tuple[float, float]:
    """Gbit/s and microseconds from one endpoint to another."""
    one, other = groups[group_of[a]], groups[group_of[b]]
    (up, out), chip = _rates(one), one.chip
    if node_of[a] == node_of[b]:
        return up, chip.scale_up_latency_us
    if group_of[a] == group_of[b]:
        return out, chip.scale_out_latency_us
    rate = min(each.outside_gbps or _rates(each)[1] for each in (one, other))
    return rate, max(chip.scale_out_latency_us, other.chip.scale_out_latency_us)


def _rates(group: HardwareGroup) -> tuple[float, float]:
    """Gbit/s inside a node and between nodes."""
    chip = group.chip
    return group.scale_up_gbps or chip.scale_up_gbps, group.scale_out_gbps or chip.scale_out_gbps
