"""Totals, launches, the roofline and serving throughput by hand; laws of intervals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_measures import measure, roofline_table, step_timeline
from trace_tables import Timeline

from cclsearch.trace.events import CollectiveKind, Kind, OpShape, Reason
from cclsearch.trace.files.run_log import read_run_log
from cclsearch.trace.flops import count_op_bytes
from cclsearch.trace.intervals import (
    Int64s,
    clip_spans,
    covered_ns,
    gaps_in_windows,
    intersect_spans,
    invert_spans,
    merge_spans,
    outermost,
    subtract_spans,
    total_ns,
    unite_spans,
)
from cclsearch.trace.metric import Status
from cclsearch.trace.names.kernels import ComputeClass


def test_seconds_of_kernels_and_compute_are_covered_per_step_and_summed_beside():
    timeline = Timeline(world_size=1)
    for i in range(6):
        number, begin = timeline.step(i * 100, i * 100 + 50), i * 100
        timeline.kernel(begin, 40, "gemm", name_class=ComputeClass.GEMM, step_id=number)
        timeline.kernel(begin + 20, 40, "norm", name_class=ComputeClass.NORM, step_id=number, stream=8)
        timeline.collective(begin + 50, 20, step_id=number)
        timeline.copy(begin + 90, 5, step_id=number)
    table = timeline.table()
    compute, kernels = measure([table], "compute_time"), measure([table], "kernel_time")
    assert compute.value == pytest.approx(60e-6)
    assert compute.inputs["summed_s"] == pytest.approx(80e-6)
    assert compute.inputs["by_class_s"] == pytest.approx({"gemm": 40e-6, "norm": 40e-6})
    assert kernels.value == pytest.approx(70e-6)
    assert kernels.inputs["whole_file_summed_s"] == pytest.approx(600e-6)
    assert measure([table], "busy_frac").value == pytest.approx(0.75)
    assert measure([table], "comm_kernel_frac").value == pytest.approx(0.2)
    assert measure([table], "trace_span").value == pytest.approx(595e-6)


def test_collectives_are_counted_and_timed_by_kind():
    timeline = Timeline(world_size=1)
    for i in range(6):
        number, begin = timeline.step(i * 100, i * 100 + 50), i * 100
        timeline.kernel(begin, 10, step_id=number)
        timeline.collective(begin + 10, 10, step_id=number)
        timeline.collective(begin + 30, 30, step_id=number)
        timeline.collective(begin + 70, 5, CollectiveKind.ALL_GATHER, step_id=number)
    table = timeline.table()
    calls, mean = measure([table], "comm_calls"), measure([table], "comm_mean_time")
    assert calls.value == 3
    assert calls.inputs["by_collective"] == {"all_reduce": 2, "all_gather": 1}
    assert calls.inputs["whole_file_all_ranks"] == 18
    assert mean.value == pytest.approx(15e-6)
    by_collective = mean.inputs["by_collective"]
    gathers = by_collective["all_gather"]
    assert gathers == {"mean_s": pytest.approx(5e-6), "median_s": pytest.approx(5e-6), "num_calls": 4}


def test_a_trace_without_communication_has_no_calls_and_no_mean():
    timeline = Timeline()
    timeline.kernel(0, 10)
    calls, mean = (measure([timeline.table()], name) for name in ("comm_calls", "comm_mean_time"))
    assert (calls.value, calls.unit) == (0, "calls")  # without steps, the calls of the whole file
    assert measure([step_timeline().table()], "comm_calls").unit == "calls/step"
    assert mean.reason is Reason.NO_COMM_EVENTS


def test_launch_statistics_count_delays_calls_and_short_events():
    timeline = Timeline()
    slow = timeline.add(Kind.RUNTIME, 0, 60, "cudaLaunchKernel", device=-1)
    timeline.kernel(70, 50, launch=slow)
    quick = timeline.add(Kind.RUNTIME, 100, 10, "cudaLaunchKernel", device=-1)
    timeline.kernel(310, 5, launch=quick)
    result = measure([timeline.table()], "launch_delay")
    assert result.value == pytest.approx((10e-6 + 200e-6) / 2)
    assert result.inputs["num_delays_above_100_us"] == 1
    assert result.inputs["num_calls_above_50_us"] == 1
    assert result.inputs["num_events_shorter_than_their_call"] == 2


def test_queue_length_is_weighted_by_time():
    timeline = Timeline()
    timeline.kernel(30, 10, launched_us=0)
    timeline.kernel(40, 10, launched_us=10)
    result = measure([timeline.table()], "queue_length")
    assert result.value == pytest.approx((1 * 10 + 2 * 20 + 1 * 10) / 40)
    assert (result.inputs["p5"], result.inputs["p95"], result.inputs["max"]) == (1, 2, 2)


def test_durations_of_kernels_have_a_histogram():
    timeline = Timeline()
    for duration in (1.5, 3, 3, 60):
        timeline.kernel(100 * duration, duration)
    inputs = measure([timeline.table()], "small_kernel_frac").inputs
    assert (inputs["num_small"], inputs["num_kernels"]) == (3, 4)
    histogram = inputs["histogram"]
    assert {name: entry["num_kernels"] for name, entry in histogram.items() if isinstance(entry, dict)} == {
        "1 to 2 us": 1,
        "2 to 5 us": 2,
        "50 to 100 us": 1,
    }


@pytest.mark.parametrize(
    ("name", "dims", "elements"),
    [
        ("aten::mm", ((4, 8), (8, 2)), 4 * 8 + 8 * 2 + 4 * 2),
        ("aten::addmm", ((2,), (4, 8), (8, 2)), 2 + 4 * 8 + 8 * 2 + 4 * 2),
        ("aten::bmm", ((3, 4, 8), (3, 8, 2)), 3 * (4 * 8 + 8 * 2 + 4 * 2)),
        ("aten::_scaled_dot_product_flash_attention", ((1, 2, 16, 8),) * 3, 4 * 2 * 16 * 8),
        ("aten::relu", ((4, 8),), None),
    ],
)
def test_bytes_of_an_operator(name, dims, elements):
    shape = OpShape(dims, ("c10::BFloat16",) * len(dims))
    assert count_op_bytes(name, shape) == (None if elements is None else 2 * elements)
    assert count_op_bytes(name, OpShape(dims, ("unheard of",))) is None


def shaped_timeline(*, unknown_us: float) -> Timeline:
    """A product far above the ridge of an H100 (30 us), one below (20 us), a norm (10 us), and an unknown kernel."""
    timeline = Timeline()
    for shape, start, duration in ((0, 10, 30), (1, 50, 20)):
        op = timeline.add(Kind.CPU_OP, start - 10, 5, "aten::mm", device=-1, shape_id=shape)
        timeline.kernel(start, duration, "nvjet", op=op, name_class=ComputeClass.GEMM)
    timeline.kernel(80, 10, "norm", name_class=ComputeClass.NORM)
    timeline.kernel(100, unknown_us, "mystery")
    return timeline


SHAPES = (
    OpShape(((8192, 8192), (8192, 8192)), ("c10::BFloat16", "c10::BFloat16")),
    OpShape(((1, 8192), (8192, 8192)), ("c10::BFloat16", "c10::BFloat16")),
)


def test_the_roofline_splits_compute_by_what_bounds_it():
    table = shaped_timeline(unknown_us=0).table(shapes=SHAPES)
    memory, compute = measure([table], "memory_bound_frac"), measure([table], "compute_bound_frac")
    assert memory.value == pytest.approx(0.5)
    assert compute.value == pytest.approx(0.5)
    assert memory.inputs["coverage"] == pytest.approx(1)
    assert memory.inputs["ridge_flop_per_byte"] == {"bf16": pytest.approx(989.4e12 / 3350e9)}
    operations = memory.inputs["operations"]
    assert isinstance(operations, list)
    assert [(entry["shape"], entry["bound"]) for entry in operations if isinstance(entry, dict)] == [
        ("8192x8192 8192x8192", "compute"),
        ("1x8192 8192x8192", "memory"),
    ]


def test_the_roofline_says_how_much_it_covers():
    table = shaped_timeline(unknown_us=40).table(shapes=SHAPES)
    result = measure([table], "compute_bound_frac")
    assert (result.value, result.status, result.reason) == (pytest.approx(0.3), Status.PARTIAL, Reason.NO_SHAPES)
    assert "60% of compute time" in result.detail
    norms = shaped_timeline(unknown_us=0)
    norms.kernel(900, 20, "rms_norm", name_class=ComputeClass.NORM)
    assert (
        "of compute time the kernel's class decides"
        in measure([norms.table(shapes=SHAPES)], "memory_bound_frac").detail
    )


def test_the_roofline_of_an_unknown_device_is_not_available():
    table = shaped_timeline(unknown_us=0).table(shapes=SHAPES, devices=())
    assert measure([table], "memory_bound_frac").reason is Reason.UNKNOWN_PEAK


def test_the_rate_of_products_says_how_much_it_covers():
    timeline = shaped_timeline(unknown_us=0)
    timeline.kernel(200, 150, "fused_moe_kernel", name_class=ComputeClass.MOE)
    result = measure([timeline.table(shapes=SHAPES)], "gemm_tflops")
    assert (result.status, result.inputs["coverage"]) == (Status.PARTIAL, pytest.approx(0.25))
    assert "25.0%" in result.detail


def test_the_roofline_of_xla_uses_its_cost():
    assert measure([roofline_table(4)], "compute_bound_frac").value == pytest.approx(0.8)


VLLM = {"date": "x", "duration": 4.0, "completed": 8, "total_input_tokens": 64, "total_output_tokens": 200}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vllm-1qps-model.json", json.dumps(VLLM, indent=1)),
        ("requests.json", json.dumps({**VLLM, "ttfts": [0.1], "itls": [[0.01, 0.03]]})),
        ("sglang_0410_8_sharegpt.jsonl", json.dumps({**VLLM, "duration": 9.0}) + "\n" + json.dumps(VLLM) + "\n"),
        (
            "requests.jsonl",
            "".join(json.dumps({"start_s": i / 2, "latency_s": 0.5, "output_tokens": 25}) + "\n" for i in range(8)),
        ),
    ],
)
def test_throughput_comes_from_the_load_generator(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    log = read_run_log(tmp_path)
    fields = {"run_log": log}
    tokens = measure([step_timeline().table()], "output_tokens_per_s", set_fields=fields)
    requests = measure([step_timeline().table()], "requests_per_s", set_fields=fields)
    assert (tokens.value, tokens.unit, requests.value) == (50.0, "tokens/s", 2.0)
    assert name in tokens.detail


@pytest.mark.parametrize(
    "text",
    [
        '{"completed": "many", "duration": -1}',
        '{"completed": true, "duration": NaN, "total_output_tokens": 1e999}',
        '["completed", "duration"]',
        '{"completed": 3, "duration": 0}',
        '{"duration": 1, "completed": 2.5, "itls": 7, "ttfts": {"a": 1}}',
        '{"completed" "duration"',
    ],
)
def test_odd_results_give_a_reason(tmp_path, text):
    for name in ("load.json", "load.jsonl", "requests.json", "requests.jsonl"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    fields = {"run_log": read_run_log(tmp_path)}
    for metric in ("output_tokens_per_s", "requests_per_s"):
        result = measure([step_timeline().table()], metric, set_fields=fields)
        assert (result.value, result.status) == (None, Status.NOT_AVAILABLE)
        assert result.reason in (Reason.NO_TRACE_FILES, Reason.FORMAT_UNSUPPORTED)


END = 120
PAIRS = st.lists(st.tuples(st.integers(0, END - 10), st.integers(0, 9)), max_size=40)
WINDOWS = st.lists(st.tuples(st.integers(-5, END + 5), st.integers(-5, END + 5)), max_size=8)


def merge(pairs: list[tuple[int, int]]) -> Int64s:
    """Return the union of spans given as start and length."""
    spans_N2 = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return merge_spans(spans_N2[:, 0], spans_N2.sum(axis=1))


SPANS = PAIRS.map(merge)


def mark(spans: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    marked = np.zeros(END, dtype=bool)
    for start, end in spans:
        marked[start:end] = True
    return marked


@given(SPANS, SPANS, st.integers(0, END), st.integers(0, END))
def test_set_operations_agree_with_marked_nanoseconds(a, b, one, other):
    low, high = sorted((one, other))
    inside = np.zeros(END, dtype=bool)
    inside[low:high] = True
    assert (mark(unite_spans(a, b)) == (mark(a) | mark(b))).all()
    assert (mark(intersect_spans(a, b)) == (mark(a) & mark(b))).all()
    assert (mark(subtract_spans(a, b)) == (mark(a) & ~mark(b))).all()
    assert (mark(clip_spans(a, low, high)) == (mark(a) & inside)).all()
    assert (mark(invert_spans(a, low, high)) == (~mark(a) & inside)).all()
    assert total_ns(a) == mark(a).sum()


@given(PAIRS.filter(len), st.lists(st.integers(1, 2), min_size=40, max_size=40))
def test_merged_and_united_spans_are_exact_sorted_disjoint_and_not_empty(few, lengths):
    """Few spans and many take different ways through `unite_spans`."""
    many = merge_spans(np.arange(0, 118, 3), np.arange(0, 118, 3) + lengths)
    united = unite_spans(merge(few[:3]), many)
    assert (mark(united) == (mark(merge(few[:3])) | mark(many))).all()
    for spans in (united, merge(few)):
        assert (spans[:, 1] > spans[:, 0]).all()
        assert (spans[1:, 0] > spans[:-1, 1]).all()


@given(SPANS, WINDOWS)
def test_windows_have_the_covered_time_and_the_gaps_of_each_alone(spans, windows):
    windows_W2 = np.sort(np.array(windows, dtype=np.int64).reshape(-1, 2), axis=1)
    covered = [mark(spans)[max(a, 0) : max(b, 0)].sum() for a, b in windows_W2.tolist()]
    assert covered_ns(spans, windows_W2).tolist() == covered
    gaps_G2, window_G = gaps_in_windows(spans, windows_W2)
    for window, (start, end) in enumerate(windows_W2.tolist()):
        assert gaps_G2[window_G == window].tolist() == invert_spans(spans, start, end).tolist()
    assert (np.diff(window_G) >= 0).all()


def test_times_above_two_to_the_fifty_keep_every_nanosecond():
    base = 1_712_195_495_505_582_988
    merged = merge_spans(np.array([base, base + 3]), np.array([base + 2, base + 4]))
    assert merged.tolist() == [[base, base + 2], [base + 3, base + 4]]
    assert total_ns(merged) == 3


def test_outermost_marks_spans_that_are_not_inside_another():
    start, end = np.array([0, 1, 2, 10, 10]), np.array([9, 5, 3, 20, 12])
    assert outermost(start, end).tolist() == [True, False, False, True, False]
