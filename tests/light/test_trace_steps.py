"""Steps of traces, by markers and at random."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import trace_writer as write
from trace_measures import measure
from trace_tables import Timeline

from cclsearch.plugins import METRICS
from cclsearch.trace.events import EventTable, Kind, Reason
from cclsearch.trace.names.kinds import read_marker
from cclsearch.trace.read import read_traces
from cclsearch.trace.score import diagnose_trace
from cclsearch.trace.view import RankView, TraceView


def table_of(tmp_path: Path, events: list[dict[str, Any]]) -> EventTable:
    write.write_kineto(tmp_path / "rank0.json", write.kineto_document(events))
    return read_traces(tmp_path, use_cache=False).tables[0]


def kernel(start: float, dur: float, corr: int | None, launched: float = 0.0, stream: int = 7) -> list[dict[str, Any]]:
    """A kernel and, with a correlation id, the call that launched it."""
    shown = {"device": 0, "stream": stream, **({} if corr is None else {"correlation": corr})}
    events = [write.span("kernel", "gemm", start, dur, tid=stream, **shown)]
    return events + (
        [] if corr is None else [write.span("cuda_runtime", "cudaLaunchKernel", launched, 2, correlation=corr)]
    )


def windows_us(table: EventTable) -> list[tuple[float, float]]:
    return [(start / 1000, end / 1000) for start, end in RankView(table).windows.spans_W2.tolist()]


@pytest.mark.parametrize(
    ("name", "source", "counts"),
    [
        ("ProfilerStep#12", "profiler_step", (None, None)),
        ("execute_context_1(888_788544)_generation_0(0)", "inference", (1, 0)),
        (
            "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)",
            "inference",
            (0, 32),
        ),
        ("execute_8192_context_9(sq8155sk8430)_generation_37(sq37sk80)", "inference", (9, 37)),
        ("execute_model", "inference", (None, None)),
        ("step[DECODE bs=32]", "inference", (0, 32)),
        ("step[EXTEND bs=15 toks=15360]", "inference", (15, 0)),
        ("step[DECODE bs=4 g_sqsq=4 g_sqsk=80 g_sk=80]", "inference", (0, 4)),
        ("step[MIXED bs=9 c=2 g=7 c_sq=512]", "inference", (2, 7)),
        ("step[MIXED bs=9]", "inference", (None, None)),
        ("step[TARGET_VERIFY bs=8]", "inference", (None, None)),
        ("scheduler.run_batch", "inference", (None, None)),
        ("run_batch", "inference", (None, None)),
        ("[Executor] _forward_step 12: 1 ctx reqs, 7 gen reqs", "inference", (1, 7)),
        ("[Executor] _forward_step 60000: 0 ctx reqs, 0 ctx tokens, 32 gen reqs", "inference", (0, 32)),
        ("[Executor] _forward_step: 2 ctx reqs, 0 gen reqs", "inference", (2, 0)),
        ("prefill[bs=3 tok=512]", "inference", (3, 0)),
        ("decode[bs=128 tok=128 d=128]", "inference", (0, 128)),
        ("decode[bs=128 tok=128 p=2 d=126 spec=3]", "inference", (2, 126)),
        ("Optimizer.step#AdamW.step", "optimizer", (None, None)),
        ("PjitFunction(train_step)", "program", (None, None)),
    ],
)
def test_names_that_mark_steps(name, source, counts):
    marker = read_marker(name)
    assert (marker.source, (marker.num_prefill, marker.num_decode)) == (source, counts)


@pytest.mark.parametrize(
    "name",
    [
        *("Optimizer.zero_grad#SGD.zero_grad", "draft step[DECODE bs=8]", "run_batched_gemm", "step_3", "decode"),
        *("execute_context", "DistributedDataParallel.forward", "aten::mm", "ThunkExecutor::Execute", ""),
    ],
)
def test_names_that_mark_no_step(name):
    assert read_marker(name) is None


def test_the_annotation_on_the_device_says_what_a_step_ran_if_launches_are_missing(tmp_path):
    events = [write.span("user_annotation", "ProfilerStep#5", 1000, 900)]
    events += [write.span("gpu_user_annotation", "ProfilerStep#5", 2000, 500, tid=7, device=0, stream=7)]
    events += [*kernel(1200, 100, None), *kernel(2000, 200, None), *kernel(2300, 200, None)]
    table = table_of(tmp_path, events)
    assert table.step_id[RankView(table).device_rows].tolist() == [-1, 0, 0]
    assert windows_us(table) == [(1000.0, 1500.0)]


def test_markers_on_the_device_alone_mark_steps_once_over_its_streams(tmp_path):
    events = []
    for i in range(3):
        begin = 1000.0 + 500 * i
        for stream, offset in ((7, 0.0), (9, 3.0)):
            shown = {"device": 0, "stream": stream}
            events.append(write.span("gpu_user_annotation", "step[DECODE bs=4]", begin + offset, 200, tid=7, **shown))
        events += kernel(begin, 150, None)
    table = table_of(tmp_path, events)
    assert (table.step_source, len(table.steps)) == ("gpu_annotation", 3)
    assert windows_us(table) == [(0.0, 500.0), (500.0, 1000.0)]
    step = measure([table], "trace_step_time")
    assert step.value == pytest.approx(500e-6)
    assert "cpu_step_time_s" not in step.inputs
    assert measure([table], "tpot").value == pytest.approx(500e-6)


def test_a_complete_last_step_is_used_if_there_is_no_other():
    timeline = Timeline()
    for i, complete in enumerate((False, True)):
        number = timeline.step(i * 100, i * 100 + 60, complete=complete)
        timeline.kernel(i * 100 + 20, 50, launched_us=i * 100 + 1, step_id=number)
    windows = RankView(timeline.table()).windows
    assert windows.spans_W2.tolist() == [[120_000, 170_000]]
    assert (windows.numbers, windows.reason) == ((1,), Reason.TOO_FEW_STEPS)


def test_a_step_of_sglang_takes_the_counts_of_the_marker_inside(tmp_path):
    events: list[dict[str, Any]] = []
    for i in range(3):
        begin = 1000.0 + 400 * i
        events.append(write.span("user_annotation", "scheduler.run_batch", begin, 100))
        events.append(write.span("user_annotation", "step[DECODE bs=32]", begin + 10, 50))
        events += [*kernel(begin + 100, 150, 2 * i + 1, begin + 20), *kernel(begin + 260, 40, 2 * i + 2, begin + 80)]
    table = table_of(tmp_path, events)
    assert [(step.name, step.end_ns - step.start_ns) for step in table.steps] == [("step[DECODE bs=32]", 100_000)] * 3
    assert windows_us(table) == [(100.0, 500.0), (500.0, 900.0)]
    assert measure([table], "tpot").value == pytest.approx(400e-6)


def test_optimizer_steps_end_the_steps_of_a_trace_without_a_schedule(tmp_path):
    events: list[dict[str, Any]] = []
    for i in range(4):
        begin = 1000.0 + 300 * i
        events += kernel(begin + 50, 100, 2 * i + 1, begin + 10)
        events.append(write.span("user_annotation", "Optimizer.step#SGD.step", begin + 100, 50))
        events += kernel(begin + 160, 20, 2 * i + 2, begin + 110)
    table = table_of(tmp_path, events)
    assert table.step_source == "optimizer"
    step = measure([table], "trace_step_time")
    assert (step.value, step.n_steps) == (pytest.approx(300e-6), 2)  # the last step has no next one
    assert windows_us(table)[0][0] == 340.0  # the first period begins with the kernel after the first optimizer step


def test_one_optimizer_step_marks_no_step(tmp_path):
    events = [write.span("user_annotation", "Optimizer.step#SGD.step", 1000, 50), *kernel(1100, 100, 1, 1010)]
    assert table_of(tmp_path, events).steps == ()


def jax_space(programs: list[str]) -> bytes:
    """An XSpace of a GPU: each program launches one kernel of 600 us, 100 us after its call, for a period of 1 ms."""
    us = 10**6
    kernels, calls, launches = [], [], []
    for i, program in enumerate(programs):
        begin = i * 1000 * us
        calls += [(f"PjitFunction({program})", begin, 200 * us, {}), (f"PjitFunction({program})", begin, 190 * us, {})]
        launches.append(("hipModuleLaunchKernel", begin + 50 * us, us, {"correlation_id": i + 1, "hlo_op": "dot"}))
        kernels.append((f"gemm_{program}", begin + 100 * us, 600 * us, {"correlation_id": i + 1}))
    host = write.plane("/host:CPU", {"python": calls, "Host Threads/7": launches})
    return write.plane("/device:GPU:0", {"Stream #2": kernels}) + host


@pytest.mark.parametrize(
    ("programs", "numbers"),
    [
        (["step"] * 6, [1, 2, 3, 4]),
        (["grad", "update"] * 3, [0, 1]),
        (["matmul", "matmul", "exp", "matmul", "sqrt", "matmul"], []),
        (["step"], []),
    ],
)
def test_runs_of_the_main_program_of_jax_are_steps(tmp_path, programs, numbers):
    (tmp_path / "host0.xplane.pb").write_bytes(jax_space(programs))
    table = read_traces(tmp_path, use_cache=False).tables[0]
    windows = RankView(table).windows
    assert (table.step_source, list(windows.numbers)) == (("program", numbers) if numbers else ("", [-1]))
    if numbers:
        assert measure([table], "idle_frac").value == pytest.approx(0.4)


def test_steps_of_tensorrt_llm_are_nvtx_ranges(tmp_path):
    path = write.write_nsys(tmp_path / "report.sqlite", processes=1)
    with sqlite3.connect(path) as db:
        db.execute(
            "UPDATE NVTX_EVENTS SET text = replace(text, 'step ', '[Executor] _forward_step ') ||"
            " ': 0 ctx reqs, 8 gen reqs' WHERE text LIKE 'step %'"
        )
    db.close()
    table = read_traces(path, use_cache=False).tables[0]
    assert [step.number for step in table.steps] == [0, 1, 2]
    assert measure([table], "tpot").value == pytest.approx(1e-3)


def test_host_rows_of_a_device_marker_belong_to_no_step(tmp_path):
    events = [write.span("gpu_user_annotation", "run_batch", 1000, 100, tid=7, device=0, stream=7)]
    table = table_of(tmp_path, [*events, *kernel(1000, 100, 1, 1050)])
    assert table.step_id[table.rows_of(Kind.RUNTIME)].tolist() == [-1]


MARKERS = (
    "ProfilerStep#{i}",
    "execute_context_0(0)_generation_8(8)",
    "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk{i}sqsq32sqsk{i})",
    "step[DECODE bs=32]",
    "scheduler.run_batch",
    "execute_model",
    "[Executor] _forward_step {i}: 0 ctx reqs, 8 gen reqs",
    "decode[bs=8 tok=8 d=8]",
)
Span = tuple[float, float]


def covered(spans: Sequence[Span], window: Span) -> float:
    """Return the length of the union inside the window."""
    total, at = 0.0, window[0]
    for start, end in sorted(spans):
        start, end = max(start, at), min(end, window[1])
        if end > start:
            total, at = total + end - start, end
    return total


def write_random(folder: Path, seed: int) -> tuple[list[list[Span]], list[Span]]:
    """Write a trace; return the device spans of each step, and those of an earlier step without a launch record."""
    rng = random.Random(seed)
    marker, count = rng.choice(MARKERS), rng.choice([1, 1, 2, 3, 5])
    annotated, with_zero = rng.random() < 0.5, rng.random() < 0.5
    several_streams, host_us, gap_us = (
        rng.random() < 0.5,
        rng.choice([50.0, 400.0, 4000.0]),
        rng.choice([0.0, 500.0]),
    )
    backlog = [(1500.0, 1700.0)] if rng.random() < 0.3 else []
    events = [write.span("kernel", "gemm", s, e - s, tid=7, device=0, stream=7, correlation=9999) for s, e in backlog]
    host_at, device_at, steps = 1000.0, 2000.0, list[list[Span]]()
    for i in range(count):
        events.append(write.span("user_annotation", marker.format(i=i), host_at, host_us))
        spans: list[Span] = []
        kernels = rng.randint(1, 5)
        for j in range(kernels):
            corr, stream = 10 * i + j + 1, 7 + j * several_streams
            length = 0 if with_zero and j in (0, kernels - 1) and kernels > 2 else rng.randint(1, 300)
            start = device_at + rng.randint(0, 40)
            launch = write.span(
                "cuda_runtime", "cudaLaunchKernel", host_at + (j + 1) * host_us / 7, 1, correlation=corr
            )
            shown = {"device": 0, "stream": stream, "correlation": corr}
            events += [launch, write.span("kernel", "ampere_sgemm", start, length, tid=stream, **shown)]
            spans.append((start, start + length))
            device_at = start + length * rng.choice([0.5 if several_streams else 1, 1])
        first, last = min(start for start, _ in spans), max(end for _, end in spans)
        if annotated:
            shown = {"device": 0, "stream": 7}
            events.append(write.span("gpu_user_annotation", marker.format(i=i), first, last - first, tid=7, **shown))
        steps.append(spans)
        host_at += host_us + gap_us
        device_at = max(device_at, last, host_at) + rng.randint(0, 200)
    rng.shuffle(events)
    write.write_kineto(folder / rng.choice(["rank0.json", "rank0.json.gz"]), write.kineto_document(events))
    return steps, backlog


@pytest.mark.parametrize("seed", range(25))
def test_windows_follow_the_device_whatever_marks_the_steps(tmp_path, seed):
    steps, backlog = write_random(tmp_path, seed)
    starts = [min(start for start, _ in spans) for spans in steps]
    if len(steps) == 1:
        windows = [(starts[0], max(end for _, end in steps[0]))]
    else:  # from first event to first event; with four steps or more without the first
        windows = list(pairwise(starts))[1 if len(steps) >= 4 else 0 :]
    busy = [span for spans in steps for span in spans] + backlog
    total = sum(end - start for start, end in windows)
    trace = TraceView(read_traces(tmp_path, use_cache=False))
    step, idle = (METRICS.get(name)(trace) for name in ("trace_step_time", "idle_frac"))
    assert step.value == pytest.approx(median(end - start for start, end in windows) * 1e-6)
    assert idle.value == pytest.approx(1 - sum(covered(busy, window) for window in windows) / total, abs=1e-9)
    diagnosis = diagnose_trace(trace)
    assert sum(diagnosis.seconds_by_cause.values()) == pytest.approx(diagnosis.window_s)
