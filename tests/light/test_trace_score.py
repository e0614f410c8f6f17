"""`score`: metrics of folders of traces, and the figures of CCL-Bench."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import trace_writer as write
from paths import ROOT
from trace_tables import Timeline, make_set

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.plugins import METRICS
from cclsearch.trace.ccl_bench import (
    ALIASES,
    StepScoreReference,
    check_metric_name,
    list_metric_names,
    measure_by_name,
)
from cclsearch.trace.events import CollectiveKind
from cclsearch.trace.metric import MetricResult, Status
from cclsearch.trace.view import TraceView


def kineto_rank(rank: int, world_size: int, *, period_us: int = 1000, steps: int = 6) -> str:
    """A rank that computes 400 us (rank 1: 500), reduces until 700, copies 50 and idles."""
    events: list[dict[str, Any]] = []
    compute = 400 + 100 * rank
    reduced = write.collective_args(ranks=world_size, dtype="Float")
    work: list[tuple[str, str, int, int, dict[str, Any]]] = [
        ("kernel", "sm90_gemm", 0, compute, {"blocks per SM": 2.0, "grid": [264, 1, 1], "block": [128, 1, 1]}),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", compute, 700 - compute, reduced),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 700, 50, {"bytes": 1_000_000}),
    ]
    for i in range(steps):
        begin = 5000 + period_us * i
        events.append(write.span("user_annotation", f"ProfilerStep#{i}", begin - 20, period_us - 1))
        for number, (category, name, start, duration, args) in enumerate(work, start=3 * i):
            launch = {"correlation": number + 1}
            events.append(write.span("cuda_runtime", "cudaLaunchKernel", begin + start - 10, 3, **launch))
            shown = {"device": 0, "stream": 7, **launch, **args}
            events.append(write.span(category, name, begin + start, duration, tid=7, **shown))
    return json.dumps(write.kineto_document(events, rank=rank, world=world_size), indent=1)


def write_run(folder: Path, **shape: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        (folder / f"rank{rank}_trace.json").write_text(kineto_rank(rank, 2, **shape))
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "traces")


def score(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["score", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_has_every_metric_with_all_fields(run_folder, capsys):
    code, out, _ = score(capsys, str(run_folder), "--all", "--json")
    data = json.loads(out)
    assert code == 0
    assert set(data) == set(METRICS.names())
    fields = {"value", "unit", "per_rank", "per_step", "n_ranks", "world_size", "n_steps", "status", "reason", "inputs"}
    for name, result in data.items():
        assert fields <= set(result), name
        assert MetricResult.model_validate(result).name == name
    assert data["trace_step_time"]["value"] == pytest.approx(1e-3)
    assert data["compute_frac"]["value"] == pytest.approx(0.45)
    assert data["last_arriver"]["value"] == 1
    assert data["bus_bw"]["value"] == pytest.approx((4 << 20) / 200e-6 / 1e9)


def test_text_shows_where_the_time_goes(run_folder, capsys):
    code, out, _ = score(capsys, str(run_folder))
    assert code == 0
    assert "A traced step takes 1 ms: compute 450 us (45%)" in out
    assert "The other ranks wait for rank 1, the last to arrive in 6 of 6 collectives" in out
    assert "exposed comm" in out
    assert "trace_step_time" in out


def test_the_table_by_step_has_a_line_for_every_rank_and_step(run_folder, capsys):
    _, out, _ = score(capsys, str(run_folder), "--steps")
    lines = [line.split() for line in out.splitlines() if line[:1] in "01" and "ms" in line]
    assert [(line[0], line[1]) for line in lines if line[2:4] == ["1", "ms"]] == [
        (rank, step) for rank in "01" for step in "1234"
    ]


def test_named_metrics_keep_their_order_and_have_notes(run_folder, capsys):
    code, out, _ = score(capsys, str(run_folder), "--metric", "avg_step_time", "--metric", "overlap")
    lines = out.strip().splitlines()
    assert code == 0
    assert lines[-2].startswith("avg_step_time")
    assert "CCL-Bench: mean length of the host's step markers" in lines[-2]
    assert lines[-1].startswith("overlap")


def test_two_traces_side_by_side(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", period_us=1500)
    code, out, _ = score(capsys, str(a), str(b), "--json")
    data = json.loads(out)
    assert code == 0
    step = data["difference"]["trace_step_time"]
    assert step["difference"] == pytest.approx(0.5e-3)
    assert step["ratio"] == pytest.approx(1.5)
    assert data["b"]["scaling_efficiency"]["value"] == pytest.approx(1 / 1.5)
    _, text, _ = score(capsys, str(a), str(b))
    assert "x1.500" in text


def test_a_second_card_is_for_the_second_trace(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    shipped = (ROOT / "workloads" / "tiny.yaml").read_text(encoding="utf-8")
    once, twice = tmp_path / "once.yaml", tmp_path / "twice.yaml"
    once.write_text(re.sub(r"\bbatch_size: \d+", "batch_size: 16", shipped), encoding="utf-8")
    twice.write_text(re.sub(r"\bbatch_size: \d+", "batch_size: 32", shipped), encoding="utf-8")
    arguments = [str(a), str(b), "--metric", "scaling_efficiency", "--json", "--card", str(once)]
    _, out, _ = score(capsys, *arguments, "--card", str(twice))
    weak = json.loads(out)["b"]["scaling_efficiency"]
    assert (weak["inputs"]["rule"], weak["value"]) == ("weak", pytest.approx(2.0))
    _, out, _ = score(capsys, *arguments)
    assert json.loads(out)["b"]["scaling_efficiency"]["inputs"]["rule"] == "strong"
    code, _, err = score(capsys, str(a), "--card", str(once), "--card", str(twice))
    assert code == 2
    assert "--card takes one card for all traces" in err


def test_diagnosis_as_data_adds_up(run_folder, capsys):
    _, out, _ = score(capsys, str(run_folder), "--diagnosis", "--json")
    data = json.loads(out)
    assert sum(data["seconds_by_cause"].values()) == pytest.approx(data["window_s"])
    assert data["worst_rank"] == 1


def test_a_trial_folder_provides_its_traces_and_its_configuration(tmp_path, capsys):
    trial = tmp_path / "trials" / "0007"
    write_run(trial / "trace")
    (trial / "config.json").write_text(json.dumps({"trial": 7, "config": {"tp": 1, "pp": 2, "dp": 1}}))
    code, out, _ = score(capsys, str(trial), "--metric", "pipeline_bubble", "--json")
    assert code == 0
    assert json.loads(out)["pipeline_bubble"]["value"] is not None


def test_pictures_are_written(run_folder, tmp_path, capsys):
    code, _, _ = score(capsys, str(run_folder), "--picture", str(tmp_path / "pictures"))
    assert code == 0
    assert sorted(p.name for p in (tmp_path / "pictures").iterdir()) == ["breakdown.svg", "timeline.svg"]


def test_no_readable_trace_is_exit_one_with_status_and_reason(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("no trace at all")
    code, out, _ = score(capsys, str(tmp_path))
    assert code == 1
    assert "not_available (no_trace_files" in out
    code, out, _ = score(capsys, str(tmp_path), "--json")
    assert code == 1
    assert {result["status"] for result in json.loads(out).values()} == {"not_available"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one trace"),
        (["a", "b", "c"], "one trace"),
        (["/no/such/place"], "'/no/such/place' does not exist"),
        ([".", "--metric", "nonsense"], "there is no metric 'nonsense'; metrics:"),
        ([".", "--workers", "0"], "--workers"),
        ([".", "--reference-weight", "2"], "--reference-weight"),
        ([".", "--config", "no.json"], "the configuration file 'no.json' does not exist"),
        ([".", "--card", "no-such-card"], "there is no workload"),
    ],
)
def test_bad_usage_is_exit_two_with_one_line(arguments, message, project, capsys):
    code, out, err = score(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_list_names_units_and_meanings(capsys):
    code, out, _ = score(capsys, "--list")
    assert code == 0
    for name in (*METRICS.names(), "gpu_step_score", "collective_vol_*"):
        assert f"\n{name} " in out


@pytest.mark.parametrize("seed", range(12))
def test_a_corrupt_file_gives_a_status_and_never_a_traceback(seed, tmp_path, capsys):
    rng = random.Random(seed)
    text = bytearray(kineto_rank(0, 2, steps=3).encode())
    for _ in range(rng.randrange(1, 40)):
        at = rng.randrange(len(text))
        text[at : at + rng.randrange(0, 6)] = bytes(rng.randrange(256) for _ in range(rng.randrange(0, 6)))
    (tmp_path / "rank0.json").write_bytes(bytes(text))
    code, out, _ = score(capsys, str(tmp_path), "--all", "--json")
    data = json.loads(out)
    assert code in (0, 1)
    assert all("raised" not in result["detail"] for result in data.values())


def test_what_if_starts_from_the_step_time_of_score(run_folder, capsys, cli):
    data = cli.json(["what-if", str(run_folder), "--scale-up-bw", "2x", "--json"])
    _, out, _ = score(capsys, str(run_folder), "--metric", "trace_step_time", "--json")
    assert data["step_time_s"] == json.loads(out)["trace_step_time"]["value"]
    assert set(data["utility"]) == {"compute", "scale_up_bw", "scale_out_bw", "copies"}
    assert data["scenario"]["low_s"] <= data["scenario"]["high_s"]


def test_what_if_writes_chakra_traces(run_folder, tmp_path, cli):
    assert "simulated" in cli.out(["what-if", str(run_folder), "--chakra", str(tmp_path / "et")])
    assert sorted(p.name for p in (tmp_path / "et").iterdir()) == ["chakra.0.et", "chakra.1.et"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale-up-bw", "fast"], "a factor above 0"),
        (["--scale-out-bw", "0"], "a factor above 0"),
        (["--compress", "0.5"], "RATIO"),
        (["--compress", "4:x"], "RATIO"),
        (["--scale-up-domain", "0"], "at least 1"),
        (["--algorithm", "star"], "ring"),
    ],
)
def test_bad_scenarios_are_exit_two(arguments, message, project, cli):
    assert message in cli.err(["what-if", ".", *arguments])


def test_what_if_without_a_trace_is_exit_one(tmp_path, cli):
    assert cli.out(["what-if", str(tmp_path)], 1).startswith("not available: no trace files under ")


def test_two_workers_give_the_scores_of_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cclsearch.trace.view.MIN_PREPARED_ROWS", 1)
    (tmp_path / "rank0_trace.json").write_text(kineto_rank(0, 1))
    shown = []
    for workers in ("1", "2"):
        assert main(["score", str(tmp_path), "--all", "--json", "--workers", workers]) == 0
        shown.append(capsys.readouterr().out)
    assert "trace_step_time" in shown[0]
    assert shown[0] == shown[1]


@pytest.fixture(scope="module")
def trace() -> TraceView:
    tables = []
    for rank in range(2):
        timeline = Timeline(rank=rank, world_size=2)
        for i in range(6):
            number, begin = timeline.step(i * 100, i * 100 + 50), i * 100
            timeline.kernel(begin, 40 + 10 * rank, blocks_per_sm=0.5, step_id=number)
            timeline.collective(begin + 50, 20, message_bytes=2 << 20, step_id=number)
            timeline.collective(
                begin + 70, 10, CollectiveKind.ALL_GATHER, None, in_bytes=500, out_bytes=1000, step_id=number
            )
            timeline.copy(begin + 80, 10, bytes=10_000, step_id=number)
        tables.append(timeline.table())
    return TraceView(make_set(tables))


def measure_one(trace: TraceView, name: str) -> MetricResult:
    (result,) = measure_by_name(trace, name).values()
    return result


@pytest.mark.parametrize("name", ALIASES)
def test_every_name_has_a_metric_and_states_the_difference(trace, name):
    result = measure_one(trace, name)
    assert result.name == name
    assert ALIASES[name].missing or result.inputs["answered_by"] in METRICS.names()
    assert (result.value is None) == (result.status is Status.NOT_AVAILABLE)
    assert result.value is not None or result.reason
    assert str(result.inputs["differs"]).startswith("CCL-Bench: ")


@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        ("avg_step_time", 100e-6, "s"),
        ("communication_fraction", 0.3, "fraction"),
        ("compute_comm_overlap", 0.0, "fraction"),
        ("total_communication_time", 30e-6, "s"),
        ("mean_sm_coverage", 0.5, "fraction"),
        ("dominant_kernel_concentration", 1.0, "fraction"),
        ("average_memory_bandwidth", 1.0, "GB/s"),
        ("memory_transfer_overhead", 0.1, "fraction"),
        ("load_imbalance_ratio", 1.25, "ratio"),
        ("collective_vol_allreduce", 2 * 2**20 / 1e9, "GB/step"),
        ("collective_vol_allreduce_gb", 2 * 2**20 / 1e9, "GB/step"),
        ("collective_vol_allgather", 1000 / 1e9, "GB/step"),
        ("collective_vol_total_gb", (2 * 2**20 + 1000) / 1e9, "GB/step"),
        ("bandwidth_utilization_allreduce_group_6", 2 * 2**20 / 20e-6 / 1e9, "GB/s"),
        ("aggregate_gpu_utilization", (0.45 + 0.3) / 1, "fraction"),
        ("allreduce_comm_time_s", 20e-6, "s"),
        ("coll_call_num", 24, "calls"),
        ("avg_comm_kernel_time_s", 15e-6, "s"),
        ("total_kernel_time", 6 * 75e-6, "s"),
        ("communication_ratio", (30 / 70 + 30 / 80) / 2, "fraction"),
        ("total_trace_time", 590e-6, "s"),
    ],
)
def test_values_of_names(trace, name, value, unit):
    result = measure_one(trace, name)
    assert (result.value, result.unit, result.status) == (pytest.approx(value), unit, Status.OK)


@pytest.mark.parametrize(
    "prefix", ["collective_vol", "collective_vol_*", "bandwidth_utilization_*", "bandwidth_utilization_"]
)
def test_a_bare_prefix_gives_the_recorded_collectives(trace, prefix):
    names = measure_by_name(trace, prefix)
    assert [name.rsplit("_", 1)[1] for name in names] == ["allreduce", "allgather"]
    assert all(result.value is not None for result in names.values())


def test_a_missing_collective_is_not_available_rather_than_zero(trace):
    result = measure_one(trace, "collective_vol_alltoall")
    assert (result.value, result.status) == (None, Status.NOT_AVAILABLE)


def test_step_score_weighs_accelerators_and_step_time(trace):
    reference = StepScoreReference(num_accelerators=4, step_time_s=200e-6, weight=0.25)
    (result,) = measure_by_name(trace, "gpu_step_score", reference).values()
    assert result.value == pytest.approx(0.25 * 4 / 2 + 0.75 * 2)
    (default,) = measure_by_name(trace, "gpu_step_score").values()
    assert default.value == pytest.approx(0.5 * 16 / 2 + 0.5 * 0.44 / 100e-6)


@pytest.mark.parametrize("name", ["nonsense", "collective_vol_nonsense", "bandwidth_utilization_total", ""])
def test_an_unknown_name_lists_the_known_names(name):
    with pytest.raises(UserError, match=r"allgather|trace_step_time"):
        check_metric_name(name)


def test_every_listed_name_is_accepted(trace):
    for name in list_metric_names():
        assert measure_by_name(trace, name)


COMMAND_NAMES = (
    *("achieved_flops_from_trace_json", "aggregate_gpu_utilization", "allreduce_comm_time_s"),
    *("average_memory_bandwidth", "avg_comm_bandwidth_GBps", "avg_comm_kernel_time_s", "avg_step_time"),
    *("bandwidth_utilization", "bandwidth_utilization_allgather_group_6"),
    *("bandwidth_utilization_allreduce_group_6", "bandwidth_utilization_alltoall_group_6"),
    *("bandwidth_utilization_peertopeer_group_6", "bandwidth_utilization_reducescatter_group_6"),
    *("break_down_steps", "coll_call_num", "collective_vol_allgather_gb", "collective_vol_allreduce_gb"),
    *("collective_vol_alltoall_gb", "collective_vol_reducescatter_gb", "collective_vol_total_gb"),
    *("comm_kernel_breakdown_tpu", "communication_fraction", "communication_overhead"),
    *("communication_overlap_ratio", "communication_ratio", "compute_comm_overlap"),
    *("compute_utilization_proxy", "dominant_kernel_concentration", "estimated_bandwidth"),
    *("estimated_throughput_tokens_per_s", "estimated_total_tokens", "flops_per_token_used"),
    *("gpu_step_score", "hockney_alpha_s", "hockney_beta_s_per_byte", "hockney_inverse_beta_Bps"),
    *("kernel_compute_time_group_6", "load_imbalance_ratio", "mean_sm_coverage", "memory_bound_fraction"),
    *("memory_transfer_overhead", "mfu", "moe_fraction", "num_comm_kernels", "scale_up_bw_utility"),
    *("straggler", "straggler_metrics", "throughput", "throughput_group_6", "total_comm_time_s"),
    *("total_communication_time", "total_compute_time_s", "total_kernel_time"),
    *("total_model_flops_from_args", "total_trace_time", "tpot", "tpot_group_6", "traffic_window", "ttft"),
    *("ttft_group_6", "wall_time_s"),
)
"""What `python tools/main.py --metric` of CCL-Bench 1.0 accepts."""


def test_every_name_of_their_command_is_answered_or_has_a_reason(trace):
    assert len(COMMAND_NAMES) == 61
    for name in COMMAND_NAMES:
        result = measure_one(trace, name)
        assert result.name == name
        assert str(result.inputs["differs"] if result.value is not None else result.detail or result.reason)


def test_utilization_of_all_reduces_is_another_quantity_than_bus_bandwidth(trace):
    for name in ("bandwidth_utilization", "bandwidth_utilization_group_1"):
        assert measure_one(trace, name).inputs["answered_by"] == "bw_util"
    assert measure_one(trace, "bandwidth_utilization_allreduce_group_6").unit == "GB/s"


def test_a_what_if_is_not_a_property_of_a_trace(trace):
    result = measure_one(trace, "scale_up_bw_utility")
    assert result.value is None
    assert "--scale-up-bw 2x" in result.detail
