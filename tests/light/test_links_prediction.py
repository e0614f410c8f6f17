"""Predictions with measured links: groups on slow links cost what their slowest link costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.placement import identity_order, improve_order
from cclsearch.network.read import write_links
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.tasks.base import task_of
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout, read_order
from cclsearch.tasks.training.network import Mesh
from cclsearch.tasks.training.time import TimeParts, time_parts


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


def test_a_uniform_matrix_agrees_with_the_two_bandwidths() -> None:
    """The card has 300 GB/s inside a node and 25 between: the same figures as a matrix."""
    rows = [row_of(tp=8, dp=4, pp=1), row_of(tp=4, dp=4, pp=2)]
    plain, measured = parts_of(None, *rows), parts_of(nodes(4), *rows)
    assert measured.dp == pytest.approx(plain.dp, rel=0.05)
    assert measured.tp_scale_up == pytest.approx(plain.tp_scale_up)
    assert measured.p2p == pytest.approx(plain.p2p)


def test_only_groups_on_the_slow_link_pay_for_it() -> None:
    row = row_of(tp=8, dp=4, pp=1)
    fast, slow = parts_of(nodes(4), row), parts_of(nodes(4, slow=(1, 2)), row)
    assert slow.dp[0] == pytest.approx(10 * fast.dp[0], rel=0.02)  # the ring passes from node 1 to node 2
    assert slow.tp_scale_up[0] == fast.tp_scale_up[0]
    apart = parts_of(nodes(4, slow=(0, 2)), row)
    assert apart.dp[0] == fast.dp[0]  # nodes 0 and 2 are no neighbours in the ring
    staged = row_of(tp=8, dp=2, pp=2)  # gradients in nodes 0, 1 and 2, 3; stages 0-2, 1-3
    assert parts_of(nodes(4, slow=(1, 2)), staged).p2p[0] == parts_of(nodes(4), staged).p2p[0]
    assert parts_of(nodes(4, slow=(0, 2)), staged).p2p[0] == pytest.approx(10 * parts_of(nodes(4), staged).p2p[0])


def test_the_order_of_the_degrees_decides_what_crosses_nodes() -> None:
    rows = [row_of(tp=8, dp=1, pp=4, rank_order=order) for order in ("tp-dp-pp", "pp-tp-dp")]
    layout_rows = space_of(rows)
    parts = parts_of(nodes(4), *rows)
    at = [int(layout_rows.matching({"rank_order": row["rank_order"]}).nonzero()[0][0]) for row in rows]  # type: ignore[dict-item]
    assert parts.tp_scale_out[at[0]] == 0 < parts.tp_scale_out[at[1]]
    assert parts.p2p[at[0]] > parts.p2p[at[1]]


def test_the_host_order_avoids_a_slow_link() -> None:
    rows = [row_of(tp=8, dp=4, pp=1, host_order=order) for order in ("given", "links")]
    parts = parts_of(nodes(4, slow=(1, 2)), *rows)
    fast = parts_of(nodes(4), rows[0])
    assert sorted(parts.dp / fast.dp[0]) == [pytest.approx(1.0), pytest.approx(10.0, rel=0.02)]


def test_a_trial_gets_the_places_that_its_host_order_asks_for() -> None:
    card = with_links(load_card("wl2"), nodes(4, slow=(1, 2)), 32)
    task, knobs = task_of(card), {"tp": 8, "dp": 4, "pp": 1, "micro_batch_size": 1}

    def places(order: str) -> tuple[int, ...]:
        config = Config({**knobs, "host_order": order})
        return task.make_input(card, config, is_measured=True, run_id="r", trial=1).places

    assert places("given") == ()
    hosts = [place // 8 for place in places("links")[::8]]
    assert sorted(places("links")) == list(range(32))
    assert abs(hosts.index(1) - hosts.index(2)) == 2  # opposite in the ring of four


def test_an_improved_order_is_never_worse_and_finds_the_best_of_small_cases() -> None:
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
def test_an_order_names_the_innermost_degree_first(choice: str, order: tuple[str, ...]) -> None:
    assert read_order(choice) == order


def test_groups_of_a_mesh_are_those_of_megatron() -> None:
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


def test_predict_uses_the_matrix_beside_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli) -> None:
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


def test_place_writes_the_host_of_each_rank(site: Path, cli) -> None:
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
    assert "`place` and `what-if` do" in cli.err(["links", "show", "--launcher", "site", "--config", "tp=8"])


def test_what_if_says_what_mending_a_slow_link_brings(site: Path, cli) -> None:
    ask = ["links", "what-if", "--launcher", "site", "-w", "wl2", "--config", "tp=8,dp=4,pp=1,micro_batch_size=1"]
    assert "profile site has no measured links" in cli.err(ask)
    (site / "launchers" / "site.links.csv").write_text(write_links(nodes(4, slow=(1, 2))))
    asked = cli.json([*ask, "--json"])
    assert asked["provenance"] == "predicted"
    seconds = {each["links"]: each["value"] for each in asked["links"]}
    measured = seconds["as measured"]
    repaired = seconds["n1 and n2 (the slowest) as fast as the median"]
    assert repaired < measured / 1.2
    assert repaired == pytest.approx(seconds["no link slower than the median"]), "only one pair was slow"
    assert seconds["links inside nodes twice as fast"] < measured
    (site / "launchers" / "site.links.csv").write_text(write_links(nodes(4)))
    whole = {each["links"]: each["value"] for each in cli.json([*ask, "--json"])["links"]}
    assert whole["as measured"] == pytest.approx(repaired)
    assert "predicted, before calibration by trials" in cli.out(ask[:-2])
