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
    assert result.inputs["answered_by"] in METRICS.names()
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
    "prefix", ["collective_vol", "collective_vol_*", "bandwidth_utilization", "bandwidth_utilization_"]
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
