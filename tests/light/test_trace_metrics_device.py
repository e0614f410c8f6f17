"""Metrics of one device: kernels, FLOP, memory and idle time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from trace_measures import make_card, measure, roofline_table, step_timeline
from trace_tables import Timeline, make_set

from cclsearch.card.model import MoEArch, Phase
from cclsearch.core.values import Config
from cclsearch.trace.ccl_bench import measure_by_name
from cclsearch.trace.events import (
    DeviceInfo,
    EventTable,
    Kind,
    LaunchShape,
    MemoryPoints,
    OpShape,
    Reason,
)
from cclsearch.trace.flops import count_op_flops
from cclsearch.trace.metric import Status
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.view import TraceView

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def test_allocation_and_waves_are_weighted_by_kernel_duration():
    timeline = Timeline()
    timeline.kernel(0, 30, blocks_per_sm=0.5, grid_id=0)
    timeline.kernel(30, 10, blocks_per_sm=3.0, grid_id=0)
    timeline.kernel(90, 10, blocks_per_sm=4.0, grid_id=0)
    table = timeline.table(grids=(LaunchShape(blocks=1, threads_per_block=1024),))
    assert measure([table], "allocation_ratio").inputs["sm_coverage"] == pytest.approx((0.5 * 30 + 20) / 50)
    assert measure([table], "allocation_ratio").value == pytest.approx((0.5 * 30 + 20) / 50 * 0.5)
    # 2048 threads fit two blocks: a quarter wave, one and a half waves, two waves
    waves = measure([table], "wave_balance")
    assert waves.value == pytest.approx((0.25 * 30 + 0.75 * 10 + 1.0 * 10) / 50)


def test_mfu_follows_the_usual_convention():
    result = measure(
        [step_timeline(0, 2, period_us=1e6).table(), step_timeline(1, 2, period_us=1e6).table()],
        "mfu",
        card=make_card(),
    )
    attention = 32 * (4096 * 128 * (32 + 8 + 8) + 32 * 128 * 4096)
    feed_forward = 32 * 3 * 4096 * 14336
    per_token = 6 * (attention + feed_forward + 128256 * 4096) + 12 * 32 * 4096 * 1024
    assert result.value == pytest.approx(per_token * 16 * 1024 / 1.0 / 2 / 989e12, rel=2e-3)
    causal = measure([step_timeline(0, 1, period_us=1e6).table()], "mfu_causal", card=make_card())
    plain = measure([step_timeline(0, 1, period_us=1e6).table()], "mfu", card=make_card())
    assert causal.value is not None
    assert plain.value is not None
    assert causal.value < plain.value


def test_a_value_above_the_peak_is_not_available():
    result = measure([step_timeline().table()], "mfu", card=make_card(num_accelerators=1))
    assert result.value is None
    assert "of the peak" in result.detail


def test_an_unknown_device_has_no_peak():
    table = step_timeline(period_us=1e6).table(devices=(DeviceInfo(0, "Mystery 9000"),))
    assert measure([table], "mfu", card=make_card()).reason is Reason.UNKNOWN_PEAK


def test_tokens_per_second_are_the_cards_batch_over_the_step_time():
    tables = [step_timeline(rank, 2).table() for rank in range(2)]
    assert measure(tables, "tokens_per_s", card=make_card()).value == pytest.approx(16 * 1024 / 100e-6)
    assert measure(tables, "tokens_per_s_per_device", card=make_card()).value == pytest.approx(8 * 1024 / 100e-6)
    inference = make_card(phase=Phase.INFERENCE)
    assert measure(tables, "tokens_per_s", card=inference).reason is Reason.PHASE_MISMATCH


@pytest.mark.parametrize(
    ("name", "dims", "scalars", "flops"),
    [
        ("aten::mm", ((4, 8), (8, 16)), (), 2 * 4 * 8 * 16),
        ("aten::addmm", ((16,), (4, 8), (8, 16)), (), 2 * 4 * 8 * 16),
        ("aten::bmm", ((3, 4, 8), (3, 8, 16)), (), 2 * 3 * 4 * 8 * 16),
        ("aten::linear", ((2, 4, 8), (16, 8), (16,)), (), 2 * 2 * 4 * 8 * 16),
        ("aten::_scaled_dot_product_flash_attention", ((2, 4, 8, 16),) * 3, (), 4 * 2 * 4 * 8 * 8 * 16),
        (
            "aten::convolution",
            ((2, 3, 8, 8), (5, 3, 3, 3), (), (), (), ()),
            ("", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False"),
            2 * 2 * 5 * 64 * 27,
        ),
        ("aten::cudnn_convolution", ((2, 3, 8, 8), (5, 3, 3, 3)), (), None),
        ("aten::mm", ((4, 8),), (), None),
        ("aten::relu", ((4, 8),), (), None),
    ],
)
def test_flops_of_an_operator(name, dims, scalars, flops):
    assert count_op_flops(name, OpShape(dims, scalars=scalars)) == flops


def test_gemm_rate_counts_an_operator_once_for_all_its_kernels():
    timeline = Timeline()
    op = timeline.add(Kind.CPU_OP, 0, 5, "aten::mm", device=-1, shape_id=0)
    timeline.kernel(10, 2, op=op, name_class=ComputeClass.GEMM)
    timeline.kernel(12, 2, "split_k_reduce", op=op)
    timeline.kernel(20, 50, "relu")
    table = timeline.table(shapes=(OpShape(((1000, 1000), (1000, 1000))),))
    assert measure([table], "gemm_tflops").value == pytest.approx(2e9 / 4e-6 / 1e12)


def test_cpu_operators_called_by_an_operator_are_not_counted_again():
    timeline = Timeline()
    timeline.kernel(0, 100, "aten::linear")
    for start, dur, name, shape in ((0, 100, "aten::linear", 0), (10, 80, "aten::mm", 1), (200, 50, "aten::mm", 1)):
        timeline.add(Kind.CPU_OP, start, dur, name, device=-1, stream=0, shape_id=shape)
    shapes = (OpShape(((10, 20), (30, 20))), OpShape(((10, 20), (20, 30))))
    timeline.kernel(200, 50, "aten::mm")
    result = measure([timeline.table(accelerator="cpu", shapes=shapes)], "gemm_tflops")
    assert result.inputs["flops"] == 2 * (2 * 10 * 20 * 30)


def test_copies_by_direction_in_decimal_gigabytes():
    timeline = Timeline()
    timeline.copy(0, 10, "Memcpy HtoD (Pinned -> Device)", bytes=100_000)
    timeline.copy(20, 10, "Memcpy DtoH (Device -> Pageable)", bytes=50_000)
    timeline.copy(40, 10, "Memcpy DtoD (Device -> Device)", bytes=1_000_000)
    timeline.kernel(60, 10, "CatArrayBatchedCopy_kernel")
    result = measure([timeline.table()], "mem_copy_bw")
    assert result.inputs["by_direction_gbps"] == {"h2d": 10.0, "d2h": 5.0, "d2d": 100.0}
    assert (result.value, result.inputs["direction"]) == (10.0, "h2d")  # directions are never mixed


def test_a_rank_without_copies_in_a_direction_has_no_value():
    up, down = Timeline(rank=0), Timeline(rank=1)
    up.copy(0, 10, "Memcpy HtoD (Pinned -> Device)", bytes=100_000)
    down.copy(0, 10, "Memcpy DtoH (Device -> Pageable)", bytes=50_000)
    result = measure([up.table(), down.table()], "mem_copy_bw")
    assert result.per_rank == {0: 10.0, 1: None}
    assert (result.value, result.n_ranks) == (10.0, 1)
    alone = measure([down.table()], "mem_copy_bw")
    assert (alone.value, alone.inputs["direction"]) == (5.0, "d2h")


def test_peak_memory_is_the_largest_total_of_the_allocator():
    points = MemoryPoints(
        np.arange(3), np.array([1, 900, 5]), np.array([-1, 1000, 1000]), np.array([0, 0, 0], dtype=np.int16)
    )
    timeline = Timeline()
    timeline.kernel(0, 1)
    assert measure([timeline.table(memory=points)], "peak_memory").value == 900


def idle_table(gap_us: float, launched_us: float, **columns: Any) -> EventTable:
    timeline = Timeline()
    for i in range(5):
        number, begin = timeline.step(i * 1000, i * 1000 + 990), i * 1000
        timeline.kernel(begin, 400, launched_us=begin - 5, step_id=number)
        launch = timeline.add(Kind.RUNTIME, begin + launched_us, 1, "cudaLaunchKernel", device=-1)
        timeline.add(
            columns.get("kind", Kind.COMPUTE),
            begin + 400 + gap_us,
            600 - gap_us,
            columns.get("name", "gemm"),
            launch=launch,
            step_id=number,
        )
        if "sync_us" in columns:
            timeline.add(Kind.RUNTIME, begin + 10, columns["sync_us"], "cudaDeviceSynchronize", device=-1)
    return timeline.table()


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        (idle_table(200, launched_us=590), "host_bound"),
        (idle_table(10, launched_us=100), "launch_overhead"),
        (idle_table(200, launched_us=590, sync_us=395), "sync"),
        (idle_table(200, launched_us=590, kind=Kind.MEMCPY, name="Memcpy HtoD (Pinned -> Device)"), "input"),
        (idle_table(200, launched_us=100), "unknown"),
    ],
)
def test_cause_of_an_idle_gap(table, cause):
    result = measure([table], "idle_cause")
    assert result.inputs["main"] == cause


def test_idle_cause_needs_launches():
    timeline = Timeline()
    timeline.kernel(0, 10)
    timeline.kernel(30, 10)
    assert measure([timeline.table()], "idle_cause").reason is Reason.NO_LAUNCH_RECORDS


def test_small_kernel_share_launch_rate_and_queue_depth():
    timeline = Timeline()
    for i in range(10):
        timeline.kernel(100 + 10 * i, 4 if i % 2 else 6, launched_us=i)
    table = timeline.table()
    assert measure([table], "small_kernel_frac").value == pytest.approx(0.4)
    rate = measure([table], "launch_rate")
    assert rate.value == pytest.approx(10 / 94e-6)
    assert rate.inputs["queue_depth_p50"] == pytest.approx(4.5)


@pytest.mark.parametrize("runs", [1, 4])
def test_the_roofline_weights_each_operation_by_its_runs(runs):
    result = measure([roofline_table(runs)], "resource_efficiency", card=make_card(num_accelerators=1))
    assert result.status is Status.OK
    assert result.inputs["flop_per_byte"] == pytest.approx((1e6 + runs * 9e8) / (1e6 * (1 + runs)))


def test_a_contradicted_device_count_makes_the_result_partial():
    tables = [step_timeline(rank, None, period_us=1e6).table() for rank in range(2)]
    names = ("mfu", "mfu_causal", "tokens_per_s_per_device")
    for name in names:
        assert measure(tables, name, card=make_card()).status is Status.OK
        short = measure(tables, name, card=make_card(num_accelerators=16))
        assert (short.status, short.reason) == (Status.PARTIAL, Reason.RANKS_MISSING)
        assert "traces of 2 devices" in short.detail
        fewer = measure(tables, name, card=make_card(num_accelerators=16), config=Config(dp=2, tp=1))
        assert fewer.status is Status.OK  # the configuration uses two of the sixteen
        assert measure(tables, name, card=make_card(), config=Config(dp=2, tp=2)).reason is Reason.RANKS_MISSING


def test_collective_groups_count_devices_without_a_trace():
    timeline = Timeline(world_size=None)
    for i in range(6):
        number = timeline.step(i * 1e6, i * 1e6 + 100)
        timeline.kernel(i * 1e6, 40, step_id=number)
        timeline.collective(i * 1e6 + 40, 20, group=None, group_size=2, world_size=8, step_id=number)
    result = measure([timeline.table()], "mfu", card=make_card(num_accelerators=8))
    assert (result.status, result.reason) == (Status.PARTIAL, Reason.RANKS_MISSING)
    assert result.inputs["num_devices"] == 8
    score = measure_by_name(TraceView(make_set([timeline.table()])), "gpu_step_score")["gpu_step_score"]
    assert (score.status, score.reason) == (Status.PARTIAL, Reason.RANKS_MISSING)


WINDOWED = (
    *("launch_rate", "gemm_tflops", "hfu", "resource_efficiency", "pipeline_bubble", "compute_frac"),
    *("small_kernel_frac", "top_kernels", "wave_balance", "critical_path", "moe_frac"),
)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_value_over_windows_that_are_not_steps_is_partial(name, steps):
    timeline = Timeline(world_size=2)
    for i in range(3):
        number = timeline.step(i * 100, i * 100 + 90) if i < steps else 0 if steps else -1
        timeline.kernel(i * 100 + 10, 20, launched_us=i * 100 + 1, step_id=number, op=0, blocks_per_sm=1.0, grid_id=0)
        op = timeline.add(Kind.CPU_OP, i * 100, 5, "aten::mm", device=-1, shape_id=0)
        timeline.rows[-2]["op"] = op
    shapes, grids = (OpShape(((8, 8), (8, 8))),), (LaunchShape(blocks=1, threads_per_block=1024),)
    tables = [timeline.table(rank=rank, shapes=shapes, grids=grids) for rank in range(2)]
    card = make_card(moe=MoEArch(num_experts=8, top_k=2, expert_intermediate_size=64))
    result = measure(tables, name, card=card, config=Config(pp=2, dp=1))
    reason = {0: Reason.NO_STEP_MARKERS, 1: Reason.TOO_FEW_STEPS, 3: None}[steps]
    assert result.value is not None, result.detail
    assert result.reason is reason


def test_a_value_over_the_whole_file_needs_no_steps():
    timeline = Timeline()
    timeline.copy(0, 10, bytes=1000)
    assert measure([timeline.table()], "mem_copy_bw").status is Status.OK
    timeline.kernel(20, 10, launched_us=1)
    assert measure([timeline.table()], "trace_quality").status is Status.OK


def test_rates_that_the_card_states_count_for_an_unknown_device():
    card, rates = make_card(), Config({"bf16": 1e18})
    stated = card.hardware.model_copy(update={"accelerator": "mystery", "peak_flops": rates, "memory_gb_per_s": 1000.0})
    table = step_timeline(period_us=1e6).table(devices=(DeviceInfo(0, "Mystery 9000"),))
    found = measure([table], "mfu", card=card.model_copy(update={"hardware": stated}))
    assert found.inputs["peak_flops"] == 1e18
    assert found.value is not None
