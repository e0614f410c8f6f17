"""Shared by run scripts whose servers only prefill or only decode: how many there are, and on which node each runs.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common import IllegalConfig
from serving_model import count_nodes
from serving_proxy import DECODE, PREFILL

ROLES = (PREFILL, DECODE)
OWN_KNOBS = frozenset({"devices", *(f"{role}_{part}" for role in ROLES for part in ("workers", "gpus_per_worker"))})
"""Knobs of all servers together."""


@dataclass(frozen=True)
class Seat:
    """Where one server runs."""

    number: int
    """Of all servers, those that prefill first."""
    role: str
    node: int
    first: int
    """Its accelerators are the node's from this one on."""
    size: int
    """How many accelerators it has."""


def read_groups(data: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the servers of each role, and the accelerators of each; IllegalConfig if `devices` is not their sum."""
    config = data["config"]
    groups = {role: (int(config[f"{role}_workers"]), int(config[f"{role}_gpus_per_worker"])) for role in ROLES}
    total, devices = sum(count * size for count, size in groups.values()), int(config["devices"])
    if min(count for count, _ in groups.values()) < 1:
        raise IllegalConfig("prefill_workers and decode_workers must be at least 1")
    if total != devices:
        raise IllegalConfig(f"the servers have {total} accelerators together, but devices is {devices}")
    return groups


def place_servers(data: Mapping[str, Any]) -> list[Seat]:
    """Return the seat of every server: the larger ones first, each on the first node that has room for it.

    Nodes are as many as launchers give the trial. Raises IllegalConfig if a server does not fit on one of them.
    """
    nodes, size_of = count_nodes(data), {role: size for role, (_, size) in read_groups(data).items()}
    room = int(data.get("ranks_per_node") or data["config"]["devices"])
    used, seats = [0] * nodes, []
    roles = [role for role, (count, _) in read_groups(data).items() for _ in range(count)]
    for number, role in sorted(enumerate(roles), key=lambda each: (-size_of[each[1]], each[0])):
        size = size_of[role]
        node = next((node for node in range(nodes) if used[node] + size <= room), None)
        if node is None:
            words = "1 machine" if nodes == 1 else f"{nodes} machines"
            raise IllegalConfig(
                f"the {role} server {number} of {size} accelerators does not fit on {words} with {room} each: a server"
                " runs on one machine"
            )
        seats.append(Seat(number, role, node, used[node], size))
        used[node] += size
    return sorted(seats, key=lambda seat: seat.number)
