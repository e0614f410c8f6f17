"""The contract of a metric of traces, and a small trace to try one on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

from cclsearch.core.metrics import METRICS
from cclsearch.trace.events import Status, TraceSet
from cclsearch.trace.metric import MetricResult
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

STEPS, STEP_US = 4, 1000.0


def write_example_trace(folder: Path, ranks: int = 2) -> Path:
    """Write the Kineto traces of `ranks` GPUs: each step has a product of matrices, an all-reduce that it hides
    partly, and a copy. Returns the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        events = [event for step in range(STEPS) for event in _events_of_step(step, rank, ranks)]
        trace = {"distributedInfo": {"rank": rank, "world_size": ranks}, "traceEvents": events}
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return folder


def _events_of_step(step: int, rank: int, ranks: int) -> list[dict[str, Any]]:
    begin, corr = 1000.0 + STEP_US * step, 100 + 10 * step
    group = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "Group size": ranks}
    group |= {"dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": str(list(range(ranks)))}
    device: list[tuple[str, str, float, float, dict[str, Any], int]] = [
        ("kernel", "ampere_sgemm_128x64_tn", 50.0, 400.0 + 20 * rank, {}, 7),
        ("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL()", 250.0, 300.0, group, 20),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 650.0, 50.0, {"bytes": 4096}, 7),
    ]
    events = [_event("user_annotation", f"ProfilerStep#{step}", begin, 990.0, 1, {})]
    for n, (category, name, offset, duration, args, stream) in enumerate(device, start=1):
        link = {"correlation": corr + n}
        events.append(_event("cuda_runtime", "cudaLaunchKernel", begin + 10 * n, 5.0, 1, link))
        events.append(
            _event(category, name, begin + offset, duration, stream, {"device": rank, "stream": stream, **link, **args})
        )
    return events


def _event(category: str, name: str, ts: float, dur: float, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": args}


class MetricContract:
    """Subclass it, and set `metric`."""

    metric: ClassVar[str]
    """The registered name."""
    has_value: ClassVar[bool] = True
    """Whether the trace of `make_trace` has what the metric measures; if not, it must say so with a reason."""

    def make_trace(self, folder: Path) -> TraceSet:
        """Return a trace, on which the metric has a value if `has_value`; write its files in `folder`."""
        return read_traces(write_example_trace(folder), use_cache=False)

    def measure(self, trace: TraceSet) -> MetricResult:
        """Return the result of the metric."""
        result: MetricResult = METRICS.get(self.metric)(TraceView(trace))
        return result

    def test_it_is_described(self) -> None:
        """`ccl-search score --list` shows unit and one line about it."""
        found = METRICS.get(self.metric)
        assert found.name == self.metric
        assert found.summary, "a metric says in one line what it measures"
        assert "\n" not in found.summary
        assert isinstance(found.unit, str)

    def test_it_has_a_finite_value_that_does_not_change(self, tmp_path: Path) -> None:
        """Twice on the same trace, and on the trace read again."""
        trace = self.make_trace(tmp_path / "trace")
        first = self.measure(trace)
        if not self.has_value:
            assert (first.status, first.value) == (Status.NOT_AVAILABLE, None), "it has a value: set `has_value`"
            assert first.reason is not None
            return
        assert first.status is not Status.NOT_AVAILABLE, f"no value: {first.reason} {first.detail}"
        assert first.value is not None
        assert math.isfinite(first.value)
        assert self.measure(trace).value == first.value
        assert self.measure(self.make_trace(tmp_path / "again")).value == first.value

    def test_it_answers_with_a_reason_where_there_is_nothing_to_measure(self, tmp_path: Path) -> None:
        """No trace, a trace without device events, and a file that is cut: a reason, never an exception."""
        (tmp_path / "none").mkdir()
        write_example_trace(tmp_path / "cut", ranks=1)
        text = (tmp_path / "cut" / "rank0.json").read_text()
        (tmp_path / "cut" / "rank0.json").write_text(text[: len(text) // 2])
        host = tmp_path / "host"
        host.mkdir()
        events = [_event("cpu_op", "aten::add", 1000.0 + n, 0.5, 1, {}) for n in range(9)]
        (host / "rank0.json").write_text(json.dumps({"traceEvents": events}))
        for folder in ("none", "host", "cut"):
            result = self.measure(read_traces(tmp_path / folder, use_cache=False))
            raised = "the metric raised" in result.detail
            assert not raised, f"{folder}: {result.detail}; raise NotAvailable with a reason"
            assert (result.value is None) == (result.status is Status.NOT_AVAILABLE)
        assert self.measure(read_traces(tmp_path / "none", use_cache=False)).value is None
