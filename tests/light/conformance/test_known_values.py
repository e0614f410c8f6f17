"""Known values of public traces, to the printed digit. `CCL_CONFORMANCE_TRACES` names their folder."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from real_traces import measure, needs_traces, view_of

from cclsearch.plugins import METRICS
from cclsearch.trace.ccl_bench import measure_by_name
from cclsearch.trace.events import Kind
from cclsearch.trace.intervals import total_ns
from cclsearch.trace.metric import MetricResult
from cclsearch.trace.metrics.quality import summarize_file
from cclsearch.trace.score import diagnose_trace

pytestmark = needs_traces


def value_of(name: str, metric: str) -> float:
    result = measure(name, metric)
    assert result.value is not None, f"{metric}: {result.reason} {result.detail}"
    return result.value


def whole_us(ns: float) -> int:
    """Round as printed: half rounds up."""
    return math.floor(ns / 1000 + 0.5)


@pytest.mark.parametrize(
    ("trace", "rank", "known"),
    [
        ("dlrm-8xV100", 0, {"span": 13009, "busy": 6590, "compute": 1034, "comm": 5798, "exposed_comm": 5537}),
        ("dlrm-8xV100", 7, {"span": 10967, "busy": 2659, "compute": 1059, "comm": 1746, "exposed_comm": 1580}),
        (
            "resnet-ddp-a100",
            0,
            {"span": 660551, "busy": 157500, "compute": 115656, "comm": 46876, "exposed_comm": 39191},
        ),
        ("resnet-mi300", 0, {"span": 86568, "busy": 84002, "compute": 25739, "comm": 71517, "exposed_comm": 55288}),
        ("vllm-b200", 0, {"span": 84487, "busy": 11596, "compute": 8652, "comm": 2142, "exposed_comm": 2142}),
        ("resnet50-v100-nw0", 0, {"span": 876066, "busy": 602145, "comm": 0, "exposed_comm": 0}),
        ("async-v100", 0, {"span": 480029, "comm": 0, "exposed_comm": 0}),
    ],
)
def test_microseconds_over_the_whole_file(trace, rank, known):
    summary = summarize_file(view_of(trace).ranks[rank])
    for name, printed in known.items():
        ns = getattr(summary, f"{name}_ns")
        assert printed in (whole_us(ns), ns // 1000), name  # 2141.501 is printed rounded, 55288.507 truncated


@pytest.mark.parametrize(
    ("trace", "rank", "overlap", "idle"),
    [
        ("dlrm-8xV100", 0, "4.50", "49.34"),
        ("dlrm-8xV100", 7, "9.51", None),
        ("resnet-ddp-a100", 0, "15.61", None),
        ("resnet-mi300", 0, "22.2", None),
        ("vllm-b200", 0, "0", None),
        ("resnet50-v100-nw0", 0, None, "31.3"),
        ("async-v100", 0, None, None),
    ],
)
def test_percent_over_the_whole_file(trace, rank, overlap, idle):
    summary = summarize_file(view_of(trace).ranks[rank])
    for printed, found in ((overlap, summary.overlap), (idle, summary.idle_frac)):
        if printed is not None:
            assert found is not None
            digits = len(printed.partition(".")[2])
            assert f"{100 * found:.{digits}f}" == printed
    if trace in ("resnet50-v100-nw0", "async-v100"):
        assert summary.overlap is None  # nothing communicates: undefined, not zero


def test_exact_timestamps_where_double_precision_loses_a_quarter_microsecond():
    """Above 1e15 us doubles step by 0.25 us: the published 472463 and 468173 us are sums of ends rounded to that."""
    view = view_of("async-v100").ranks[0]
    assert (whole_us(total_ns(view.busy_M2)), whole_us(total_ns(view.compute_M2))) == (472454, 468154)

    def in_doubles(rows: Any) -> int:
        table = view.table
        start_us = (table.base_ns + table.ts_ns[rows]) // 1000 + (table.base_ns + table.ts_ns[rows]) % 1000 / 1000.0
        end_us = start_us + table.dur_ns[rows] / 1000.0
        order = np.argsort(start_us, kind="stable")
        start_us, reach = start_us[order], np.maximum.accumulate(end_us[order])
        gaps = np.maximum(start_us[1:] - reach[:-1], 0).sum()
        return math.floor(reach[-1] - start_us[0] - gaps + 0.5)

    assert in_doubles(view.device_rows) == 472463
    assert in_doubles(view.compute_kernels) == 468173


@pytest.mark.parametrize(
    ("trace", "periods_us"),
    [
        ("async-v100", [97664, 95737, 95571, 95664]),
        ("resnet-ddp-a100", [222055, 219732]),
        ("resnet-mi300", [18980, 18983]),
    ],
)
def test_periods_of_the_device(trace, periods_us):
    table = view_of(trace).ranks[0].table
    rows = view_of(trace).ranks[0].device_rows
    starts = [int(table.ts_ns[rows][table.step_id[rows] == i].min()) for i in range(len(table.steps))]
    assert [whole_us(b - a) for a, b in pairwise(starts)] == periods_us
    inner = periods_us[1:] if len(table.steps) >= 4 else periods_us
    assert value_of(trace, "trace_step_time") == pytest.approx(float(np.median(inner)) / 1e6, rel=1e-5)


def test_step_time_is_the_period_of_the_device_and_not_the_markers_of_the_host():
    assert f"{1e3 * value_of('resnet-mi300', 'trace_step_time'):.2f}" == "18.98"
    assert f"{1e3 * value_of('async-v100', 'trace_step_time'):.1f}" == "95.7"
    host = measure("resnet-mi300", "trace_step_time").inputs["cpu_step_time_s"]
    assert isinstance(host, float)
    assert host < 0.0168


def test_backlog_before_the_first_launch_is_left_out_and_reported():
    quality = measure("resnet-mi300", "trace_quality").inputs["unattributed_frac"]
    assert isinstance(quality, float)
    assert f"{100 * quality:.0f}" == "32"


def test_the_last_arriver_is_the_straggler_and_not_the_rank_with_most_communication():
    result = measure("dlrm-8xV100", "last_arriver")
    assert result.value == 7
    assert result.inputs["num_collectives"] == 8
    assert result.per_rank[7] == 5
    comm = {rank: total_ns(view.comm_M2) for rank, view in view_of("dlrm-8xV100").ranks.items()}
    assert min(comm, key=lambda rank: comm[rank]) == 7


def test_waiting_is_distinguished_from_transfer_in_the_first_collective():
    (group,) = [g for g in view_of("dlrm-8xV100").matching.groups if g.start_ns_RK[0, 0] == _first_comm_start()]
    assert whole_us(int(group.dur_ns_RK[0, 0])) == 2146
    assert whole_us(int(group.transfer_ns_K[0])) == 10


def _first_comm_start() -> int:
    view = view_of("dlrm-8xV100").ranks[0]
    return int(view.table.ts_ns[view.comm_rows[0]]) + view.table.base_ns


def test_clocks_of_eight_ranks_agree_to_a_microsecond():
    error_ns = view_of("dlrm-8xV100").matching.clock_error_ns
    assert error_ns is not None
    assert error_ns <= 1000


def test_imbalance_and_coverage_exclude_collectives():
    trace = view_of("dlrm-8xV100")
    ratio = measure_by_name(trace, "load_imbalance_ratio")["load_imbalance_ratio"].value
    assert ratio is not None
    assert f"{ratio:.2f}" == "1.20" or f"{ratio:.3f}" == "1.205"
    coverage = measure_by_name(trace, "mean_sm_coverage")["mean_sm_coverage"].value
    assert coverage is not None
    assert f"{100 * coverage:.0f}" == "24"


def test_straggler_of_four_ranks_over_gloo():
    assert value_of("gloo-ddp4-straggler", "last_arriver") == 2
    waits = measure("gloo-ddp4-straggler", "comm_wait_frac").inputs["wait_s_by_rank"]
    assert isinstance(waits, dict)
    assert [f"{1e3 * float(str(waits[str(rank)])):.0f}" for rank in range(4)] == ["388", "439", "18", "320"]
    diagnosis = diagnose_trace(view_of("gloo-ddp4-straggler"))
    assert diagnosis.worst_rank == 2
    assert any("wait for rank 2" in sentence for sentence in diagnosis.sentences)


def test_all_gather_bandwidth_from_the_full_tensor():
    by_collective = measure("vllm-b200", "bus_bw").inputs["by_collective_gbps"]
    assert isinstance(by_collective, dict)
    assert f"{by_collective['all_gather']:.1f}" == "16.0"


def test_message_bytes_of_one_step():
    volume = measure_by_name(view_of("resnet-ddp-a100"), "collective_vol_allreduce_gb")["collective_vol_allreduce_gb"]
    assert volume.value is not None
    assert f"{volume.value:.6f}" == "0.102228"


def test_memory_copies_are_events_of_the_device_and_not_kernels_named_copy():
    view = view_of("resnet-ddp-a100").ranks[0]
    assert len(view.rows(Kind.MEMCPY)) == 960


def test_symmetric_memory_kernels_are_communication():
    view = view_of("vllm-b200").ranks[0]
    named_nccl = [row for row in view.comm_rows if view.table.names[view.table.name_id[row]].startswith("nccl")]
    assert whole_us(int(view.table.dur_ns[named_nccl].sum())) in (21, 22)
    assert whole_us(total_ns(view.comm_M2)) in (2141, 2142)


def test_an_idle_device_is_attributed_to_the_host():
    cause = measure("resnet50-v100-nw0", "idle_cause")
    assert cause.inputs["main"] in ("input", "host_bound")
    assert value_of("resnet50-v100-nw0", "idle_cause") > 0.9


@pytest.mark.parametrize("chip", [0])
def test_seconds_of_a_tpu_chip(chip):
    view = view_of("tpu-v6e-4").ranks[chip]
    table = view.table
    seconds: dict[str, float] = {}
    for row in np.flatnonzero(np.isin(table.kind, (Kind.COMPUTE, Kind.COMM, Kind.MEMCPY))).tolist():
        name = table.names[table.name_id[row]]
        seconds[name] = seconds.get(name, 0.0) + int(table.dur_ns[row]) / 1e9
    all_reduce = sum(s for name, s in seconds.items() if "all-reduce" in name)
    assert f"{all_reduce:.3f}" == "0.365"
    loop_fusion = sum(s for name, s in seconds.items() if name.startswith("broadcast_add_fusion"))
    assert f"{loop_fusion:.3f}" == "2.367"
    copy_done = sum(s for name, s in seconds.items() if "copy-done" in name)
    assert f"{copy_done:.2f}" == "76.05"


ALL = (
    "async-v100",
    "dlrm-8xV100",
    "gloo-ddp4",
    "gloo-ddp4-straggler",
    "gloo-fsdp4",
    "jax-cpu4",
    "nsys-a2a-2gpu",
    "nsys-h100-2gpu",
    "resnet-ddp-a100",
    "resnet-mi300",
    "resnet50-v100-nw0",
    "tpu-v6e-4",
    "vllm-b200",
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ALL)
def test_every_metric_has_a_result_on_every_trace_and_the_causes_add_up(name):
    trace = view_of(name)
    assert trace.ranks, trace.trace_set.message
    for metric in METRICS.names():
        result: MetricResult = METRICS.get(metric)(trace)
        assert "raised" not in result.detail, f"{metric}: {result.detail}"
        if result.unit == "fraction" and result.value is not None and metric != "what_if_link":
            assert -1e-9 <= result.value <= 1 + 1e-9 or metric in ("scaling_efficiency", "compute_imbalance"), metric
    diagnosis = diagnose_trace(trace)
    assert sum(diagnosis.seconds_by_cause.values()) == pytest.approx(diagnosis.window_s)
    middle = np.median if diagnosis.is_uneven else np.mean
    if diagnosis.is_step:
        steps = [view.parts.window_ns_W for view in trace.ranks.values() if len(view.windows.spans_W2)]
        assert diagnosis.window_s == pytest.approx(max(float(middle(ns_W)) for ns_W in steps) / 1e9)
    for rank, view in trace.ranks.items():
        if len(view.windows.spans_W2):
            own = sum(diagnosis.seconds_by_rank[rank].values())
            assert own == pytest.approx(float(middle(view.parts.window_ns_W)) / 1e9)
            shares = view.parts.compute_ns_W + view.parts.exposed_comm_ns_W + view.parts.exposed_mem_ns_W
            assert (shares + view.parts.idle_ns_W == view.parts.window_ns_W).all()
