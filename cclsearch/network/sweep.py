"""Times the same work on other hardware, and there with each resource doubled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cclsearch.core.errors import UserError
from cclsearch.core.values import Model
from cclsearch.network.spec import ClusterSpec


@dataclass(frozen=True)
class Speeds:
    """Speed of computation relative to the base."""

    flops: float = 1.0
    """Factor on products, attention and convolutions."""
    memory: float = 1.0
    """Factor on all other kernels."""
    copies: float = 1.0


@dataclass(frozen=True)
class HardwareOption:
    """A cluster to compute the work on."""

    name: str
    cluster: ClusterSpec
    speeds: Speeds = Speeds()


class SweepRow(Model):
    """The work on one option."""

    name: str
    cluster: str
    ranks: int
    seconds: float | None = None
    """None if the option does not suit the work."""
    speedup: float | None = None
    """Seconds on the base over seconds here."""
    utility: dict[str, float] = {}
    """Resource -> share of the seconds that doubling it saves here."""
    problem: str = ""


TimeOn = Callable[[ClusterSpec, Speeds], float]


def double_resources(option: HardwareOption) -> dict[str, HardwareOption]:
    """Return resource -> the option with that resource doubled (latency: halved); those that it has."""
    cluster, speeds = option.cluster, option.speeds
    faster = replace(speeds, flops=2 * speeds.flops, memory=2 * speeds.memory)
    doubled = {"compute": replace(option, speeds=faster)}
    doubled["scale_up_bw"] = replace(option, cluster=cluster.scaled(up=2))
    if len(cluster.tiers) > 1:
        doubled["scale_out_bw"] = replace(option, cluster=cluster.scaled(out=2))
        with suppress(UserError):  # there is no such cluster if the domains do not divide
            doubled["scale_up_domain"] = replace(option, cluster=cluster.with_domain(2 * cluster.domain))
    doubled["latency"] = replace(option, cluster=cluster.scaled(latency=0.5))
    return doubled


def sweep(
    base: HardwareOption, options: Sequence[HardwareOption], time_on: TimeOn, time_base: TimeOn | None = None
) -> list[SweepRow]:
    """Return a row for the base and for each option, in their order.

    `time_base` times the base, if the options change more than the hardware (compressed collectives).
    """
    time_base = time_base or time_on
    base_s = time_base(base.cluster, base.speeds)
    return [_row(base, time_base, base_s), *(_row(option, time_on, base_s) for option in options)]


def _row(option: HardwareOption, time_on: TimeOn, base_s: float) -> SweepRow:
    row = SweepRow(name=option.name, cluster=option.cluster.describe(), ranks=option.cluster.num_ranks)
    try:
        seconds = time_on(option.cluster, option.speeds)
    except UserError as error:
        return row.model_copy(update={"problem": str(error)})
    saved: dict[str, float] = {}
    for name, doubled in double_resources(option).items():
        with suppress(UserError):  # such as a domain that does not suit the work's groups
            saved[name] = 1 - time_on(doubled.cluster, doubled.speeds) / seconds
    return row.model_copy(update={"seconds": seconds, "speedup": base_s / seconds, "utility": saved})


def vary(cluster: ClusterSpec) -> list[HardwareOption]:
    """Return usual variations of a cluster: faster links, larger domains, other topologies of the same bandwidth."""
    options = {"scale-up x2": cluster.scaled(up=2)}
    inner, *between = cluster.tiers
    if not between:
        for kind in ("switch", "ring"):
            if kind != inner.kind and (kind, inner.kind) != ("ring", "torus"):
                tier = inner.model_copy(update={"kind": kind, "shape": (inner.size,), "leaf": None, "over": 1.0})
                options[f"{kind} of the same bandwidth"] = ClusterSpec(tiers=(tier,))
    else:
        options |= {"scale-out x2": cluster.scaled(out=2), "both x2": cluster.scaled(up=2, out=2)}
        with suppress(UserError):  # the domains do not divide
            for factor in (2, 4):
                options[f"domain x{factor}"] = cluster.with_domain(factor * cluster.domain)
    if len(between) == 1 and between[0].kind != "torus" and between[0].size > 1:
        rail, tree = max(between[0].size // 2, 1), max(cluster.num_ranks // 2, 1)
        changes: dict[str, dict[str, object]] = {
            "fat tree, 4:1 oversubscribed": {"kind": "fat-tree", "leaf": tree, "over": 4.0},
            "rails, 4:1 oversubscribed": {"kind": "rail", "leaf": rail, "over": 4.0},
            "ring between domains": {"kind": "ring", "leaf": None, "over": 1.0},
        }
        for name, change in changes.items():
            options[name] = ClusterSpec(tiers=(inner, between[0].model_copy(update=change)))
    return [HardwareOption(name, spec) for name, spec in options.items()]
