"""Flows, collectives and axes of parallelism that share links at the same time, against times computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.network.collectives import Collectives
from cclsearch.network.engine import Work, simulate
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.sharing import drain, share_flows
from cclsearch.network.spec import parse_cluster
from cclsearch.network.topology import TieredNetwork
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.time import MULTIPLIERS, TimeParts, combine_time, time_parts

GB = 1e9
EXACT = 1e-3
"""A tenth of a percent."""


def test_a_flow_over_two_unlike_links_gets_what_the_tighter_one_leaves() -> None:
    """Links of 10 and 4; flow 0 crosses both, 1 the first, 2 the second. Rates 2, 8, 2 until second 5, then 4."""
    flow, link, capacity = np.array([0, 0, 1, 2]), np.array([0, 1, 0, 1]), np.array([10.0, 4.0])
    assert share_flows(flow, link, 3, capacity).tolist() == pytest.approx([2, 8, 2], rel=EXACT)
    assert drain(flow, link, np.array([20.0, 40.0, 10.0]), capacity).tolist() == pytest.approx([7.5, 5, 5], rel=EXACT)


def test_three_flows_of_unlike_size_end_one_after_the_other() -> None:
    """A link of 6: rates 2, 2, 2 until second 1, then 3, 3 until second 2, then 6; a fourth flow is limited to 1."""
    flow, link = np.array([0, 1, 2]), np.array([0, 0, 0])
    assert drain(flow, link, np.array([2.0, 5.0, 11.0]), np.array([6.0])).tolist() == pytest.approx([1, 2, 3])
    limited, shared = np.array([0, 1, 2, 3, 3]), np.array([0, 0, 0, 0, 1])
    found = share_flows(limited, shared, 4, np.array([7.0, 1.0]))
    assert found.tolist() == pytest.approx([2, 2, 2, 1], rel=EXACT)


class Leaves:
    """Two leaf switches with ranks 0 to 3 and 4 to 7: ports of 10 GB/s, and an uplink each of 10 GB/s."""

    net = TieredNetwork(parse_cluster("fat-tree:8:80:0:leaf=4:over=4"))
    on = Collectives(net, one_way=True)

    def send(self, source: int, target: int, gigabytes: float, earliest_s: float = 0.0) -> Work:
        schedule = self.on.schedule("send", np.array([[source, target]]), gigabytes * GB)
        return Work(schedule=schedule, earliest_s=earliest_s)

    def ends(self, *work: Work) -> list[float]:
        return simulate(work, self.net.capacity_L).end_s.tolist()


def test_cross_traffic_shares_the_uplink_of_a_fat_tree_and_leaves_the_leaf_alone() -> None:
    """Two messages over the uplink have half of it each; the third stays in its leaf and has its port."""
    tree = Leaves()
    ends = tree.ends(tree.send(0, 4, 10), tree.send(1, 5, 30), tree.send(2, 3, 10))
    assert ends == pytest.approx([2, 4, 1], rel=EXACT)


def test_cross_traffic_that_begins_later_slows_what_is_under_way() -> None:
    """The first message has 10 of 20 GB behind it when the second one comes: both have 5 GB/s until second 3."""
    tree = Leaves()
    ends = tree.ends(tree.send(0, 4, 20), tree.send(1, 5, 30, earliest_s=1.0))
    assert ends == pytest.approx([3, 5], rel=EXACT)
    assert tree.ends(tree.send(0, 4, 20), tree.send(5, 1, 30)) == pytest.approx([2, 3], rel=EXACT), "other direction"


def test_a_message_limited_by_its_port_leaves_the_rest_of_the_uplink_to_others() -> None:
    """Rank 0 sends two messages through its port, one over the uplink; rank 1 gets what those leave of the uplink."""
    tree = Leaves()
    ends = tree.ends(tree.send(0, 2, 10), tree.send(0, 4, 10), tree.send(1, 5, 10))
    assert ends == pytest.approx([2, 2, 2], rel=EXACT), "5 GB/s each"
    ends = tree.ends(tree.send(0, 2, 30), tree.send(0, 3, 30), tree.send(0, 4, 10), tree.send(1, 5, 20))
    assert ends == pytest.approx([7, 7, 3, 3], rel=EXACT), "a third of the port each, and two thirds of the uplink"


def test_a_ring_and_an_exchange_at_once_share_each_port_by_their_flows() -> None:
    """Four ranks, 10 GB of each: the ring has 1 flow at a port and takes 1.5 s alone, the exchange 3 and 0.75 s.

    The exchange has three quarters of the port: it ends at 1 s, with a quarter of a second's worth of the ring done.
    """
    net = TieredNetwork(parse_cluster("switch:4:80:0"))
    on, ranks = Collectives(net, one_way=True), np.arange(4)[None]
    ring = Work(schedule=on.schedule("all_reduce", ranks, 10 * GB, "ring"))
    exchange = Work(schedule=on.schedule("all_to_all", ranks, 10 * GB, "direct"))
    assert simulate([ring, exchange], net.capacity_L).end_s.tolist() == pytest.approx([2.25, 1.0], rel=EXACT)


def test_rings_across_leaves_share_an_uplink_and_a_ring_inside_a_leaf_does_not() -> None:
    """Two rings of two ranks over the uplink have half of it each; the third has the ports of its leaf to itself."""
    tree = Leaves()
    groups = [[0, 4]], [[1, 5]], [[2, 3]]
    work = [Work(schedule=tree.on.schedule("all_reduce", np.array(g), 10 * GB, "ring"))
            for k, g in enumerate(groups)]  # fmt: skip
    assert tree.ends(*work) == pytest.approx([2, 2, 1], rel=EXACT)
    together = tree.on.schedule("all_reduce", np.array([[0, 4], [1, 5]]), 10 * GB, "ring")
    assert together.seconds == pytest.approx(2, rel=EXACT), "the same as groups of one collective"


def test_a_collective_with_unlike_bottlenecks_is_near_what_its_flows_take_one_by_one() -> None:
    """An exchange of all ranks beside a ring in one leaf. All flows of a collective have the rate of the slowest, those
    over the uplink: flow by flow, those inside the leaf would go first, and the ring would end at 1.2 s."""
    tree = Leaves()
    exchange = tree.on.schedule("all_to_all", np.arange(8)[None], 8 * GB)
    inside = tree.on.schedule("all_gather", np.arange(4)[None], 8 * GB, "ring")
    ends = tree.ends(Work(schedule=exchange), Work(schedule=inside))
    pairs = [(a, b, 1.0) for a in range(8) for b in range(8) if a != b]
    pairs += [(a, (a + 1) % 4, 6.0) for a in range(4)]
    source, target, size = (np.array(each) for each in zip(*pairs, strict=True))
    routes = tree.net.route(source, target)
    each = drain(routes.flow, routes.link, size * GB, tree.net.capacity_L)
    assert (each[:56].max(), each[56:].max()) == pytest.approx((1.6, 1.2), rel=EXACT)
    assert ends[0] == pytest.approx(1.6, rel=EXACT)
    assert ends[1] == pytest.approx(1.2, rel=0.12)


def links_of_four(nodes: str, gbps: float = 0.001) -> LinkMatrix:
    """Return four ranks, all pairs so slow that communication takes all of a step."""
    rates = np.full((4, 4), gbps)
    np.fill_diagonal(rates, 0.0)
    return LinkMatrix(
        endpoints=tuple(f"{node}:{k}" for k, node in enumerate(nodes)),
        nodes=tuple(nodes),
        gbps=tuple(map(tuple, rates.tolist())),
        latency_us=((0.0,) * 4,) * 4,
    )


def parts_on(order: str, **hardware: object) -> TimeParts:
    """Return the parts of tp 2, dp 2 over four ranks."""
    row = {"micro_batch_size": 4, "activation_checkpointing": "none", "zero_stage": 0, "tp": 2, "dp": 2, "pp": 1}
    full: dict[str, str | int] = {**row, "rank_order": order}  # type: ignore[dict-item]
    card = load_card("tiny")
    card = card.model_copy(update={"hardware": card.hardware.model_copy(update={"num_accelerators": 4, **hardware})})
    space = space_from_rows([Knob(name, (value,)) for name, value in full.items()], [full])
    return time_parts(card, read_layout(card, space), read_machine(card))


def step_s(parts: TimeParts) -> float:
    return float(combine_time(parts, np.zeros(len(MULTIPLIERS)))[0])


def test_two_degrees_that_share_ports_cost_what_sharing_costs() -> None:
    """Four nodes of one rank: the groups of tp, 0-1 and 2-3, and those of dp, 0-2 and 1-3, use the same ports. The
    predicted step takes as long as both rings at once on the simulated links, where each has half of a port."""
    parts = parts_on("tp-dp-pp", links=links_of_four("abcd"), accelerators_per_node=1)
    tp_s, dp_s = float((parts.micro_batches * parts.tp_scale_out)[0]), float(parts.dp[0])
    assert min(tp_s, dp_s) > 0.1 * max(tp_s, dp_s), "both count"
    net = TieredNetwork(parse_cluster("switch:4:0.001:0"))
    on, rate = Collectives(net, one_way=True), 0.001 * GB / 8
    axes = (tp_s, [[0, 1], [2, 3]]), (dp_s, [[0, 2], [1, 3]])
    rings = [on.schedule("all_reduce", np.array(groups), seconds * rate, "ring") for seconds, groups in axes]
    assert [ring.seconds for ring in rings] == pytest.approx([tp_s, dp_s], rel=EXACT)
    both = simulate([Work(schedule=ring) for k, ring in enumerate(rings)], net.capacity_L).seconds
    assert both == pytest.approx(tp_s + dp_s, rel=EXACT)
    assert step_s(parts) == pytest.approx(both, rel=0.005)


def test_two_degrees_on_links_of_their_own_overlap() -> None:
    """Two nodes of two: with tp outermost, gradients stay inside nodes while activations pass between them."""
    parts = parts_on("dp-tp-pp", links=links_of_four("aabb"), accelerators_per_node=2)
    assert parts.shared_tp.tolist() == [0.0]
    tp_s, dp_s = float((parts.micro_batches * parts.tp_scale_out)[0]), float(parts.dp[0])
    assert dp_s > 0.1 * tp_s > 0
    assert step_s(parts) < 0.95 * (tp_s + dp_s)


def test_two_degrees_share_the_ports_of_a_simulated_cluster() -> None:
    """Domains of one rank: every message leaves its domain through the rank's port, whichever degree it is of."""
    cluster = "switch:1:100:0/fat-tree:4:0.0001:0:leaf=4"
    parts = parts_on("tp-dp-pp", cluster=cluster, accelerators_per_node=1)
    ports_s = float((parts.micro_batches * parts.tp_scale_out + parts.dp)[0])
    assert step_s(parts) == pytest.approx(ports_s, rel=0.005)
