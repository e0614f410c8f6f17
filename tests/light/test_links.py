"""Links between devices: matrices, files, and predictions by them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.network.groups import slowest_chain, slowest_exchange, slowest_ring
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.placement import identity_order, improve_order
from cclsearch.network.read import read_links, read_nccl_tests, write_links
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.tasks.base import task_of
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout, read_order
from cclsearch.tasks.training.network import Mesh
from cclsearch.tasks.training.time import TimeParts, time_parts

GB = 1e9


def two_nodes(places: int = 4, *, inside: float = 800, between: float = 80, places_per_port: int = 1) -> LinkMatrix:
    """Two nodes with one endpoint each; a place has 100 GB/s inside and 10 GB/s to the other node."""
    return LinkMatrix(
        endpoints=("a", "b"),
        places=places,
        gbps=((inside, between), (between, inside)),
        latency_us=((2, 10), (10, 2)),
        places_per_port=places_per_port,
    )


def uneven() -> LinkMatrix:
    """Four endpoints of one place; every pair has 8 Gbit/s, but c and d only 1."""
    rates = np.full((4, 4), 8.0)
    rates[2, 3] = 1.0
    np.fill_diagonal(rates, 0)
    return LinkMatrix(
        endpoints=("a", "b", "c", "d"),
        gbps=tuple(map(tuple, rates.tolist())),
        latency_us=tuple(map(tuple, (5.0 * (1 - np.eye(4))).tolist())),
    )


EIGHT = [list(range(8))]
STRIDED = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("links", "groups", "ring_per_port", "gb_s"),
    [
        pytest.param(uneven(), [[0, 1, 2, 3]], False, 1 / 8, id="the slowest link of a ring decides"),
        pytest.param(uneven(), [[0, 2, 1, 3]], False, 1, id="c and d are no neighbours there"),
        pytest.param(uneven(), [[0, 1], [2, 3]], True, 1 / 8, id="of several groups the slowest decides"),
        pytest.param(uneven(), [[0, 2], [1, 3]], True, 1, id="no group has the slow link"),
        pytest.param(two_nodes(), EIGHT, True, 40, id="a ring for each port uses all ports"),
        pytest.param(two_nodes(), EIGHT, False, 10, id="one ring uses one port"),
        pytest.param(two_nodes(places_per_port=4), EIGHT, True, 10, id="a node has one port"),
        pytest.param(two_nodes(), STRIDED, True, 10, id="each group that crosses has its port"),
        pytest.param(two_nodes(places_per_port=4), STRIDED, True, 2.5, id="four groups share a port"),
        pytest.param(two_nodes(places_per_port=2), STRIDED, False, 5, id="two groups share a port"),
        pytest.param(two_nodes(places_per_port=4), [EIGHT[0][:4], EIGHT[0][4:]], True, 100, id="inside nodes"),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link_and_groups_share_ports(links, groups, ring_per_port, gb_s):
    ring = slowest_ring(links, np.array(groups), ring_per_port=ring_per_port)
    is_inside = gb_s == 100
    assert (ring.bytes_s, ring.crosses) == (gb_s * GB, not is_inside)
    assert ring.latency_s == pytest.approx(2e-6 if is_inside else 5e-6 if links == uneven() else 10e-6)


def test_chains_pass_only_their_own_links():
    assert slowest_chain(uneven(), np.array([[2, 0, 1, 3]])).bytes_s == GB  # a ring would close over c and d
    assert slowest_ring(uneven(), np.array([[2, 0, 1, 3]]), ring_per_port=False).bytes_s == GB / 8


def test_an_exchange_spends_time_on_every_pair():
    link = slowest_exchange(uneven(), np.array([[0, 1, 2, 3]]))
    assert link.bytes_s == pytest.approx(3 / (1 / 1 + 1 / 1 + 8 / 1) * GB)  # c sends a third over the slow link
    shared = slowest_exchange(two_nodes(places=2, places_per_port=2), np.array([[0, 1, 2, 3]]))
    assert shared.bytes_s == pytest.approx(3 / (1 / 100 + 2 * 2 / 10) * GB)


def test_a_written_matrix_is_read_the_same(tmp_path):
    for links in (uneven(), two_nodes(places_per_port=2).model_copy(update={"source": "made up"})):
        path = tmp_path / "links.csv"
        path.write_text(write_links(links))
        assert read_links(path) == links


def test_a_changed_matrix_has_its_own_figures_also_after_the_first_was_used():
    links, ring = uneven(), np.array([[0, 1, 2]])
    assert slowest_ring(links, ring, ring_per_port=False).bytes_s == GB
    halved = links.changed(gbps=[[rate / 2 for rate in row] for row in links.gbps])
    assert slowest_ring(halved, ring, ring_per_port=False).bytes_s == GB / 2


def test_units_are_converted_by_the_name_of_the_column(tmp_path):
    path = tmp_path / "links.csv"
    path.write_text("src,dst,GB_s,latency_ms\na,b,2,0.5\nb,a,1,0.25\n")
    assert read_links(path).gbps == ((0.0, 16.0), (8.0, 0.0))
    path.write_text("MB_s,a,b\na,,1000\nb,500,\nlatency_us,a,b\na,,3\nb,4,\n")
    square = read_links(path)
    assert (square.gbps, square.latency_us) == (((0.0, 8.0), (4.0, 0.0)), ((0.0, 3.0), (4.0, 0.0)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ("src,dst,gbps\na,b,1\n", "no column of latency; name it by its unit: latency_us"),
        ("src,dst,latency_us\na,b,1\n", "no column of bandwidth"),
        ("src,dst,gbps,GB_s,latency_us\na,b,1,2,3\n", "mixes units of bandwidth: it has the columns gbps and GB_s"),
        ("src,dst,gbps,latency_us\na,b,1 GB/s,3\n", "row 2: gbps must be a number without a unit, not '1 GB/s'"),
        ("src,dst,gbps,latency_us\na,b,1,3\n", "the bandwidth from 'b' to 'a' is missing"),
        ("src,dst,gbps,latency_us\na,b,1,3\nb,a,-1,3\n", "gbps from 'b' to 'a' must be above 0, not -1"),
        ("src,dst,gbps,latency_us\na,b,1,3\nb,a,nan,3\n", "gbps must be a number without a unit, not 'nan'"),
        ("src,dst,gbps,latency_us\na,b,1,-3\nb,a,1,3\n", "latency_us from 'a' to 'b' must be 0 or more, not -3"),
        ("src,dst,gbps,latency_us\na,b,1,3\na,b,1,3\n", "row 3 gives the pair 'a' to 'b' a second time"),
        ("src,dst,gbps,latency_us\na,b,1\n", "row 2 has 3 cells, but the header has 4"),
        ("from,dst,gbps,latency_us\na,b,1,3\n", "no column 'src'"),
        ("gbps,a,b\na,,1\nlatency_us,a,b\na,,1\nb,1,\n", "the table of gbps is not square: 2 columns, 1 rows"),
        ("gbps,a,b\na,,1\nb,1,\nGB_s,a,b\na,,1\nb,1,\n", "two tables of bandwidths"),
        ("gbps,a,b\nb,1,\na,,1\n", "in the order of its columns; 'b' is not"),
        ("gbps,a,b\na,,1\nb,1,\n", "no table of latencies"),
        ("# places: 2\nsrc,dst,gbps,latency_us\na,b,1,3\nb,a,1,3\n", "from 'a' to 'a' is missing, and 1 other pairs"),
        ("# places: x\nsrc,dst,gbps,latency_us\na,b,1,3\nb,a,1,3\n", "places"),
        (
            "src,dst,gbps,latency_us,src_node,dst_node\na,b,1,3,n,n\nb,a,1,3,m,n\n",
            "row 3 puts 'b' on 'm', an earlier one elsewhere",
        ),
    ],
)
def test_a_bad_matrix_is_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "links.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_links(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


NCCL = """# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid  15784 on  {a} device  0 [0009:01:00] NVIDIA GH200 120GB
#  Rank  1 Group  0 Pid  24926 on  {b} device  0 [0009:01:00] NVIDIA GH200 120GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    18.60    0.00    0.00       0    18.67    0.00    0.00       0
   134217728      33554432     float     sum      -1  5871.07   {rate}   {rate}       0  5871.07   22.86   22.86       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 11.4
"""


def test_outputs_of_nccl_tests_make_a_matrix(tmp_path):
    paths = []
    for a, b, rate in (("n1", "n2", "22.86"), ("n1", "n3", "22.5"), ("n2", "n3", "2.5")):
        paths.append(tmp_path / f"{a}-{b}.txt")
        paths[-1].write_text(NCCL.format(a=a, b=b, rate=rate))
    links = read_nccl_tests(paths)
    assert links.endpoints == ("n1:0", "n2:0", "n3:0")
    assert links.nodes == ("n1", "n2", "n3")
    assert links.gbps[0][1] == pytest.approx(8 * 22.86)
    assert links.gbps[2][1] == pytest.approx(20)
    assert links.latency_us[0][1] == 18.6
    with pytest.raises(UserError, match=r"from 'n1:0' to 'n3:0' is missing"):
        read_nccl_tests([paths[0], paths[2]])


def test_what_is_not_an_output_of_nccl_tests_is_refused(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("nothing\n")
    with pytest.raises(UserError, match="lists 0 ranks"):
        read_nccl_tests([path])
    path.write_text("\n".join(NCCL.format(a="x", b="y", rate="1").splitlines()[:9]))
    with pytest.raises(UserError, match="no row with a bus bandwidth above 0"):
        read_nccl_tests([path])


def matrix(rates: np.ndarray, places: int = 1) -> LinkMatrix:
    names = tuple(f"n{k}" for k in range(len(rates)))
    return LinkMatrix(
        endpoints=names,
        places=places,
        gbps=tuple(map(tuple, rates.tolist())),
        latency_us=tuple((3.0,) * len(rates) for _ in rates),
    )


def nodes(num: int, *, slow: tuple[int, int] | None = None, per_node: int = 8) -> LinkMatrix:
    """Nodes of H100: 2400 Gbit/s inside, 200 between places of different nodes, 20 between the two of `slow`."""
    rates = np.full((num, num), 200.0)
    np.fill_diagonal(rates, 2400.0)
    if slow is not None:
        rates[slow], rates[slow[::-1]] = 20.0, 20.0
    return matrix(rates, per_node)


def with_links(card: Card, links: LinkMatrix | None, ranks: int) -> Card:
    update = {"links": links, "num_accelerators": ranks, "accelerators_per_node": 8}
    return card.model_copy(update={"hardware": card.hardware.model_copy(update=update)})


def row_of(**knobs: object) -> dict[str, object]:
    return {"cp": 1, "micro_batch_size": 1, **knobs}


def space_of(rows: list[dict[str, object]]) -> Space:
    names = list(rows[0])
    knobs = [Knob(name, tuple(sorted({row[name] for row in rows}, key=str))) for name in names]  # type: ignore[misc]
    return space_from_rows(knobs, rows)  # type: ignore[arg-type]


def parts_of(links: LinkMatrix | None, *rows: dict[str, object], ranks: int = 32) -> TimeParts:
    card = with_links(load_card("wl2"), links, ranks)
    return time_parts(card, read_layout(card, space_of(list(rows))), read_machine(card))


def test_a_uniform_matrix_agrees_with_the_two_bandwidths():
    """The card has 300 GB/s inside a node and 25 between: the same figures as a matrix."""
    rows = [row_of(tp=8, dp=4, pp=1), row_of(tp=4, dp=4, pp=2)]
    plain, measured = parts_of(None, *rows), parts_of(nodes(4), *rows)
    assert measured.dp == pytest.approx(plain.dp, rel=0.05)
    assert measured.tp_scale_up == pytest.approx(plain.tp_scale_up)
    assert measured.p2p == pytest.approx(plain.p2p)


def test_only_groups_on_the_slow_link_pay_for_it():
    row = row_of(tp=8, dp=4, pp=1)
    fast, slow = parts_of(nodes(4), row), parts_of(nodes(4, slow=(1, 2)), row)
    assert slow.dp[0] == pytest.approx(10 * fast.dp[0], rel=0.02)  # the ring passes from node 1 to node 2
    assert slow.tp_scale_up[0] == fast.tp_scale_up[0]
    apart = parts_of(nodes(4, slow=(0, 2)), row)
    assert apart.dp[0] == fast.dp[0]  # nodes 0 and 2 are no neighbours in the ring
    staged = row_of(tp=8, dp=2, pp=2)  # gradients in nodes 0, 1 and 2, 3; stages 0-2, 1-3
    assert parts_of(nodes(4, slow=(1, 2)), staged).p2p[0] == parts_of(nodes(4), staged).p2p[0]
    assert parts_of(nodes(4, slow=(0, 2)), staged).p2p[0] == pytest.approx(10 * parts_of(nodes(4), staged).p2p[0])


def test_the_order_of_the_degrees_decides_what_crosses_nodes():
    inner, outer = (
        parts_of(nodes(4), row_of(tp=8, dp=1, pp=4, rank_order=order)) for order in ("tp-dp-pp", "pp-tp-dp")
    )
    assert inner.tp_scale_out[0] == 0 < outer.tp_scale_out[0]
    assert inner.p2p[0] > outer.p2p[0]


def test_the_host_order_avoids_a_slow_link():
    rows = [row_of(tp=8, dp=4, pp=1, host_order=order) for order in ("given", "links")]
    parts = parts_of(nodes(4, slow=(1, 2)), *rows)
    fast = parts_of(nodes(4), rows[0])
    assert sorted(parts.dp / fast.dp[0]) == [pytest.approx(1.0), pytest.approx(10.0, rel=0.02)]


def test_a_trial_gets_the_places_that_its_host_order_asks_for():
    card = with_links(load_card("wl2"), nodes(4, slow=(1, 2)), 32)
    task, knobs = task_of(card), {"tp": 8, "dp": 4, "pp": 1, "micro_batch_size": 1}

    def places(order: str) -> tuple[int, ...]:
        config = Config({**knobs, "host_order": order})
        return task.make_input(card, config, is_measured=True, run_id="r", trial=1).places

    assert places("given") == ()
    hosts = [place // 8 for place in places("links")[::8]]
    assert sorted(places("links")) == list(range(32))
    assert abs(hosts.index(1) - hosts.index(2)) == 2  # opposite in the ring of four


def test_an_improved_order_is_never_worse_and_finds_the_best_of_small_cases():
    rng = np.random.default_rng(3)
    for _ in range(20):
        rates = rng.uniform(1, 100, (6, 6))

        def cost(order: Sequence[int], rates: np.ndarray = rates) -> float:
            return float(sum(1 / min(rates[a, b], rates[b, a]) for a, b in pairwise(order)))

        start = identity_order(matrix(rates))
        found = cost(improve_order(start, cost))
        assert found <= cost(start)
        assert found <= 1.35 * min(map(cost, permutations(start)))


@pytest.mark.parametrize(
    ("choice", "order"),
    [
        ("tp-dp-pp", ("tp", "cp", "dp", "pp")),
        ("tp-cp-ep-pp-dp", ("tp", "cp", "pp", "dp")),
        ("pp-tp-dp", ("pp", "tp", "cp", "dp")),
        ("dp-pp-tp", ("dp", "pp", "tp", "cp")),
    ],
)
def test_an_order_names_the_innermost_degree_first(choice, order):
    assert read_order(choice) == order


def test_groups_of_a_mesh_are_those_of_megatron():
    """The example in megatron/core/parallel_state.py, initialize_model_parallel: 16 ranks, tp 2, pp 4."""
    mesh = Mesh((("tp", 2), ("cp", 1), ("dp_shard", 2), ("dp_replicate", 1), ("pp", 4)))
    assert mesh.groups("dp_shard").tolist()[:2] == [[0, 2], [1, 3]]
    assert mesh.groups("tp").tolist()[:2] == [[0, 1], [2, 3]]
    assert mesh.groups("pp").tolist()[0] == [0, 4, 8, 12]
    experts = Mesh((("tp", 2), ("cp", 1), ("dp_shard", 4), ("dp_replicate", 1), ("pp", 1)), ep=4)
    assert [groups.tolist() for groups in experts.expert_groups()] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ]


def test_predict_uses_the_matrix_beside_the_profile(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "launchers"
    folder.mkdir()
    (folder / "site.yaml").write_text("launcher: local\nhardware: {accelerators_per_node: 8}\n")
    command = ["predict", "--workload", "wl2", "--launcher", "site", "--config", "tp=8,dp=2,pp=1", "--top", "1"]
    assert "measured links" not in cli.out(command)
    (folder / "site.links.csv").write_text(write_links(nodes(2)))
    assert "measured links instead of two bandwidths: 2 endpoints on 2 nodes, 16 places" in cli.out(command)
    (folder / "site.links.csv").write_text(write_links(nodes(1)))
    assert "the links of profile site have 8 places, but there are 16 accelerators" in cli.err(command)
    (folder / "site.links.csv").write_text("src,dst,gbps,latency_us\na,b,1,2\n")
    assert "from 'b' to 'a' is missing" in cli.err(command)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, as the working directory, with a profile of 32 accelerators and no measured links."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launchers").mkdir()
    (tmp_path / "launchers" / "site.yaml").write_text(
        "launcher: slurm\nhardware: {num_accelerators: 32, accelerators_per_node: 8}\n"
    )
    return tmp_path


def test_place_writes_the_host_of_each_rank(site, cli):
    place = ["links", "place", "--launcher", "site", "-w", "wl2", "--config", "tp=8,dp=4,pp=1,micro_batch_size=1"]
    assert "profile site has no measured links" in cli.err(place)
    (site / "launchers" / "site.links.csv").write_text(write_links(nodes(4, slow=(1, 2))))
    out = cli.out([*place, "--write", "hosts"])
    hosts = (site / "hosts").read_text().splitlines()
    assert sorted(hosts) == sorted(f"n{k}" for k in range(4) for _ in range(8))
    order = list(dict.fromkeys(hosts))
    assert abs(order.index("n1") - order.index("n2")) == 2
    assert "SLURM_HOSTFILE=hosts srun --distribution=arbitrary --ntasks=32" in out
    given, found, *_ = (float(line.split()[0]) for line in out.splitlines() if "(predicted)" in line)
    assert found < given
    assert "only for `place` and `what-if`" in cli.err(["links", "show", "--launcher", "site", "--config", "tp=8"])


def test_what_if_says_what_mending_a_slow_link_brings(site, cli):
    ask = ["links", "what-if", "--launcher", "site", "-w", "wl2", "--config", "tp=8,dp=4,pp=1,micro_batch_size=1"]

    def answer(links: LinkMatrix) -> dict[str, float]:
        (site / "launchers" / "site.links.csv").write_text(write_links(links))
        asked = cli.json([*ask, "--json"])
        assert asked["provenance"] == "predicted"
        return {each["links"]: each["value"] for each in asked["links"]}

    assert "profile site has no measured links" in cli.err(ask)
    seconds = answer(nodes(4, slow=(1, 2)))
    repaired = seconds["n1 and n2 (the slowest) as fast as the median"]
    assert repaired < seconds["as measured"] / 1.2
    assert repaired == pytest.approx(seconds["no link slower than the median"]), "only one pair was slow"
    assert seconds["links inside nodes twice as fast"] < seconds["as measured"]
    assert answer(nodes(4))["as measured"] == pytest.approx(repaired)
    assert "predicted, before calibration by trials" in cli.out(ask)
