"""Known mistakes of trace tools, each as a case that must come out right."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trace_writer as write
from trace_tables import Timeline, make_set

from cclsearch.plugins import METRICS
from cclsearch.trace.events import CollectiveKind, EventTable, Kind, OpCost, Reason
from cclsearch.trace.metric import MetricResult, Status
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def measure(trace: list[EventTable] | TraceView, name: str) -> MetricResult:
    view = trace if isinstance(trace, TraceView) else TraceView(make_set(trace))
    result: MetricResult = METRICS.get(name)(view)
    return result


def kernel_event(name: str, ts: float, dur: float, *, corr: int) -> list[dict[str, Any]]:
    """Return a kernel and its launch as Kineto writes them."""
    launch = write.span("cuda_runtime", "cudaLaunchKernel", ts - 2, 1, correlation=corr)
    return [write.span("kernel", name, ts, dur, tid=7, device=0, stream=7, correlation=corr), launch]


def training_events(steps: int) -> list[dict[str, Any]]:
    events, corr = [], 0
    for i in range(steps):
        begin = 1000.0 + 1000 * i
        events.append(write.span("user_annotation", f"ProfilerStep#{i}", begin, 990))
        for k in range(20):
            corr += 1
            events += kernel_event(f"gemm_{k % 3}", begin + 10 + 40 * k, 30, corr=corr)
    return events


def read(folder: Path, events: list[dict[str, Any]], *, world: int = 1, gpu: bool = True) -> TraceView:
    write.write_kineto(folder / "rank0.json", write.kineto_document(events, world=world, gpu=gpu))
    return TraceView(read_traces(folder, use_cache=False))


def test_host_windows_are_not_used_for_device_work():
    """The host issues a step in 35 us, the device needs 96 us: most kernels start in the window of a later step."""
    timeline = Timeline()
    for i in range(6):
        number = timeline.step(i * 35, i * 35 + 34)
        timeline.kernel(50 + i * 96, 90, launched_us=i * 35 + 1, step_id=number)
    result = measure([timeline.table()], "trace_step_time")
    assert result.value == pytest.approx(96e-6)
    assert result.inputs["cpu_step_time_s"] == pytest.approx(34e-6)
    assert measure([timeline.table()], "compute_frac").value == pytest.approx(90 / 96)


def straggling_tables() -> list[EventTable]:
    """Rank 1 arrives last at every collective, so the others spend more time in it."""
    tables = []
    for rank in range(3):
        timeline = Timeline(rank=rank, world_size=3)
        for i in range(6):
            late = 60 if rank == 1 else rank
            timeline.kernel(i * 100, 20 + late)
            timeline.collective(i * 100 + 20 + late, 70 - late)
        tables.append(timeline.table())
    return tables


def test_the_straggler_is_the_last_arriver_not_the_rank_with_most_communication():
    tables = straggling_tables()
    assert measure(tables, "last_arriver").value == 1
    waits = measure(tables, "comm_wait_frac").per_rank
    assert waits[1] == 0.0
    assert min(waits[0] or 0, waits[2] or 0) > 0.5


def test_a_missing_rank_is_a_reason_not_perfect_balance():
    alone = straggling_tables()[:1]
    for name in ("last_arriver", "start_skew", "comm_wait_frac", "compute_imbalance"):
        result = measure(alone, name)
        assert (result.value, result.reason) == (None, Reason.RANKS_MISSING)


def test_bandwidth_does_not_count_waiting():
    """The collective takes 2146 us on the waiting rank and 10 us on the last arriver."""
    tables = reducing_ranks(lambda rank, _: ((0, 2146, 2 << 20), (2136, 10, 2 << 20))[rank], calls=1)
    assert measure(tables, "bus_bw").value == pytest.approx((2 << 20) / 10e-6 / 1e9)
    alone = measure(tables[:1], "bus_bw")
    assert (alone.status, alone.reason) == (Status.PARTIAL, Reason.RANKS_MISSING)
    assert "includes waiting" in alone.detail


def test_an_all_gather_moves_the_full_tensor_and_gigabytes_are_decimal():
    timeline = Timeline(world_size=8)
    timeline.collective(0, 100, CollectiveKind.ALL_GATHER, None, in_bytes=1_000_000, out_bytes=8_000_000)
    result = measure([timeline.table()], "bus_bw")
    assert result.value == pytest.approx(8_000_000 * 7 / 8 / 100e-6 / 1e9)


def test_an_unknown_data_type_is_named_not_dropped():
    timeline = Timeline(world_size=2)
    timeline.collective(0, 100, message_bytes=None, in_nelems=1000, out_nelems=1000, dtype="Int3")
    result = measure([timeline.table()], "comm_volume")
    assert (result.value, result.reason, "Int3" in result.detail) == (None, Reason.UNKNOWN_DTYPE, True)


def chips(count: int = 4) -> list[EventTable]:
    """A collective of 1 MB on each chip, with 1.86 times as much memory traffic."""
    tables = []
    for rank in range(count):
        timeline = Timeline(rank=rank)
        row = timeline.collective(0, 100, message_bytes=1_000_000, group_size=count)
        name_id = timeline.rows[row]["name_id"]
        table = timeline.table(
            format="xla", accelerator="tpu", op_costs={name_id: OpCost(flops=0.0, bytes_accessed=1_860_000.0)}
        )
        tables.append(table)
    return tables


def test_message_size_is_not_memory_traffic_and_volume_is_per_chip():
    volume = measure(chips(), "comm_volume")
    assert volume.inputs["message_bytes"] == pytest.approx(1_000_000)
    assert volume.value == pytest.approx(1_500_000)
    assert volume.inputs["all_ranks_bytes"] == pytest.approx(6_000_000)


def test_devices_are_not_summed_into_one_span():
    assert measure(chips(), "comm_time").value == pytest.approx(100e-6)
    assert measure(chips(), "exposed_comm_frac").value == pytest.approx(1.0)


def test_exposed_communication_is_not_a_sum_over_concurrent_kernels():
    timeline = Timeline()
    for i in range(6):
        number = timeline.step(i * 100, i * 100 + 90)
        timeline.kernel(i * 100, 85, step_id=number)
        timeline.collective(i * 100 + 5, 40, stream=20, step_id=number)
        timeline.collective(i * 100 + 45, 50, stream=21, step_id=number)
    result = measure([timeline.table()], "exposed_comm_frac")
    assert result.value == pytest.approx(0.10)  # the sum over kernels would be 90 / 175


def test_symmetric_memory_kernels_count_as_communication(tmp_path):
    events = kernel_event("multimem_all_reduce_kernel<float>", 1000, 90, corr=1)
    events += kernel_event("ncclDevKernel_AllGather_RING_LL", 1100, 10, corr=2)
    events += kernel_event("gemm", 1200, 100, corr=3)
    assert measure(read(tmp_path, events, world=8), "comm_time").value == pytest.approx(100e-6)


def test_a_kernel_named_copy_is_compute_and_a_copy_event_is_a_copy(tmp_path):
    events = kernel_event("void at::native::CatArrayBatchedCopy_kernel<float>", 1000, 50, corr=1)
    copied = {"device": 0, "stream": 7, "correlation": 2, "bytes": 4000}
    events.append(write.span("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1050, 4, tid=7, **copied))
    view = read(tmp_path, events)
    assert len(view.ranks[0].rows(Kind.MEMCPY)) == 1
    assert len(view.ranks[0].compute_kernels) == 1
    assert measure(view, "mem_copy_bw").inputs["by_direction_gbps"] == {"d2d": pytest.approx(1.0)}


def test_collectives_count_neither_as_compute_nor_as_coverage():
    tables = []
    for rank, compute in enumerate((100, 120)):
        timeline = Timeline(rank=rank, world_size=2)
        timeline.kernel(0, compute, blocks_per_sm=1.0)
        timeline.collective(compute, 600 - 4 * compute, blocks_per_sm=0.1)
        tables.append(timeline.table())
    result = measure(tables, "compute_imbalance")
    assert result.inputs["max_over_min"] == pytest.approx(1.2)
    assert measure(tables, "allocation_ratio").inputs["sm_coverage"] == pytest.approx(1.0)


def test_no_communication_differs_from_not_available():
    timeline = Timeline()
    timeline.kernel(0, 10)
    quiet = [timeline.table()]
    assert measure(quiet, "exposed_comm_frac").value == 0.0
    assert measure(quiet, "comm_time").value == 0.0
    overlap = measure(quiet, "overlap")
    assert (overlap.value, overlap.reason) == (None, Reason.NO_COMM_EVENTS)
    nothing = measure([Timeline().table()], "exposed_comm_frac")
    assert (nothing.value, nothing.reason) == (None, Reason.NO_GPU_EVENTS)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.97])
@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_file_gives_its_complete_steps_and_is_partial(tmp_path, share, packed):
    text = write.layout_kineto(write.kineto_document(training_events(steps=10))).encode()
    data = gzip.compress(text) if packed else text
    (tmp_path / f"rank0.json{'.gz' if packed else ''}").write_bytes(data[: int(len(data) * share)])
    result = measure(TraceView(read_traces(tmp_path, use_cache=False)), "trace_step_time")
    assert (result.status, result.reason) == (Status.PARTIAL, Reason.TRACE_TRUNCATED)
    assert result.value == pytest.approx(1000e-6, rel=0.01)


def test_a_cpu_trace_raises_nothing(tmp_path):
    reduced = {"Input Dims": [[1000]], "Input type": ["float"]}
    events: list[dict[str, Any]] = []
    for i in range(5):
        begin = 1000 + 100 * i
        events += [
            write.span("user_annotation", f"ProfilerStep#{i}", begin, 95),
            write.span("cpu_op", "aten::addmm", begin + 5, 40),
            write.span("cpu_op", "aten::copy_", begin + 10, 10),
            write.span("user_annotation", "gloo:all_reduce", begin + 50, 30, tid=12, **reduced),
        ]
    view = read(tmp_path, events, world=2, gpu=False)
    assert measure(view, "trace_step_time").value == pytest.approx(100e-6)
    assert measure(view, "compute_frac").value == pytest.approx(0.4)
    assert measure(view, "comm_volume").inputs["message_bytes"] == pytest.approx(4000)
    for name in METRICS.names():
        assert "raised" not in measure(view, name).detail


def test_ranks_whose_collectives_differ_are_not_matched_by_force():
    tables = reducing_ranks(lambda rank, call: (call * 100, 50, 2000 if (rank, call) == (1, 2) else 1000), calls=4)
    for name in ("comm_wait_frac", "last_arriver", "start_skew"):
        result = measure(tables, name)
        assert (result.value, result.reason) == (None, Reason.SEQUENCE_MISMATCH)
        assert "collective 2" in result.detail


def test_clocks_of_hosts_are_aligned_by_the_ends_of_collectives():
    tables = on_hosts(reducing_ranks(lambda rank, call: (call * 200 + 30 * rank, 80 - 30 * rank)), 7_000_000_123)
    assert measure(tables, "last_arriver").value == 1
    skew = measure(tables, "start_skew")
    assert skew.value == pytest.approx(30e-6)
    assert skew.inputs["clock_error_s"] == 0.0


def test_clocks_that_do_not_align_are_a_reason():
    tables = on_hosts(reducing_ranks(lambda rank, call: (call * 2000 + 700 * (call % 3) * rank, 300)))
    result = measure(tables, "last_arriver")
    assert (result.value, result.reason) == (None, Reason.NO_CLOCK_ALIGNMENT)
    assert measure(tables, "comm_wait_frac").reason is Reason.NO_CLOCK_ALIGNMENT  # 350 us off, and 300 us long


Place = Callable[[int, int], tuple[float, ...]]


def reducing_ranks(place: Place, *, ranks: int = 2, calls: int = 8) -> list[EventTable]:
    """Ranks whose collectives begin, last and transfer (1 MiB) as `place(rank, call)` says, in microseconds."""
    timelines = [Timeline(rank=rank, world_size=ranks) for rank in range(ranks)]
    for rank, timeline in enumerate(timelines):
        for call in range(calls):
            start_us, dur_us, *size = place(rank, call)
            timeline.collective(start_us, dur_us, message_bytes=int(size[0]) if size else 1 << 20)
    return [timeline.table() for timeline in timelines]


def on_hosts(tables: list[EventTable], base_ns: int = 0) -> list[EventTable]:
    """The same on a host each, whose clocks differ by so much from one to the next."""
    return [replace(table, host=f"node{rank}", base_ns=rank * base_ns) for rank, table in enumerate(tables)]


def same_host_ranks(shift_us: float, *, dur_us: float = 80, accelerator: str = "gpu") -> list[EventTable]:
    """Four ranks of one host; the collectives of the last rank are shifted."""
    tables = reducing_ranks(lambda rank, call: (call * 10_000 + shift_us * (rank == 3), dur_us), ranks=4)
    return [replace(table, accelerator=accelerator) for table in tables]


@pytest.mark.parametrize("shift_us", [10_000, 1000])
def test_collectives_of_two_runs_on_one_host_are_not_matched(shift_us):
    """One rank of four is from another run, which the median over all ranks would not show."""
    for name in ("start_skew", "last_arriver", "comm_wait_frac"):
        result = measure(same_host_ranks(shift_us), name)
        assert (result.value, result.reason) == (None, Reason.NO_CLOCK_ALIGNMENT)
        assert "before another begins" in result.detail
    bandwidth = measure(same_host_ranks(shift_us), "bus_bw")
    assert (bandwidth.status, bandwidth.reason) == (Status.PARTIAL, Reason.NO_CLOCK_ALIGNMENT)
    assert "includes waiting" in bandwidth.detail


def test_unnamed_groups_are_not_assumed_to_be_all_ranks_if_times_contradict_it():
    """Four devices that reduce in pairs, each pair at its own time, and then all together."""
    tables = []
    for rank in range(4):
        timeline = Timeline(rank=rank, world_size=4)
        for i in range(8):
            timeline.collective(i * 10_000 + 2000 * (rank // 2), 500, group=None)
            timeline.collective(i * 10_000 + 5000, 100, group="all", group_ranks=(0, 1, 2, 3))
        tables.append(timeline.table())
    wait = measure(tables, "comm_wait_frac")
    assert (wait.value, wait.status, wait.reason) == (0.0, Status.PARTIAL, Reason.NO_CLOCK_ALIGNMENT)
    assert wait.inputs["num_collectives"] == 8
    assert "not included: the group of all ranks" in wait.detail
    assert measure(tables, "start_skew").value == 0.0  # the ranks still share one clock


def test_the_clock_error_limit_applies_on_one_host_too():
    assert measure(same_host_ranks(700, dur_us=800), "start_skew").reason is Reason.NO_CLOCK_ALIGNMENT
    assert measure(same_host_ranks(100, dur_us=800), "start_skew").status is Status.OK


def test_ranks_that_share_cpu_cores_may_leave_a_collective_apart():
    """A thread leaves when a core is free, so a spread up to the collective's duration is not a clock error."""
    assert measure(same_host_ranks(700, dur_us=800, accelerator="cpu"), "start_skew").status is Status.OK
    assert measure(same_host_ranks(900, dur_us=800, accelerator="cpu"), "start_skew").value is None
