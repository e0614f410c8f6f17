"""Placement of ranks: orders of degrees, nodes and devices, searched together, and how launchers carry them out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.launch.base import Job, refuse_places
from cclsearch.launch.contract import TrialInput, trial_environment
from cclsearch.network.groups import slowest_exchange, slowest_ring
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.read import read_links, write_links
from cclsearch.report.launch_form import make_launch
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.base import task_of
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.time import MULTIPLIERS, combine_time, time_parts

NVLINKS = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
"""NVLinks between the GPUs of a DGX-1 with V100, as `nvidia-smi topo -m` prints them (NV1, NV2, SYS)."""
COMMON = ROOT / "launchers"


def dgx1(nodes: int = 1) -> LinkMatrix:
    """Return DGX-1: 25 GB/s for each NVLink, 10 GB/s through the host, 12 GB/s between nodes."""
    inside = np.array(NVLINKS) * 200.0
    inside[inside == 0] = 80.0
    rates = np.full((8 * nodes, 8 * nodes), 96.0)
    for node in range(nodes):
        rates[8 * node : 8 * node + 8, 8 * node : 8 * node + 8] = inside
    np.fill_diagonal(rates, 0.0)
    return LinkMatrix(
        endpoints=tuple(f"n{k // 8}:{k % 8}" for k in range(8 * nodes)),
        nodes=tuple(f"n{k // 8}" for k in range(8 * nodes)),
        gbps=tuple(map(tuple, rates.tolist())),
        latency_us=tuple((3.0,) * (8 * nodes) for _ in range(8 * nodes)),
    )


def zones(per_node: int = 4) -> LinkMatrix:
    """Return eight nodes that alternate between two zones: 100 Gbit/s inside a zone, 1 between."""
    rates = np.where(np.add.outer(np.arange(8), np.arange(8)) % 2 == 0, 100.0, 1.0)
    np.fill_diagonal(rates, 1000.0)
    return LinkMatrix(
        endpoints=tuple(f"n{k}" for k in range(8)),
        places=per_node,
        places_per_port=per_node,
        gbps=tuple(map(tuple, rates.tolist())),
        latency_us=tuple((3.0,) * 8 for _ in range(8)),
    )


def with_links(links: LinkMatrix, ranks: int, per_node: int) -> Card:
    card = load_card("wl2")
    update = {"links": links, "num_accelerators": ranks, "accelerators_per_node": per_node}
    return card.model_copy(update={"hardware": card.hardware.model_copy(update=update)})


def seconds(card: Card, **knobs: object) -> float:
    row = {"micro_batch_size": 1, **knobs}
    found = predict_space(card, space_from_rows([Knob(name, (value,)) for name, value in row.items()], [row]))  # type: ignore[arg-type,list-item]
    return float(found.value_N[0])


def input_of(card: Card, **knobs: object) -> TrialInput:
    config = Config({"micro_batch_size": 1, **knobs})  # type: ignore[arg-type]
    return task_of(card).make_input(card, config, is_measured=True, run_id="r", trial=1)


def test_nccl_finds_the_ring_of_a_dgx_1_and_gloo_keeps_the_order_of_the_ranks():
    """NCCL prints the ring 0 3 2 1 5 6 7 4 there: every pair has two NVLinks."""
    group = np.arange(8)[None]
    assert slowest_ring(dgx1(), group, ring_per_port=True).bytes_s == 50e9
    assert slowest_ring(dgx1(), group, ring_per_port=False).bytes_s == 10e9
    ring = np.array([[0, 3, 2, 1, 5, 6, 7, 4]])
    assert slowest_ring(dgx1(), ring, ring_per_port=False).bytes_s == 50e9


def test_a_port_that_one_pair_cannot_fill_passes_more_of_several(tmp_path):
    """Two nodes of 8: a pair alone has 8 GB/s, all of a node together 47, as Galvatron's all-reduce of 16 ranks."""
    links = LinkMatrix(
        endpoints=("a", "b"), places=8, gbps=((1300, 64), (64, 1300)), latency_us=((3, 9), (9, 3)), places_per_port=8,
        port_gbps=47 * 8,
    )  # fmt: skip
    ranks = np.arange(16)

    def rate(groups: np.ndarray) -> float:
        return slowest_ring(links, groups, ring_per_port=True).bytes_s / 1e9

    assert rate(ranks[None]) == pytest.approx(47)
    assert rate(ranks.reshape(2, 8).T[:1]) == pytest.approx(8)
    assert rate(ranks[::4][None]) == pytest.approx(16)
    assert rate(ranks.reshape(2, 8).T) == pytest.approx(47 / 8)
    assert slowest_ring(links, ranks[None], ring_per_port=False).bytes_s == pytest.approx(8e9)
    (tmp_path / "links.csv").write_text(write_links(links))
    assert read_links(tmp_path / "links.csv").port_gbps == 376
    assert slowest_exchange(links, ranks[None]).bytes_s < 15 / 8 * 47e9 / 8


class FakeLinks:
    """Two nodes of four: a pair alone has 8 bytes per second, four at once what is said."""

    names, nodes, backend = [f"r{k}" for k in range(8)], ["a"] * 4 + ["b"] * 4, "fake"

    def __init__(self, together: float) -> None:
        self.together = together

    def measure(self, pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
        return (8.0 if len(pairs) == 1 else self.together), 1e-6

    def reduce_together(self, size: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("together", "sharers", "port"), [(8.0, 1, None), (4.0, 2, None), (2.1, 4, None), (5.5, 4, 22.0)]
)
def test_the_probe_tells_shared_ports_from_those_that_one_rank_cannot_fill(together, sharers, port, monkeypatch):
    monkeypatch.syspath_prepend(str(COMMON))
    import links_matrix

    found = links_matrix.measure_all(FakeLinks(together), 32)
    assert found["places_per_port"] == sharers
    assert found.get("port_bytes_s") == port


def test_devices_are_paired_where_two_links_join_them():
    card = with_links(dgx1(), 8, 8)
    config = {"tp": 2, "dp": 4, "pp": 1}
    devices = input_of(card, **config, device_order="links").devices
    assert sorted(devices) == list(range(8))
    assert {NVLINKS[a][b] for a, b in zip(devices[::2], devices[1::2], strict=True)} == {2}
    assert seconds(card, **config, device_order="links") < seconds(card, **config, device_order="given")


def test_fewer_ranks_than_devices_take_those_that_are_joined_best():
    devices = input_of(with_links(dgx1(), 2, 8), tp=2, dp=1, pp=1, device_order="links").devices
    assert len(devices) == 2
    assert NVLINKS[devices[0]][devices[1]] == 2


def test_ranks_placed_one_by_one_reach_what_the_best_order_of_the_degrees_does():
    """Two regions, tp 4, dp 8: the default crosses between them in its ring of gradients."""
    card = with_links(zones(), 32, 4)
    config = {"tp": 4, "dp": 8, "pp": 1}
    orders = [seconds(card, **config, rank_order=order, host_order="links") for order in ("tp-dp-pp", "dp-tp-pp")]
    placed = seconds(card, **config, host_order="ranks")
    assert placed == pytest.approx(min(orders))
    assert placed < seconds(card, **config, host_order="links") / 1.3
    payload = input_of(card, **config, host_order="ranks")
    assert sorted(payload.places) == list(range(32))
    assert payload.moves_nodes
    for node in range(8):  # schedulers number the ranks of a node upwards
        mine = [place for place in payload.places if place // 4 == node]
        assert mine == sorted(mine)


def test_what_is_searched_is_never_slower_than_the_default():
    rng = np.random.default_rng(5)
    for _ in range(6):
        rates = rng.choice([1.0, 10.0, 100.0], (4, 4))
        np.fill_diagonal(rates, 1000.0)
        links = zones().model_copy(update={"endpoints": tuple("abcd"), "gbps": tuple(map(tuple, rates.tolist())),
                                           "latency_us": ((3.0,) * 4,) * 4})  # fmt: skip
        card = with_links(LinkMatrix.model_validate(links.model_dump()), 16, 4)
        for config in ({"tp": 2, "dp": 4, "pp": 2}, {"tp": 4, "dp": 2, "pp": 2}):
            default = seconds(card, **config, host_order="given")
            assert seconds(card, **config, host_order="links") <= default * 1.001
            assert seconds(card, **config, host_order="ranks") <= default * 1.001


def test_axes_that_share_the_ports_of_nodes_take_turns():
    """A step takes at least as long as the ports need for all that passes them: gradients cannot hide behind messages
    of tensor parallelism that fill the same ports."""
    row = {"tp": 8, "dp": 4, "pp": 1, "micro_batch_size": 64, "zero_stage": 0, "activation_checkpointing": "none"}
    card = with_links(zones(), 32, 4)
    space = space_from_rows([Knob(name, (value,)) for name, value in row.items()], [row])  # type: ignore[arg-type,list-item]
    parts = time_parts(card, read_layout(card, space), read_machine(card))
    assert parts.tp_scale_out[0] > 0
    ports_s = parts.micro_batches * parts.tp_scale_out + parts.dp
    step_s = combine_time(parts, np.zeros(len(MULTIPLIERS)))
    assert step_s[0] >= 0.999 * ports_s[0]
    assert combine_time(replace(parts, shared_tp=np.zeros(1)), np.zeros(len(MULTIPLIERS)))[0] < step_s[0]


def test_an_order_of_devices_is_set_by_the_run_script_on_any_scheduler():
    card = with_links(dgx1(2), 16, 8)
    payload = input_of(card, tp=2, dp=8, pp=1, device_order="links")
    assert not payload.moves_nodes
    job = Job(run_id="r", trial=1, attempt=1, trial_dir=Path("t"), payload=payload, timeout_s=1.0)
    refuse_places([job], "slurm")
    assert trial_environment(Path("t"), payload)["CCL_RANK_DEVICES"] == ",".join(map(str, payload.devices))
    moved = job.model_copy(update={"payload": payload.model_copy(update={"places": (*range(8, 16), *range(8))})})
    with pytest.raises(UserError, match="scheduler's order"):
        refuse_places([moved], "slurm")


def order_devices(accelerator: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = f"import common; [common.order_devices({{'accelerator': {accelerator!r}}}) for _ in range(2)]"
    environment = {**os.environ, "PYTHONPATH": str(COMMON), **variables}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def test_the_visible_devices_are_put_in_order_once():
    assert order_devices("v100", CCL_RANK_DEVICES="2,0,1").stdout == "CUDA_VISIBLE_DEVICES=2,0,1\n"
    ordered = order_devices("v100", CCL_RANK_DEVICES="2,0,1", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert ordered.stdout == "CUDA_VISIBLE_DEVICES=6,4,5\n"
    assert order_devices("mi250x-gcd", CCL_RANK_DEVICES="1,0").stdout == "HIP_VISIBLE_DEVICES=1,0\n"
    hidden = order_devices("v100", CCL_RANK_DEVICES="2,0,1", CUDA_VISIBLE_DEVICES="0")
    assert "every rank must see all devices of its node" in hidden.stderr
    assert order_devices("v100").stdout == ""


def test_the_launch_by_hand_has_the_order_of_the_devices():
    card = with_links(dgx1(), 8, 8)
    config = Config({"tp": 2, "dp": 4, "pp": 1, "micro_batch_size": 1, "device_order": "links"})
    form = make_launch(card, "megatron", config)
    devices = input_of(card, tp=2, dp=4, pp=1, device_order="links").devices
    assert form.environment["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, devices))
    assert (
        "CUDA_VISIBLE_DEVICES"
        not in make_launch(card, "megatron", Config({**config, "device_order": "given"})).environment
    )


def write_site(project: Path, framework: str, links: LinkMatrix, *, accelerator: str, per_node: int) -> None:
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / "site.yaml").write_text(
        f"launcher: slurm\nframework: {framework}\n"
        f"hardware: {{accelerator: {accelerator}, num_accelerators: {links.num_places},"
        f" accelerators_per_node: {per_node}, memory_gib: 40}}\n"
    )
    (project / "launchers" / "site.links.csv").write_text(write_links(links))


def test_place_searches_degrees_nodes_and_ranks_together(project, cli):
    write_site(project, "torchtitan", zones(), accelerator="a100-40", per_node=4)
    place = ["links", "place", "-l", "site", "-w", "wl2", "--config", "tp=4,dp=8,pp=1,micro_batch_size=1"]
    found = cli.json([*place, "--json", "--write", "hosts"])
    assert found["kind"] == "ranks"
    assert found["predicted"]["ranks"] < found["predicted"]["given"] / 1.3
    assert (project / "hosts").read_text().split() == found["hosts"]
    assert all(found["hosts"].count(f"n{node}") == 4 for node in range(8))
    write_site(project, "megatron", zones(), accelerator="a100-40", per_node=4)
    out = cli.out(["links", "place", "-l", "site", "-w", "wl2", "--config", "tp=4,dp=2,pp=4,micro_batch_size=1"])
    assert "with the framework's degrees in another order (tp-pp-dp)" in out
    assert "torchrun: --node-rank N" not in out, "nothing was written"


def test_place_prints_the_devices_of_a_node(project, capsys):
    write_site(project, "megatron", dgx1(2), accelerator="v100", per_node=8)
    assert main(["links", "place", "-l", "site", "-w", "wl2", "--config", "tp=2,dp=2,pp=4,micro_batch_size=1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "CUDA_VISIBLE_DEVICES=" in line)
    devices = [int(each) for each in line.split("CUDA_VISIBLE_DEVICES=")[1].split()[0].split(",")]
    assert {NVLINKS[a][b] for a, b in zip(devices[::2], devices[1::2], strict=True)} == {2}


@pytest.mark.parametrize(
    ("framework", "knob", "reason"),
    [
        ("torchtitan", "rank_order", "tp innermost"),
        ("nanotron", "rank_order", "ranks of a node are consecutive"),
        ("hf-trainer", "rank_order", "nothing to order"),
        ("maxtext", "device_order", "orders the devices by their coordinates"),
    ],
)
def test_a_framework_without_an_order_says_why(framework, knob, reason, cli):
    assert reason in cli.err(["space", "-w", "wl2", "--framework", framework, "--knob", f"{knob}=given,links"])
