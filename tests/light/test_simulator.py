"""The simulated network: collectives and congestion."""

from __future__ import annotations

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.core.errors import UserError
from cclsearch.network.collectives import ALGORITHMS, Collectives, Compression
from cclsearch.network.engine import Wait, Work, simulate
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.spec import parse_cluster
from cclsearch.network.topology import TieredNetwork, drain, share_classes, share_flows
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.time import MULTIPLIERS, TimeParts, combine_time, time_parts

GBIT = 1e9 / 8
M = float(1 << 30)


def network(text: str) -> TieredNetwork:
    return TieredNetwork(parse_cluster(text))


def everyone(net: TieredNetwork) -> np.ndarray:
    return np.arange(net.num_ranks)[None]


def seconds(text: str, kind: str, algorithm: str, **how: object) -> float:
    net = network(text)
    return Collectives(net, **how).schedule(kind, everyone(net), M, algorithm).seconds  # type: ignore[arg-type]


def test_rates_are_max_min_fair_where_a_long_flow_meets_short_ones():
    """Flow 0 crosses both links; link 0 has flow 1 too, link 1 has flows 2 and 3."""
    flow, link = np.array([0, 0, 1, 2, 3]), np.array([0, 1, 0, 1, 1])
    assert share_flows(flow, link, 4, np.array([9.0, 9.0])).tolist() == pytest.approx([3, 6, 3, 3])
    assert share_classes(np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 2.0]]), np.array([9.0, 9.0])).tolist() == [3, 6, 3]


def test_no_flow_can_get_more_without_one_that_has_less_getting_less():
    rng = np.random.default_rng(1)
    for _ in range(20):
        flow = np.repeat(np.arange(30), 3)
        link = np.concatenate([rng.choice(12, 3, replace=False) for _ in range(30)])
        capacity = rng.uniform(1, 9, 12)
        rate = share_flows(flow, link, 30, capacity)
        used = np.bincount(link, weights=rate[flow], minlength=12)
        assert (used <= capacity * (1 + 1e-9)).all()
        for one in range(30):
            full = [k for k in link[flow == one] if used[k] >= capacity[k] * (1 - 1e-9)]
            assert any(rate[one] >= rate[flow[link == k]].max() * (1 - 1e-9) for k in full), "a bottleneck of its own"


def test_flows_of_equal_size_take_as_long_as_the_fullest_link():
    net = network("switch:4:100:1/fat-tree:8:50:5:leaf=8:over=4")
    rng = np.random.default_rng(2)
    source, target = rng.permutation(32), rng.permutation(32)
    routes = net.route(source, target)
    load = np.bincount(routes.link, minlength=len(net.capacity_L))
    ends = drain(routes.flow, routes.link, np.where(source == target, 0.0, 1.0), net.capacity_L)
    assert ends.max() == pytest.approx((load / net.capacity_L).max())


@pytest.mark.parametrize(
    ("text", "kind", "algorithm", "expected"),
    [
        ("switch:16:400:0", "all_reduce", "ring", 2 * 15 / 16 * M / (400 * GBIT)),
        ("switch:16:400:0", "all_reduce", "halving-doubling", 2 * 15 / 16 * M / (400 * GBIT)),
        ("switch:16:400:0", "all_reduce", "tree", 2 * M / (400 * GBIT)),
        ("switch:16:400:0", "all_gather", "ring", 15 / 16 * M / (400 * GBIT)),
        ("switch:16:400:0", "all_to_all", "direct", 15 / 16 * M / (400 * GBIT)),
        ("ring:16:400:0", "all_reduce", "ring", 2 * 15 / 16 * M / (400 * GBIT)),
        ("ring:16:400:0", "all_to_all", "direct", 16 * M / 8 / (200 * GBIT)),
        ("torus:4x4:800:0", "all_to_all", "direct", 4 * M / 8 / (200 * GBIT)),
        ("mesh:8:700:0", "all_to_all", "direct", M / 8 / (100 * GBIT)),
        ("switch:8:3200:0/switch:8:400:0", "all_reduce", "hierarchical", None),
        ("switch:4:400:0/fat-tree:8:100:0:leaf=8:over=4", "all_to_all", "direct", 8 * 24 / 32 * M / (200 * GBIT)),
    ],
)
def test_collectives_take_what_their_closed_forms_say(text, kind, algorithm, expected):
    if expected is None:  # inside 7/8 of the bytes, between 7/8 of an eighth
        expected = 2 * 7 / 8 * M / (3200 * GBIT) + 2 * 7 / 8 * M / 8 / (400 * GBIT)
    assert seconds(text, kind, algorithm) == pytest.approx(expected, rel=1e-6)


def test_pairs_that_take_turns_end_one_after_the_other():
    net = network("switch:2:400:0")
    ends = drain(np.array([0, 1]), np.array([0, 1]), np.array([1.0, 2.0]), np.array([1.0, 1.0]), np.array([-1, 0]))
    assert ends.tolist() == [1.0, 3.0]
    with pytest.raises(ValueError, match="wait for each other"):
        drain(np.array([0, 1]), np.array([0, 1]), np.ones(2), np.ones(2), np.array([1, 0]))
    both = Collectives(net).schedule("all_to_all", everyone(net), M, "direct").seconds
    assert Collectives(net).schedule("all_to_all", everyone(net), M, "turns").seconds == pytest.approx(2 * both)
    assert Collectives(net).schedule("all_to_all", everyone(net), M).algorithm == "direct", "always the faster one"


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_turns_cost_at_most_one_more_exchange(ranks):
    net = network(f"switch:{ranks}:400:0")
    direct, turns = (
        Collectives(net).schedule("all_to_all", everyone(net), M, name).seconds for name in ("direct", "turns")
    )
    assert 1.2 * direct < turns <= 2 * direct * (1 + 1e-9)


def test_latencies_add_up_along_the_steps():
    net = network("switch:16:400:3")
    found = {
        name: Collectives(net).schedule("all_reduce", everyone(net), 0.0, name).seconds
        for name in ("ring", "halving-doubling", "tree")
    }
    assert found == pytest.approx({"ring": 30 * 3e-6, "halving-doubling": 8 * 3e-6, "tree": 8 * 3e-6})


@pytest.mark.parametrize(
    "text", ["switch:4:100:1/rail:6:50:2:leaf=2:over=2", "torus:3x4x2:60:1", "mesh:3:90:1/ring:5:10:1", "ring:7:10:1"]
)
def test_every_route_leads_to_its_target_and_every_algorithm_runs(text):
    net = network(text)
    ranks = net.num_ranks
    source, target = np.divmod(np.arange(ranks * ranks), ranks)
    routes = net.route(source, target)
    passed = np.bincount(routes.flow, minlength=ranks * ranks)
    assert ((passed == 0) == (source == target)).all()
    assert routes.link.max() < len(net.capacity_L)
    collectives = Collectives(net)
    for kind in ALGORITHMS:
        found = collectives.schedule(kind, everyone(net), 1e6)
        assert found.seconds > 0, kind


def test_oversubscribed_uplinks_and_rails_change_who_is_slow():
    flat, thin = "switch:8:2400:1/fat-tree:16:200:5:leaf=16", "switch:8:2400:1/fat-tree:16:200:5:leaf=16:over=8"
    assert seconds(thin, "all_to_all", "direct") > 3 * seconds(flat, "all_to_all", "direct")
    net = network("switch:8:2400:1/rail:16:200:5:leaf=16:over=8")
    rails = np.arange(net.num_ranks).reshape(-1, 8).T.copy()
    alone = Collectives(net).schedule("all_reduce", rails, M, "ring").seconds
    assert alone == pytest.approx(2 * 15 / 16 * M / (200 * GBIT), rel=0.01), "a rail needs no uplink"


def test_compression_sends_less_and_takes_at_least_the_coding():
    plain = seconds("switch:16:400:0", "all_reduce", "ring")
    fast = seconds("switch:16:400:0", "all_reduce", "ring", compression=Compression(4.0))
    assert fast == pytest.approx(plain / 4)
    slow = seconds(
        "switch:16:400:0", "all_reduce", "ring", compression=Compression(4.0, quantize_bytes_s=1e11, code_bytes_s=2e10)
    )
    assert slow == pytest.approx(2 * M / 1e11 + 30 * M / 16 / 2e10)


def test_a_step_hides_communication_behind_computation_as_dependencies_allow():
    net = network("switch:4:400:0")
    moving = Collectives(net).schedule("all_reduce", everyone(net), M, "ring")
    hidden = [
        Work(seconds=0.01),
        Work(schedule=moving, waits=(Wait(0),)),
        Work(seconds=1.0, waits=(Wait(0),)),
    ]
    assert simulate(hidden, net.capacity_L).seconds == pytest.approx(1.01)
    shown = [*hidden[:2], Work(seconds=1.0, waits=(Wait(1, 0.5),))]
    assert simulate(shown, net.capacity_L).seconds == pytest.approx(0.01 + moving.seconds + 0.5 + 1.0)
    with pytest.raises(UserError, match="wait for each other in a circle"):
        simulate([Work(waits=(Wait(1),)), Work(waits=(Wait(0),))], net.capacity_L)


def test_a_slow_port_slows_only_the_groups_that_use_it():
    net = TieredNetwork(parse_cluster("switch:4:10:1"))
    net.capacity_L[0] /= 10  # out of rank 0

    def ring(members: list[int]) -> float:
        return Collectives(net, one_way=True).schedule("all_reduce", np.array([members]), M, "ring").seconds

    assert ring([0, 1, 2]) == pytest.approx(10 * ring([1, 2, 3]), rel=0.01)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("swich:8:1:1", "not 'swich'"),
        ("switch:8:1", "too few fields"),
        ("switch:8:0:1", "gbps"),
        ("switch:8:nan:1", "gbps"),
        ("ring:2x2:1:1", "a ring has one size"),
        ("switch:8:1:1:leaf=4", "has no leaf switches"),
        ("torus:64x64x64:1:1", "at most 65536 ranks"),
        ("switch:8:1:1:fast=1", "is not leaf=N or over=X"),
    ],
)
def test_a_wrong_cluster_is_refused_with_the_form(text, why):
    with pytest.raises(UserError, match=why) as error:
        parse_cluster(text)
    assert "KIND:SIZE:GBPS:US" in str(error.value)


def test_a_cluster_is_read_as_it_is_written():
    text = "switch:8:2400:2.5/fat-tree:64:200:8:leaf=32:over=2"
    assert parse_cluster(text).describe() == text
    wider = parse_cluster(text).with_domain(64)
    assert (wider.domain, wider.num_ranks, wider.tiers[1].size) == (64, 512, 8)


GB = 1e9
EXACT = 1e-3
"""A tenth of a percent."""


def test_a_flow_over_two_unlike_links_gets_what_the_tighter_one_leaves():
    """Links of 10 and 4; flow 0 crosses both, 1 the first, 2 the second. Rates 2, 8, 2 until second 5, then 4."""
    flow, link, capacity = np.array([0, 0, 1, 2]), np.array([0, 1, 0, 1]), np.array([10.0, 4.0])
    assert share_flows(flow, link, 3, capacity).tolist() == pytest.approx([2, 8, 2], rel=EXACT)
    assert drain(flow, link, np.array([20.0, 40.0, 10.0]), capacity).tolist() == pytest.approx([7.5, 5, 5], rel=EXACT)


def test_three_flows_of_unlike_size_end_one_after_the_other():
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


def test_cross_traffic_shares_the_uplink_of_a_fat_tree_and_leaves_the_leaf_alone():
    """Two messages over the uplink have half of it each; the third stays in its leaf and has its port."""
    tree = Leaves()
    ends = tree.ends(tree.send(0, 4, 10), tree.send(1, 5, 30), tree.send(2, 3, 10))
    assert ends == pytest.approx([2, 4, 1], rel=EXACT)


def test_cross_traffic_that_begins_later_slows_what_is_under_way():
    """The first message has 10 of 20 GB behind it when the second one comes: both have 5 GB/s until second 3."""
    tree = Leaves()
    ends = tree.ends(tree.send(0, 4, 20), tree.send(1, 5, 30, earliest_s=1.0))
    assert ends == pytest.approx([3, 5], rel=EXACT)
    assert tree.ends(tree.send(0, 4, 20), tree.send(5, 1, 30)) == pytest.approx([2, 3], rel=EXACT), "other direction"


def test_a_message_limited_by_its_port_leaves_the_rest_of_the_uplink_to_others():
    """Rank 0 sends two messages through its port, one over the uplink; rank 1 gets what those leave of the uplink."""
    tree = Leaves()
    ends = tree.ends(tree.send(0, 2, 10), tree.send(0, 4, 10), tree.send(1, 5, 10))
    assert ends == pytest.approx([2, 2, 2], rel=EXACT), "5 GB/s each"
    ends = tree.ends(tree.send(0, 2, 30), tree.send(0, 3, 30), tree.send(0, 4, 10), tree.send(1, 5, 20))
    assert ends == pytest.approx([7, 7, 3, 3], rel=EXACT), "a third of the port each, and two thirds of the uplink"


def test_a_ring_and_an_exchange_at_once_share_each_port_by_their_flows():
    """Four ranks, 10 GB of each: the ring has 1 flow at a port and takes 1.5 s alone, the exchange 3 and 0.75 s.

    The exchange has three quarters of the port: it ends at 1 s, with a quarter of a second's worth of the ring done.
    """
    net = TieredNetwork(parse_cluster("switch:4:80:0"))
    on, ranks = Collectives(net, one_way=True), np.arange(4)[None]
    ring = Work(schedule=on.schedule("all_reduce", ranks, 10 * GB, "ring"))
    exchange = Work(schedule=on.schedule("all_to_all", ranks, 10 * GB, "direct"))
    assert simulate([ring, exchange], net.capacity_L).end_s.tolist() == pytest.approx([2.25, 1.0], rel=EXACT)


def test_rings_across_leaves_share_an_uplink_and_a_ring_inside_a_leaf_does_not():
    """Two rings of two ranks over the uplink have half of it each; the third has the ports of its leaf to itself."""
    tree = Leaves()
    groups = [[0, 4]], [[1, 5]], [[2, 3]]
    work = [Work(schedule=tree.on.schedule("all_reduce", np.array(g), 10 * GB, "ring"))
            for k, g in enumerate(groups)]  # fmt: skip
    assert tree.ends(*work) == pytest.approx([2, 2, 1], rel=EXACT)
    together = tree.on.schedule("all_reduce", np.array([[0, 4], [1, 5]]), 10 * GB, "ring")
    assert together.seconds == pytest.approx(2, rel=EXACT), "the same as groups of one collective"


def test_a_collective_with_unlike_bottlenecks_is_near_what_its_flows_take_one_by_one():
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


def test_two_degrees_that_share_ports_cost_what_sharing_costs():
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


def test_two_degrees_on_links_of_their_own_overlap():
    """Two nodes of two: with tp outermost, gradients stay inside nodes while activations pass between them."""
    parts = parts_on("dp-tp-pp", links=links_of_four("aabb"), accelerators_per_node=2)
    assert parts.shared_tp.tolist() == [0.0]
    tp_s, dp_s = float((parts.micro_batches * parts.tp_scale_out)[0]), float(parts.dp[0])
    assert dp_s > 0.1 * tp_s > 0
    assert step_s(parts) < 0.95 * (tp_s + dp_s)


def test_two_degrees_share_the_ports_of_a_simulated_cluster():
    """Domains of one rank: every message leaves its domain through the rank's port, whichever degree it is of."""
    cluster = "switch:1:100:0/fat-tree:4:0.0001:0:leaf=4"
    parts = parts_on("tp-dp-pp", cluster=cluster, accelerators_per_node=1)
    ports_s = float((parts.micro_batches * parts.tp_scale_out + parts.dp)[0])
    assert step_s(parts) == pytest.approx(ports_s, rel=0.005)
