"""A trace on other clusters: against independent simulations of the other hardware, and as a command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import trace_writer as write
from paths import TESTS
from test_trace_whatif import MACHINES, Machine, step_of, view_of

from cclsearch.card.hardware import find_accelerator
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.network.spec import ClusterSpec, parse_cluster
from cclsearch.network.sweep import Speeds
from cclsearch.trace.whatif.cluster import ClusterReplay, cluster_of, grow
from cclsearch.trace.whatif.projection import prepare_replay


def cluster_like(machine: Machine) -> ClusterSpec:
    """A switch on which an all-reduce by halving and doubling takes alpha + time per MiB."""
    ranks = machine.num_ranks
    steps = 2 * (ranks.bit_length() - 1)
    gbps = 2 * (ranks - 1) / ranks * (1 << 20) / machine.us_per_mib * 1e6 * 8 / 1e9
    return parse_cluster(f"switch:{ranks}:{gbps}:{machine.alpha_us / steps}")


def replay_of(machine: Machine) -> ClusterReplay:
    return ClusterReplay(prepare_replay(view_of(machine)), cluster_like(machine))


@pytest.mark.parametrize("name", MACHINES)
def test_the_recorded_cluster_gives_the_measured_step(name):
    replay = replay_of(MACHINES[name])
    assert replay.step_s(replay.base) == pytest.approx(step_of(MACHINES[name]))
    assert replay.base_s == pytest.approx(replay.replay.window_s, rel=0.01)


@pytest.mark.parametrize("factor", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("name", MACHINES)
def test_other_links_agree_with_a_run_on_them(name, factor):
    machine, replay = MACHINES[name], replay_of(MACHINES[name])
    truth = step_of(replace(machine, us_per_mib=machine.us_per_mib / factor))
    assert replay.step_s(replay.base.scaled(up=factor)) == pytest.approx(truth, rel=0.02)


def test_other_latency_and_faster_computation_agree_with_a_run_on_them():
    machine, replay = MACHINES["latency"], replay_of(MACHINES["latency"])
    half = step_of(replace(machine, alpha_us=machine.alpha_us / 2))
    assert replay.step_s(replay.base.scaled(latency=0.5)) == pytest.approx(half, rel=0.02)
    fast = step_of(replace(machine, compute_speed=2.0))
    assert replay.step_s(replay.base, Speeds(flops=2.0, memory=2.0)) == pytest.approx(fast, rel=0.02)


def test_a_larger_cluster_grows_the_outermost_groups_and_is_slower_behind_thin_links():
    replay = replay_of(MACHINES["exposed"])
    inner = replay.base.describe()
    near = replay.step_s(parse_cluster(f"{inner}/switch:16:400:2"))
    thin = replay.step_s(parse_cluster(f"{inner}/switch:16:20:2"))
    assert replay.step_s(replay.base) < near < thin


def test_usual_clusters_of_accelerators_and_what_cannot_grow():
    assert cluster_of(find_accelerator("h100"), 32, 8).describe() == "switch:8:3600:2/switch:4:400:6"
    assert cluster_of(find_accelerator("tpu-v6e"), 16, 16).tiers[0].kind == "torus"
    two = parse_cluster("switch:8:2400:2/switch:4:200:8")
    assert grow(two, 4096).describe() == "switch:8:2400:2/switch:512:200:8"
    with pytest.raises(UserError, match="cannot grow"):
        grow(two, 100)
    with pytest.raises(UserError, match="do not fill"):
        cluster_of(find_accelerator("h100"), 12, 8)


def write_trace(folder: Path) -> str:
    """Write one rank of a step: a product, and an all-reduce of 32 MiB over 16 ranks that nothing hides."""
    reduced = write.collective_args(nelems=16 << 20, ranks=16)
    events: list[dict[str, object]] = []
    for step in range(4):
        at = 10_000 * step
        events.append(write.span("user_annotation", f"ProfilerStep#{step}", at, 9_000))
        work = ("sm80_gemm_bf16", {}), ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", reduced)
        for n, (name, args) in enumerate(work):
            shown = {"stream": 7, "device": 0, "correlation": at + n, **args}
            events.append(write.span("cuda_runtime", "cudaLaunchKernel", at + 10 * n, 5, correlation=at + n))
            events.append(write.span("kernel", name, at + 100 + 4_000 * n, 4_000, tid=7, **shown))
    return str(write.write_kineto(folder / "rank0.json", write.kineto_document(events, world=16)))


def sweep_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    assert main(["sweep-hardware", *words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["provenance"] == "simulated"
    return {row["name"]: row for row in shown["rows"]}


def test_the_command_sweeps_links_topologies_and_accelerators(tmp_path, capsys, cli):
    trace = write_trace(tmp_path)
    base = ("--base", "switch:8:2400:2.5/switch:2:200:8")
    rows = sweep_json(capsys, trace, *base)
    assert rows["scale-out x2"]["speedup"] > rows["scale-up x2"]["speedup"] > 1  # type: ignore[operator]
    assert rows["base (as traced)"]["utility"]["scale_out_bw"] > 0.04  # type: ignore[index]
    rows = sweep_json(capsys, trace, *base, "--accelerator", "b200", "--ranks", "4096")
    assert rows["b200"]["speedup"] > 2  # type: ignore[operator]
    assert rows["base of 4096 ranks"]["ranks"] == 4096
    rows = sweep_json(capsys, trace, *base, "--compress", "4:300:150")
    assert rows["base, as asked"]["speedup"] > 1 == rows["base (as traced)"]["speedup"]  # type: ignore[operator]
    assert "(simulated)" in cli.out(["sweep-hardware", trace, *base])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--base", "switch:4"], "too few fields"),
        (["--cluster", "a=switch:0:1:1"], "greater than or equal to 1"),
        (["--accelerator", "h1000"], "h1000"),
        (["--compress", "0.5"], "RATIO"),
        (["--algorithm", "fast"], "it is one of auto, "),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_read(words, why, tmp_path, cli):
    assert why in cli.err(["sweep-hardware", str(tmp_path), *words])


def test_a_prediction_is_swept_in_one_configuration(capsys):
    wl5 = ("--workload", "wl5", "--config", "tp=4,dp=4,pp=1,ep=16")
    rows = sweep_json(capsys, *wl5)
    assert rows["scale-out x2"]["speedup"] > 1 > rows["fat tree, 4:1 oversubscribed"]["speedup"]  # type: ignore[operator]
    assert set(rows["base"]["utility"]) == {"compute", "scale_up_bw", "scale_out_bw", "scale_up_domain", "latency"}  # type: ignore[call-overload]
    rows = sweep_json(capsys, *wl5, "--accelerator", "h100")
    assert rows["h100"]["speedup"] > 1  # type: ignore[operator]


def test_the_interval_of_a_prediction_names_the_hardware_that_it_is_for(cli):
    shown = cli.json(["sweep-hardware", "--workload", "wl3", "--json"])
    [note] = [note for note in shown["notes"] if " to " in note]
    assert note.startswith("with the links of the card itself 0.")
    assert f"{shown['rows'][0]['seconds']:.3g} [" not in note, "the usual cluster of its accelerator is another"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "give a TRACE or a --workload"),
        (["--workload", "wl5", "--config", "tp=3"], "matches"),
        (["--workload", "wl5", "--compress", "4"], "--compress belongs to a trace"),
        (["--workload", "wl5", "--cluster", "small=switch:8:2400:2"], "needs 16 ranks"),
        (["--workload", "tiny-serving"], "predicts no"),
    ],
)
def test_a_prediction_that_cannot_be_swept_is_refused(words, why, cli):
    assert why in cli.err(["sweep-hardware", *words])


def test_claims_show_overlap_and_links_of_recorded_traces_with_pictures(tmp_path, capsys, cli):
    recorded = TESTS / "recorded"
    traces = [str(recorded / "gloo-ddp2"), str(recorded / "jax-cpu2")]
    picture = tmp_path / "links.svg"
    main(["claims", "links", *traces, "--picture", str(picture)])
    shown = capsys.readouterr().out
    assert "gloo-ddp2" in shown
    assert "scale_up_bw" in shown
    assert picture.read_text().startswith("<svg")
    main(["claims", "overlap", traces[0], "--picture", str(tmp_path / "overlap.png"), "--json"])
    [row] = json.loads(capsys.readouterr().out)["traces"]
    assert 0 <= row["overlap"] <= 1
    assert row["seconds"] > 0
    assert row["cause"]
    assert (tmp_path / "overlap.png").read_bytes()[:4] == b"\x89PNG"
    assert "must end in .svg or .png" in cli.err(["claims", "overlap", traces[0], "--picture", "links.pdf"])
    assert main(["claims", "overlap", str(tmp_path)]) == 1
