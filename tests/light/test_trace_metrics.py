"""Each metric on tables whose results follow from a few numbers."""

from __future__ import annotations

import pytest
from trace_measures import make_card, measure, step_timeline, two_ranks
from trace_tables import Timeline, make_set

from cclsearch.card.model import MoEArch, Phase
from cclsearch.core.values import Config
from cclsearch.trace.events import (
    CollectiveKind,
    Kind,
    Reason,
)
from cclsearch.trace.metric import Status
from cclsearch.trace.names.kernels import kernel_family
from cclsearch.trace.view import TraceView

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def test_step_time_is_the_median_device_period_of_the_slowest_rank():
    slow = step_timeline(1, 2)
    for row in slow.rows:
        row["ts_ns"] = row["ts_ns"] * 11 // 10
    result = measure([step_timeline(0, 2).table(), slow.table()], "trace_step_time")
    assert result.value == pytest.approx(110e-6)
    assert result.per_rank == {0: pytest.approx(100e-6), 1: pytest.approx(110e-6)}
    assert result.inputs["slowest_rank"] == 1
    assert result.n_steps == 4  # of six, the first and the last are trimmed
    assert result.inputs["cpu_step_time_s"] == pytest.approx(60e-6)


def test_three_steps_are_not_trimmed_and_the_last_has_no_period():
    result = measure([step_timeline(steps=3).table()], "trace_step_time")
    assert (result.n_steps, result.inputs["step_numbers"]) == (2, [0, 1])


def test_an_incomplete_step_ends_the_previous_window_and_has_no_window():
    timeline = step_timeline(steps=2)
    cut = timeline.step(200, 260, complete=False)
    timeline.kernel(205, 40, step_id=cut)
    result = measure([timeline.table()], "trace_step_time")
    assert result.inputs["step_numbers"] == [0, 1]
    assert result.value == pytest.approx(100e-6)


def test_one_step_has_the_extent_of_what_it_launched_and_is_partial():
    result = measure([step_timeline(steps=1).table()], "trace_step_time")
    assert result.value == pytest.approx(70e-6)  # its marker has 60 us
    assert (result.status, result.reason) == (Status.PARTIAL, Reason.TOO_FEW_STEPS)


def test_cpu_steps_run_from_marker_to_marker():
    table = step_timeline(steps=3).table(accelerator="cpu")
    result = measure([table], "trace_step_time")
    assert result.n_steps == 3
    assert result.per_step == (pytest.approx(100e-6), pytest.approx(100e-6), pytest.approx(60e-6))


def test_without_markers_only_shares_of_the_whole_file_are_available():
    timeline = Timeline()
    timeline.kernel(0, 30)
    timeline.kernel(70, 30)
    assert measure([timeline.table()], "trace_step_time").reason is Reason.NO_STEP_MARKERS
    share = measure([timeline.table()], "compute_frac")
    assert (share.value, share.status, share.reason) == (0.6, Status.PARTIAL, Reason.NO_STEP_MARKERS)


@pytest.mark.parametrize(
    ("name", "share"),
    [("compute_frac", 0.4), ("exposed_comm_frac", 0.2), ("exposed_mem_frac", 0.1), ("idle_frac", 0.3)],
)
def test_shares_of_a_step(name, share):
    result = measure([step_timeline().table()], name)
    assert result.value == pytest.approx(share)
    assert result.per_step == pytest.approx([share] * 4)


def test_overlap_is_the_share_of_communication_during_compute():
    timeline = Timeline()
    for i in range(5):
        number = timeline.step(i * 100, i * 100 + 90)
        timeline.kernel(i * 100, 40, step_id=number)
        timeline.collective(i * 100 + 30, 40, step_id=number)
    assert measure([timeline.table()], "overlap").value == pytest.approx(0.25)


def test_waiting_is_the_duration_beyond_the_shortest_over_ranks():
    result = measure(two_ranks(), "comm_wait_frac")
    moving = 20 + 30 + 50
    assert result.per_rank[0] == pytest.approx(45 / (45 + moving))
    assert result.per_rank[1] == 0.0


def test_hockney_fit_finds_latency_and_bandwidth():
    result = measure(two_ranks(), "hockney_fit")
    assert result.value == pytest.approx((1 << 20) / 10e-6)
    assert result.inputs["alpha_s"] == pytest.approx(10e-6)


def test_hockney_fit_needs_three_sizes():
    result = measure(two_ranks(sizes=(1 << 20, 2 << 20)), "hockney_fit")
    assert result.status is Status.NOT_AVAILABLE


def test_bandwidth_utilization_is_over_one_direction_of_the_cards_link():
    result = measure(two_ranks(sizes=(4 << 20,)), "bw_util", card=make_card())
    assert result.value == pytest.approx((4 << 20) / 50e-6 / 1e9 / 450)


def test_wire_bytes_count_the_collectives_factor():
    timeline = Timeline(world_size=4)
    for i in range(6):
        number = timeline.step(i * 100, i * 100 + 90)
        timeline.collective(i * 100, 10, CollectiveKind.ALL_REDUCE, 1000, step_id=number)
        timeline.collective(
            i * 100 + 20, 10, CollectiveKind.ALL_GATHER, None, in_bytes=250, out_bytes=1000, step_id=number
        )
        timeline.collective(i * 100 + 40, 10, CollectiveKind.BROADCAST, 1000, step_id=number)
    result = measure([timeline.table()], "comm_volume")
    assert result.inputs["wire_bytes_by_collective"] == {"all_reduce": 1500, "all_gather": 750, "broadcast": 1000}
    assert result.inputs["message_bytes"] == pytest.approx(3000)


def test_compute_imbalance_compares_ranks_of_a_stage():
    tables = []
    for rank, compute in enumerate((10, 10, 30, 50)):
        timeline = Timeline(rank=rank, world_size=4)
        timeline.kernel(0, compute)
        tables.append(timeline.table())
    assert measure(tables, "compute_imbalance").value == pytest.approx(50 / 25 - 1)
    staged = measure(tables, "compute_imbalance", config=Config(pp=2, tp=2))
    assert staged.value == pytest.approx(50 / 40 - 1)


def test_pipeline_bubble_is_the_time_without_work_and_collectives():
    tables = []
    for rank in range(2):
        timeline = Timeline(rank=rank, world_size=2)
        for i in range(6):
            number = timeline.step(i * 100, i * 100 + 95)
            timeline.kernel(i * 100, 50, step_id=number)
            timeline.collective(
                i * 100 + 50, 10, CollectiveKind.SEND_RECV, 1000, group="1", peer=1 - rank, step_id=number
            )
            timeline.collective(i * 100 + 60, 15, CollectiveKind.ALL_REDUCE, 1000, step_id=number)
        tables.append(timeline.table())
    config = Config(pp=2, dp=1, micro_batch_size=2)
    result = measure(tables, "pipeline_bubble", config=config, card=make_card())
    assert result.value == pytest.approx(0.35)
    assert result.inputs["ideal"] == pytest.approx(1 / 9)


def test_moe_balance_reads_the_load_from_the_splits():
    tables = []
    for rank, received in enumerate(((30, 30), (10, 10))):
        timeline = Timeline(rank=rank, world_size=2)
        timeline.collective(
            0, 10, CollectiveKind.ALL_TO_ALL, 80, in_splits=((30, 10), (30, 10))[rank], out_splits=received
        )
        tables.append(timeline.table())
    card = make_card(moe=MoEArch(num_experts=8, top_k=2, expert_intermediate_size=64))
    assert measure(tables, "moe_balance", card=card).value == pytest.approx(1.5)
    assert measure(tables, "moe_balance", card=make_card()).reason is Reason.CARD_MISSING_FIELD


def test_critical_path_of_a_queued_stream_is_its_work():
    timeline = Timeline()
    for i in range(6):
        number = timeline.step(i * 100, i * 100 + 10)
        timeline.kernel(i * 100 + 10, 70, launched_us=i * 100, step_id=number)
        timeline.copy(
            i * 100 + 80, 30, step_id=number, launch=timeline.add(Kind.RUNTIME, i * 100 + 1, 1, "cudaMemcpyAsync")
        )
    path = measure([timeline.table()], "critical_path")
    assert path.value == pytest.approx(0.7)
    assert path.inputs["memcpy_share"] == pytest.approx(0.3)


def test_critical_path_continues_on_the_rank_that_arrives_last():
    tables = []
    for rank in range(2):
        timeline = Timeline(rank=rank, world_size=2)
        for i in range(6):
            number, begin = timeline.step(i * 100, i * 100 + 5), i * 100
            compute = 80 if rank else 30
            timeline.kernel(begin, compute, launched_us=begin - 1, step_id=number)
            launch = timeline.add(Kind.RUNTIME, begin, 1, "cudaLaunchKernel", device=-1)
            timeline.collective(begin + compute, 100 - compute, step_id=number, launch=launch)
        tables.append(timeline.table())
    path = measure(tables, "critical_path")
    assert path.value == pytest.approx(0.8)
    assert path.inputs["transfer_share"] == pytest.approx(0.2)
    assert path.inputs["wait_share"] == 0.0


def test_first_token_and_token_times_end_with_the_device():
    timeline = Timeline()
    for i, name in enumerate(
        ["execute_context_1(512)_generation_0(0)"]
        + ["execute_context_0(0)_generation_4(4)"] * 3
        + ["execute_context_1(8)_generation_4(4)"]
    ):
        number = timeline.step(i * 100, i * 100 + 20, name=name)
        timeline.kernel(i * 100 + 10, 60 if i == 0 else 30, step_id=number)
    table = timeline.table(step_source="inference")
    card = make_card(phase=Phase.INFERENCE)
    assert measure([table], "ttft", card=card).value == pytest.approx(70e-6)
    decode = measure([table], "tpot", card=card)
    assert decode.value == pytest.approx(100e-6)  # device end to device end
    assert decode.inputs["num_mixed_steps"] == 1
    assert measure([table], "ttft", card=make_card()).reason is Reason.PHASE_MISMATCH


def test_a_decode_step_without_another_before_it_takes_its_device_time():
    timeline = Timeline()
    for i, name in enumerate(["execute_context_0(0)_generation_4(4)", "execute_context_1(8)_generation_0(0)"] * 2):
        number = timeline.step(i * 100, i * 100 + 40, name=name)
        timeline.kernel(i * 100 + 30, 50, step_id=number)
    decode = measure([timeline.table(step_source="inference")], "tpot")
    assert decode.value == pytest.approx(50e-6)  # 80 us from the host's start, which is before the launches
    assert "without host time" in decode.detail


def test_scaling_efficiency_splits_the_loss_by_cause():
    base = TraceView(make_set([step_timeline(0, 1).table()]))
    halves = [step_timeline(rank, 2, period_us=60).table() for rank in range(2)]
    result = measure(halves, "scaling_efficiency", baseline=base)
    assert result.value == pytest.approx(100 / 60 / 2)
    lost = sum(
        float(str(result.inputs[f"lost_to_{name}_s"])) for name in ("compute", "exposed_comm", "exposed_mem", "idle")
    )
    assert lost == pytest.approx(60e-6 - 50e-6)
    assert result.reason is Reason.CARD_MISSING_FIELD  # strong scaling is assumed without a card


def test_weak_scaling_uses_the_batch_of_each_card():
    base = TraceView(make_set([step_timeline(0, 1).table()]), card=make_card(global_batch_size=8, num_accelerators=1))
    larger = [step_timeline(rank, 2, period_us=125).table() for rank in range(2)]
    result = measure(larger, "scaling_efficiency", card=make_card(global_batch_size=16), baseline=base)
    assert result.value == pytest.approx(100 / 125)
    assert (result.inputs["rule"], result.status) == ("weak", Status.OK)
    lost = sum(float(str(result.inputs[f"lost_to_{n}_s"])) for n in ("compute", "exposed_comm", "exposed_mem", "idle"))
    assert lost == pytest.approx(25e-6)


def test_quality_names_the_weakest_share():
    timeline = step_timeline(0, 4)
    result = measure([timeline.table()], "trace_quality", set_fields={"world_size": 4})
    assert result.value == pytest.approx(0.25)
    assert result.inputs["weakest"] == "ranks_seen"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::F<float>>(int, F)",
            "at::native::vectorized_elementwise_kernel",
        ),
        ("std::enable_if<(((16)>(0)))&&v::C<B>::exists, void>::type vllm::norm_kernel<B, 8>(B*)", "vllm::norm_kernel"),
        ("void cutlass::Kernel<cutlass_80_gemm_128x64, x>(T::Params)", "cutlass::Kernel<cutlass_80_gemm_128x64>"),
        ("void (anonymous namespace)::softmax<1>(float*)", "softmax"),
        ("volta_sgemm_128x64_nn", "volta_sgemm_128x64_nn"),
        ("fusion.123", "fusion"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add"),
    ],
)
def test_kernel_families(name, family):
    assert kernel_family(name) == family


def test_top_kernels_share_time_by_family():
    timeline = Timeline()
    timeline.kernel(0, 30, "gemm<1>(int)")
    timeline.kernel(30, 30, "gemm<2>(int)")
    timeline.kernel(60, 40, "norm(int)")
    result = measure([timeline.table()], "concentration")
    assert (result.value, result.inputs["kernel"]) == (pytest.approx(0.6), "gemm")


def test_one_reason_does_not_hide_another():
    timelines = [step_timeline(rank, 3, steps=1) for rank in (0, 1)]
    tables = [timelines[0].table(), timelines[1].table(), Timeline(rank=2, world_size=3).table()]
    found = measure(tables, "idle_frac", set_fields={"reasons": (Reason.TRACE_TRUNCATED,), "message": "rank 1 is cut"})
    assert found.reason is Reason.TOO_FEW_STEPS
    assert found.detail == "one step only; rank 1 is cut; no device event of rank 2"


def test_communication_time_by_link_follows_the_cards_nodes():
    timeline = Timeline(world_size=16)
    timeline.collective(0, 10, group_ranks=tuple(range(8)), group="tp", group_size=8)
    timeline.collective(20, 30, group_ranks=(0, 8), group="dp", group_size=2)
    by_link = measure([timeline.table()], "comm_time", card=make_card()).inputs["by_link_s"]
    assert by_link == {"inter_node": pytest.approx(30e-6), "intra_node": pytest.approx(10e-6)}
