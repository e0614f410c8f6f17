"""The simulated network: routes, shared links, collectives against closed forms, and steps on it."""

from __future__ import annotations

import numpy as np
import pytest

from cclsearch.core.errors import UserError
from cclsearch.network.collectives import ALGORITHMS, Collectives, Compression
from cclsearch.network.engine import Wait, Work, simulate
from cclsearch.network.sharing import drain, share_classes, share_flows
from cclsearch.network.spec import parse_cluster
from cclsearch.network.topology import TieredNetwork

GBIT = 1e9 / 8
M = float(1 << 30)


def network(text: str) -> TieredNetwork:
    return TieredNetwork(parse_cluster(text))


def everyone(net: TieredNetwork) -> np.ndarray:
    return np.arange(net.num_ranks)[None]


def seconds(text: str, kind: str, algorithm: str, **how: object) -> float:
    net = network(text)
    return Collectives(net, **how).schedule(kind, everyone(net), M, algorithm).seconds  # type: ignore[arg-type]


def test_rates_are_max_min_fair_where_a_long_flow_meets_short_ones() -> None:
    """Flow 0 crosses both links; link 0 has flow 1 too, link 1 has flows 2 and 3."""
    flow, link = np.array([0, 0, 1, 2, 3]), np.array([0, 1, 0, 1, 1])
    assert share_flows(flow, link, 4, np.array([9.0, 9.0])).tolist() == pytest.approx([3, 6, 3, 3])
    assert share_classes(np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 2.0]]), np.array([9.0, 9.0])).tolist() == [3, 6, 3]


def test_no_flow_can_get_more_without_one_that_has_less_getting_less() -> None:
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


def test_rates_grow_when_other_flows_have_ended() -> None:
    flow, link = np.array([0, 1]), np.array([0, 0])
    assert drain(flow, link, np.array([1.0, 3.0]), np.array([2.0])).tolist() == pytest.approx([1, 2])


def test_flows_of_equal_size_take_as_long_as_the_fullest_link() -> None:
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
def test_collectives_take_what_their_closed_forms_say(
    text: str, kind: str, algorithm: str, expected: float | None
) -> None:
    if expected is None:  # inside 7/8 of the bytes, between 7/8 of an eighth
        expected = 2 * 7 / 8 * M / (3200 * GBIT) + 2 * 7 / 8 * M / 8 / (400 * GBIT)
    assert seconds(text, kind, algorithm) == pytest.approx(expected, rel=1e-6)


def test_pairs_that_take_turns_end_one_after_the_other() -> None:
    net = network("switch:2:400:0")
    ends = drain(np.array([0, 1]), np.array([0, 1]), np.array([1.0, 2.0]), np.array([1.0, 1.0]), np.array([-1, 0]))
    assert ends.tolist() == [1.0, 3.0]
    with pytest.raises(ValueError, match="wait for each other"):
        drain(np.array([0, 1]), np.array([0, 1]), np.ones(2), np.ones(2), np.array([1, 0]))
    both = Collectives(net).schedule("all_to_all", everyone(net), M, "direct").seconds
    assert Collectives(net).schedule("all_to_all", everyone(net), M, "turns").seconds == pytest.approx(2 * both)
    assert Collectives(net).schedule("all_to_all", everyone(net), M).algorithm == "direct", "always the faster one"


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_turns_cost_at_most_one_more_exchange(ranks: int) -> None:
    net = network(f"switch:{ranks}:400:0")
    direct, turns = (
        Collectives(net).schedule("all_to_all", everyone(net), M, name).seconds for name in ("direct", "turns")
    )
    assert 1.2 * direct < turns <= 2 * direct * (1 + 1e-9)


def test_latencies_add_up_along_the_steps() -> None:
    net = network("switch:16:400:3")
    found = {
        name: Collectives(net).schedule("all_reduce", everyone(net), 0.0, name).seconds
        for name in ("ring", "halving-doubling", "tree")
    }
    assert found == pytest.approx({"ring": 30 * 3e-6, "halving-doubling": 8 * 3e-6, "tree": 8 * 3e-6})


@pytest.mark.parametrize(
    "text", ["switch:4:100:1/rail:6:50:2:leaf=2:over=2", "torus:3x4x2:60:1", "mesh:3:90:1/ring:5:10:1", "ring:7:10:1"]
)
def test_every_route_leads_to_its_target_and_every_algorithm_runs(text: str) -> None:
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


def test_oversubscribed_uplinks_and_rails_change_who_is_slow() -> None:
    flat, thin = "switch:8:2400:1/fat-tree:16:200:5:leaf=16", "switch:8:2400:1/fat-tree:16:200:5:leaf=16:over=8"
    assert seconds(thin, "all_to_all", "direct") > 3 * seconds(flat, "all_to_all", "direct")
    net = network("switch:8:2400:1/rail:16:200:5:leaf=16:over=8")
    rails = np.arange(net.num_ranks).reshape(-1, 8).T.copy()
    alone = Collectives(net).schedule("all_reduce", rails, M, "ring").seconds
    assert alone == pytest.approx(2 * 15 / 16 * M / (200 * GBIT), rel=0.01), "a rail needs no uplink"


def test_compression_sends_less_and_takes_at_least_the_coding() -> None:
    plain = seconds("switch:16:400:0", "all_reduce", "ring")
    fast = seconds("switch:16:400:0", "all_reduce", "ring", compression=Compression(4.0))
    assert fast == pytest.approx(plain / 4)
    slow = seconds(
        "switch:16:400:0", "all_reduce", "ring", compression=Compression(4.0, quantize_bytes_s=1e11, code_bytes_s=2e10)
    )
    assert slow == pytest.approx(2 * M / 1e11 + 30 * M / 16 / 2e10)


def test_two_collectives_share_a_link_only_while_both_run() -> None:
    net = network("switch:4:400:0")
    collectives = Collectives(net)
    one = collectives.schedule("all_reduce", everyone(net), M, "ring")
    half = collectives.schedule("all_reduce", everyone(net), M / 2, "ring")
    run = simulate([Work(schedule=one), Work(schedule=half)], net.capacity_L)
    assert run.end_s.tolist() == pytest.approx([1.5 * one.seconds, one.seconds])
    inner = collectives.schedule("all_reduce", np.array([[0, 1]]), M, "ring")
    other = collectives.schedule("all_reduce", np.array([[2, 3]]), M, "ring")
    run = simulate([Work(schedule=inner), Work(schedule=other)], net.capacity_L)
    assert run.seconds == pytest.approx(inner.seconds)


def test_a_step_hides_communication_behind_computation_as_dependencies_allow() -> None:
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


def test_a_slow_port_slows_only_the_groups_that_use_it() -> None:
    net = TieredNetwork(parse_cluster("switch:4:10:1"))
    net.capacity_L[0] /= 10  # out of rank 0

    def ring(members: list[int]) -> float:
        return Collectives(net, one_way=True).schedule("all_reduce", np.array([members]), M, "ring").seconds

    assert ring([0, 1, 2]) == pytest.approx(10 * ring([1, 2, 3]), rel=0.01)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("swich:8:1:1", "'swich' is not one of"),
        ("switch:8:1", "too few fields"),
        ("switch:8:0:1", "gbps"),
        ("switch:8:nan:1", "gbps"),
        ("ring:2x2:1:1", "a ring has one size"),
        ("switch:8:1:1:leaf=4", "has no leaf switches"),
        ("torus:64x64x64:1:1", "at most 65536 ranks"),
        ("switch:8:1:1:fast=1", "is not leaf=N or over=X"),
    ],
)
def test_a_wrong_cluster_is_refused_with_the_form(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as error:
        parse_cluster(text)
    assert "KIND:SIZE:GBPS:US" in str(error.value)


def test_a_cluster_is_read_as_it_is_written() -> None:
    text = "switch:8:2400:2.5/fat-tree:64:200:8:leaf=32:over=2"
    assert parse_cluster(text).describe() == text
    wider = parse_cluster(text).with_domain(64)
    assert (wider.domain, wider.num_ranks, wider.tiers[1].size) == (64, 512, 8)
