"""Windows of random Kineto traces beside an oracle of their own: what was put into the trace, not what was read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import trace_writer as write

from cclsearch.plugins import METRICS
from cclsearch.trace.diagnosis.diagnose import diagnose_trace
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

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
    streams, host_us, gap_us = (
        rng.choice([[7], [7, 20, 21]]),
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
            corr, stream = 10 * i + j + 1, rng.choice(streams)
            length = 0 if with_zero and j in (0, kernels - 1) and kernels > 2 else rng.randint(1, 300)
            start = device_at + rng.randint(0, 40)
            launch = write.span(
                "cuda_runtime", "cudaLaunchKernel", host_at + (j + 1) * host_us / 7, 1, correlation=corr
            )
            shown = {"device": 0, "stream": stream, "correlation": corr}
            events += [launch, write.span("kernel", "ampere_sgemm", start, length, tid=stream, **shown)]
            spans.append((start, start + length))
            device_at = start + length * rng.choice([0.5, 1])
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
def test_windows_follow_the_device_whatever_marks_the_steps(tmp_path: Path, seed: int) -> None:
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
