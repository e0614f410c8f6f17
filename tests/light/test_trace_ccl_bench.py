"""CCL-Bench dashboard names: which metric each maps to, its unit, and how its definition differs."""

from __future__ import annotations

import pytest
from trace_tables import Timeline, make_set

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
def test_every_name_has_a_metric_and_states_the_difference(trace: TraceView, name: str) -> None:
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
    ],
)
def test_values_of_names(trace: TraceView, name: str, value: float, unit: str) -> None:
    result = measure_one(trace, name)
    assert result.value == pytest.approx(value)
    assert (result.unit, result.status) == (unit, Status.OK)


@pytest.mark.parametrize(
    "prefix", ["collective_vol", "collective_vol_*", "bandwidth_utilization_*", "bandwidth_utilization_"]
)
def test_a_bare_prefix_gives_the_recorded_collectives(trace: TraceView, prefix: str) -> None:
    names = measure_by_name(trace, prefix)
    assert [name.rsplit("_", 1)[1] for name in names] == ["allreduce", "allgather"]
    assert all(result.value is not None for result in names.values())


def test_a_missing_collective_is_not_available_rather_than_zero(trace: TraceView) -> None:
    result = measure_one(trace, "collective_vol_alltoall")
    assert (result.value, result.status) == (None, Status.NOT_AVAILABLE)


def test_step_score_weighs_accelerators_and_step_time(trace: TraceView) -> None:
    reference = StepScoreReference(num_accelerators=4, step_time_s=200e-6, weight=0.25)
    (result,) = measure_by_name(trace, "gpu_step_score", reference).values()
    assert result.value == pytest.approx(0.25 * 4 / 2 + 0.75 * 2)
    (default,) = measure_by_name(trace, "gpu_step_score").values()
    assert default.value == pytest.approx(0.5 * 16 / 2 + 0.5 * 0.44 / 100e-6)


@pytest.mark.parametrize("name", ["nonsense", "collective_vol_nonsense", "bandwidth_utilization_total", ""])
def test_an_unknown_name_lists_the_known_names(name: str) -> None:
    with pytest.raises(UserError, match=r"allgather|trace_step_time"):
        check_metric_name(name)


def test_every_listed_name_is_accepted(trace: TraceView) -> None:
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


def test_every_name_of_their_command_is_answered_or_has_a_reason(trace: TraceView) -> None:
    assert len(COMMAND_NAMES) == 61
    for name in COMMAND_NAMES:
        result = measure_one(trace, name)
        assert result.name == name
        assert str(result.inputs["differs"] if result.value is not None else result.detail or result.reason)


@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        ("aggregate_gpu_utilization", (0.45 + 0.3) / 1, "fraction"),
        ("allreduce_comm_time_s", 20e-6, "s"),
        ("coll_call_num", 24, "calls"),
        ("avg_comm_kernel_time_s", 15e-6, "s"),
        ("total_kernel_time", 6 * 75e-6, "s"),
        ("communication_ratio", (30 / 70 + 30 / 80) / 2, "fraction"),
        ("total_trace_time", 590e-6, "s"),
    ],
)
def test_values_of_names_of_their_command(trace: TraceView, name: str, value: float, unit: str) -> None:
    result = measure_one(trace, name)
    assert (result.value, result.unit) == (pytest.approx(value), unit)


def test_utilization_of_all_reduces_is_another_quantity_than_bus_bandwidth(trace: TraceView) -> None:
    for name in ("bandwidth_utilization", "bandwidth_utilization_group_1"):
        assert measure_one(trace, name).inputs["answered_by"] == "bw_util"
    assert measure_one(trace, "bandwidth_utilization_allreduce_group_6").unit == "GB/s"


def test_a_what_if_is_not_a_property_of_a_trace(trace: TraceView) -> None:
    result = measure_one(trace, "scale_up_bw_utility")
    assert result.value is None
    assert "--scale-up-bw 2x" in result.detail
