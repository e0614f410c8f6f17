"""Traces with broken or impossible values: right in figures, status and words.

Every form changes a trace of five steps of 1 ms with, per step, 700 us of compute, 100 us of exposed communication and
200 us without work; what remains of that is computed by hand from the change.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trace_writer as write
from rocprof_writer import rocprof_document, training_process

from cclsearch.plugins import METRICS
from cclsearch.trace.read import read_traces
from cclsearch.trace.readers.kineto.scanner import PieceScanner, library_path
from cclsearch.trace.score import diagnose_trace
from cclsearch.trace.view import TraceView

Events = list[dict[str, Any]]
KERNELS = (("at::add", 60, 200, 7), ("nvjet_gemm", 300, 300, 7), ("ncclDevKernel_AllReduce_Sum_bf16", 620, 100, 20))
KERNELS = (*KERNELS, ("multi_tensor_adam", 740, 200, 7))
INTACT = (0.7, 0.1, 0.2)
"""Compute, exposed communication and idle time of a step of 1 ms."""


def make_events(steps: int = 5) -> Events:
    """The events of rank 0."""
    events: Events = []
    for step in range(steps):
        begin = 1_700_000_005_000_000.0 + 1000 * step
        events.append(write.span("user_annotation", f"ProfilerStep#{step}", begin, 1000.0))
        for number, (name, start, duration, stream) in enumerate(KERNELS):
            corr = 10 * step + number + 1
            more = (
                write.collective_args(ranks=1) | {"Process Group Description": "default_pg"} if "nccl" in name else {}
            )
            shown = {"device": 0, "stream": stream, "correlation": corr, "blocks per SM": 2.0, **more}
            launch = write.span("cuda_runtime", "cudaLaunchKernel", begin + 5 * number, 4.0, correlation=corr)
            events += [launch, write.span("kernel", name, begin + start, float(duration), tid=stream, **shown)]
    return events


def of_step(events: Events, step: int, name: str) -> dict[str, Any]:
    """The kernel of that name in that step."""
    return [event for event in events if event["cat"] == "kernel" and name in event["name"]][step]


def without(events: Events, *categories: str) -> Events:
    return [event for event in events if event["cat"] not in categories]


def as_text(events: Events, **changes: Any) -> str:
    """The trace in Kineto's layout: of each event and of its arguments every member on a line."""
    document = write.kineto_document(events) | changes
    text = json.dumps(document, indent=2)
    return text


def in_kernels(pattern: str, new: str) -> Callable[[Events], str]:
    return lambda events: re.sub(pattern, lambda _: new, as_text(events))


def change(step: int, name: str, **values: Any) -> Callable[[Events], str]:
    def apply(events: Events) -> str:
        of_step(events, step, name).update(values)
        return as_text(events)

    return apply


def every(cat: str, **values: Any) -> Callable[[Events], str]:
    def apply(events: Events) -> str:
        for event in events:
            if event["cat"] == cat:
                event.update(values)
        return as_text(events)

    return apply


def shift_kernels(by_us: float) -> Callable[[Events], str]:
    def apply(events: Events) -> str:
        for event in events:
            event["ts"] += by_us if event["cat"] == "kernel" else 0
        return as_text(events)

    return apply


def add_zeros(events: Events) -> str:
    lost = [write.span("kernel", "lost", 0, 0, tid=7, device=0, stream=7, correlation=900 + n) for n in range(3)]
    return as_text(events[:6] + lost + events[6:])


def add_long(events: Events) -> str:
    shown = {"device": 0, "stream": 33, "correlation": 999}
    launch = write.span("cuda_runtime", "cudaLaunchKernel", 1_700_000_005_002_020.0, 4.0, correlation=999)
    return as_text([*events, launch, write.span("kernel", "odd", 1_700_000_005_002_100.0, 3000.0, tid=33, **shown)])


def nccl_on_the_host_only(backend: str) -> Callable[[Events], str]:
    def apply(events: Events) -> str:
        host = without(events, "kernel", "cuda_runtime")
        host += [
            write.span("user_annotation", f"{backend}:all_reduce", 1_700_000_005_000_100.0 + 1000 * n, 300.0)
            for n in range(5)
        ]
        host += [write.span("cpu_op", "aten::mm", 1_700_000_005_000_500.0 + 1000 * n, 300.0) for n in range(5)]
        return as_text(host, deviceProperties=[])

    return apply


DESCRIPTION = '"Process Group Description": "default_pg"'
VALUE_FORMS = {
    "empty description (kineto#1213)": in_kernels(DESCRIPTION, '"Process Group Description": '),
    "description of spaces only": in_kernels(DESCRIPTION, '"Process Group Description":     '),
    "description without quotes": in_kernels(DESCRIPTION, '"Process Group Description": default_pg'),
    "description with a bare quote": in_kernels(DESCRIPTION, '"Process Group Description": "default"pg"'),
    "quotes and line in a name (pytorch#113001)": in_kernels('"at::add"', '"at::add("_x", "y")\n(1): <m>"'),
    "backslashes (pytorch#98432)": in_kernels(DESCRIPTION, r'"Process Group Description": "C:\Users\_x"'),
    "backslash in a name": in_kernels('"at::add"', r'"torch\cuda\_add"'),
    "inf in all kernels": in_kernels('"blocks per SM": 2.0', '"blocks per SM": inf'),
    "-nan(ind) in all kernels": in_kernels('"blocks per SM": 2.0', '"blocks per SM": -nan(ind)'),
    "1.#INF in all kernels": in_kernels('"blocks per SM": 2.0', '"blocks per SM": 1.#INF'),
    "hex stream": in_kernels('"stream": 7', '"stream": 0x7'),
    "flow event without the last value, closed on that line": lambda events: re.sub(
        r'(?=\{\s+"ph": "X",\s+"cat": "kernel")', '{"ph": "f", "id": 1,\n      "bp":  },\n    ', as_text(events)
    ),
    "trailing commas": in_kernels('"blocks per SM": 2.0', '"blocks per SM": 2.0,'),
    "doubled commas": in_kernels('"device": 0,', '"device": 0,,'),
    "missing commas (pytorch#126703)": in_kernels('"device": 0,', '"device": 0'),
    "key without its first quote (pytorch#33961)": in_kernels('"tid": ', 'tid": '),
    "key without quotes": in_kernels('"tid": ', "tid: "),
    "text without its end": in_kernels('"Out split size": "\\[\\]"', '"Out split size": "[]'),
    "NUL and escape in a name (pytorch#130622)": in_kernels('"at::add"', '"at\x00\x1b[0m::add"'),
    "broken first event": in_kernels('"ProfilerStep#0",', '"ProfilerStep#0", "x": ,'),
    "broken last event": in_kernels('"correlation": 44,', '"correlation": 44, "x": ,'),
    "broken group in the head": in_kernels('"pg_desc": "default_pg"', '"pg_desc": '),
    "broken device in the head (perfetto#365)": in_kernels('"totalGlobalMem": 85899345920', '"totalGlobalMem": '),
    "broken field in the tail": in_kernels('"displayTimeUnit": "ms"', '"displayTimeUnit": ms, "x": nan'),
    "number twice in a key": in_kernels('"device": 0,', '"device": 0, "device": 0,'),
}
"""Form -> its text; a broken argument costs no figure."""

OTHER_FORMS: dict[str, tuple[Callable[[Events], str], tuple[float, float, float] | None, str, str]] = {
    "truncated duration of one collective": (
        change(2, "nccl", dur="@"),
        INTACT,
        "unreadable",
        "1 event with a broken time",
    ),
    "decimal comma in durations": (
        in_kernels('"dur": 300.0', '"dur": 300,000'),
        (2000 / 4880, 500 / 4880, 2380 / 4880),
        "unreadable",
        "5 events with a broken time",
    ),
    "kernel without a name": (
        in_kernels('"name": "at::add"', '"name": '),
        INTACT,
        "unreadable",
        "5 events with a broken time, name",
    ),
    "records with the time 0 (kineto#109)": (add_zeros, INTACT, "unreadable", "3 events with the time 0"),
    "kernel of 1.6 s in a stream (TraceLens#669)": (
        change(2, "at::add", dur=1_600_000.0),
        (0.7 + 0.04 / 3, 0.1, 0.2 - 0.04 / 3),
        "impossible_times",
        "1 of 20 kernels overlap",
    ),
    "collective of 5 ms in a stream": (
        change(2, "nccl", dur=5000.0),
        (0.7, 0.5 / 3, 0.4 / 3),
        "impossible_times",
        "1 of 20 kernels overlap",
    ),
    "kernel of 3 ms alone on its stream": (
        add_long,
        (0.9, 0.1 / 3, 0.2 / 3),
        "impossible_times",
        "longer than every step (odd: 3 ms in 1 ms)",
    ),
    "durations all 0": (every("kernel", dur=0), None, "impossible_times", "20 of 20 device events have"),
    "device's clock 5 ms early": (
        shift_kernels(-5000.0),
        INTACT,
        "impossible_times",
        "20 of 20 device events start before they were launched",
    ),
    "launches without kernels (kineto#996)": (
        lambda events: as_text(without(events, "kernel")),
        None,
        "missing_kernels",
        "20 kernel launches and no kernel",
    ),
    "only a device's name": (
        lambda events: as_text(without(events, "kernel", "cuda_runtime")),
        None,
        "no_gpu_events",
        "no event of a device",
    ),
    "nccl on the host only": (nccl_on_the_host_only("nccl"), None, "no_gpu_events", "5 calls of 'nccl:all_reduce'"),
    "rccl on the host only": (nccl_on_the_host_only("rccl"), None, "no_gpu_events", "5 calls of 'rccl:all_reduce'"),
}
"""Form -> its text, compute, exposed communication and idle time (None: not available), reason, words."""


def score(folder: Path, text: str, name: str = "rank0.json") -> tuple[TraceView, dict[str, Any]]:
    data = text.encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    view = TraceView(read_traces(folder, use_cache=False))
    names = ("compute_frac", "exposed_comm_frac", "idle_frac", "trace_step_time", "comm_volume")
    return view, {name: METRICS.get(name)(view) for name in names}


def shares(found: dict[str, Any]) -> tuple[float, float, float]:
    return tuple(found[name].value for name in ("compute_frac", "exposed_comm_frac", "idle_frac"))


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("form", [None, *VALUE_FORMS])
def test_a_broken_argument_costs_no_figure(tmp_path, monkeypatch, form, native):
    monkeypatch.setenv("CCL_NATIVE", native)
    events = make_events()
    text = VALUE_FORMS[form](events) if form else as_text(events)
    assert form is None or text != as_text(make_events())
    view, found = score(tmp_path, text, "rank0.json.gz" if native == "1" else "rank0.json")
    assert (view.trace_set.status, view.trace_set.message) == ("ok", "")
    assert shares(found) == pytest.approx(INTACT)
    assert found["trace_step_time"].value == pytest.approx(1e-3)
    assert found["comm_volume"].status == "ok"
    assert (view.world_size, view.trace_set.ranks) == (1, (0,))


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_what_cannot_be_makes_the_figures_partial_and_is_named(tmp_path, monkeypatch, form, native):
    monkeypatch.setenv("CCL_NATIVE", native)
    make, expected, reason, words = OTHER_FORMS[form]
    view, found = score(tmp_path, make(make_events()).replace('"dur": "@"', '"dur": 1e'))
    assert (view.trace_set.status, view.trace_set.reason) == ("partial", reason)
    assert words in view.trace_set.message
    if expected is None:
        assert {found[name].value for name in ("compute_frac", "idle_frac")} == {None}
    else:
        assert shares(found) == pytest.approx(expected)
        assert found["compute_frac"].status == ("ok" if reason == "unreadable" and expected == INTACT else "partial")
    assert found["trace_step_time"].value == pytest.approx(1e-3)


def test_a_kernel_that_begins_before_the_one_it_waits_for_has_ended_is_no_fault(tmp_path):
    """Programmatic dependent launch; here 60 us early, in each step."""
    events = make_events()
    for step in range(5):
        of_step(events, step, "at::add")["dur"] = 300.0
    view, found = score(tmp_path, as_text(events))
    assert (view.trace_set.status, view.trace_set.message) == ("ok", "")
    assert shares(found) == pytest.approx((0.74, 0.1, 0.16))


def test_without_launch_records_the_markers_are_there(tmp_path):
    view, found = score(tmp_path, as_text(without(make_events(), "cuda_runtime")))  # kineto#1166
    assert (view.trace_set.status, view.trace_set.reason) == ("partial", "no_launch_records")
    step = found["trace_step_time"]
    assert (step.value, step.status, step.reason) == (pytest.approx(1e-3), "partial", "no_launch_records")
    assert shares(found) == pytest.approx((3500 / 4880, 500 / 4880, 880 / 4880))
    said = " ".join([view.trace_set.message, *diagnose_trace(view).sentences, *(r.detail for r in found.values())])
    assert "no step markers" not in said
    assert "no device event has a launch record" in said


def test_steps_that_all_lack_kernels_are_not_called_unmarked(tmp_path):
    view, found = score(tmp_path, as_text([e for e in make_events() if "gemm" not in e["name"]]))
    assert (view.trace_set.status, view.trace_set.reason) == ("partial", "missing_kernels")
    assert "20 kernel launches and no kernel for 5 of them" in view.trace_set.message
    assert (found["trace_step_time"].value, found["trace_step_time"].reason) == (pytest.approx(1e-3), "missing_kernels")
    assert shares(found) == pytest.approx((2000 / 4880, 500 / 4880, 2380 / 4880))
    assert "no step markers" not in " ".join(diagnose_trace(view).sentences)


def test_kernels_as_kineto_writes_them_in_2026_are_scanned(tmp_path, monkeypatch):
    events = make_events()
    for event in events:
        if event["cat"] == "kernel":
            event["args"] |= {"occupancy": {"limitingFactors": "BLOCKS", "blockLimitRegs": 1}, "graph id": 0}
    refused, scan = [], PieceScanner.scan

    def count(self: PieceScanner, *arguments: Any) -> bool:
        refused.append(not scan(self, *arguments))
        return not refused[-1]

    monkeypatch.setattr(PieceScanner, "scan", count)
    text = as_text(events).replace(DESCRIPTION, '"Process Group Description": ').replace(": 2.0", ": inf")
    view, found = score(tmp_path, text)
    assert (view.trace_set.status, shares(found)) == ("ok", pytest.approx(INTACT))
    assert library_path().exists() is False or refused == [False]  # nothing was left to Python


ASCEND = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": name}}
    for name in ("Python", "CANN", "Ascend Hardware", "HCCL")
]


@pytest.mark.parametrize("extra", [[], [write.span("cpu_op", "aten::mm", 5.0, 3.0)]])
def test_a_trace_of_ascend_is_named(tmp_path, extra):
    for number, event in enumerate(ASCEND):
        event["pid"] = number
    npu = [{"ph": "X", "name": "MatMulV3", "pid": 2, "tid": 3, "ts": "1700000000.1", "dur": 5.0, "args": {}}]
    (tmp_path / "trace_view.json").write_text(json.dumps(ASCEND + npu + extra))
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.reason) == ("not_available", "format_unsupported")
    assert "Ascend NPU, as in torch_npu's trace_view.json" in found.message


@pytest.mark.parametrize(
    ("name", "words"),
    [("a.hltv", "Intel Gaudi"), ("kernel_details.csv", "a table of Ascend"), ("a.nvvp", "a profile of nvprof")],
)
def test_other_profiles_are_named(tmp_path, name, words):
    (tmp_path / name).write_text("x")
    found = read_traces(tmp_path, use_cache=False)
    assert (found.reason, words in found.message) == ("format_unsupported", True)


def test_a_database_of_ascend_is_named(tmp_path):
    with sqlite3.connect(tmp_path / "ascend_pytorch_profiler_0.db") as connection:
        connection.execute("create table CANN_API (startNs integer)")
    found = read_traces(tmp_path, use_cache=False)
    assert (found.reason, "Ascend" in found.message) == ("format_unsupported", True)


def test_events_of_other_tools_are_named_by_their_categories(tmp_path):
    event = {"ph": "b", "cat": "P2P", "name": "Send", "pid": 1, "tid": 1, "ts": 1.0, "id": 0}
    other = {"ph": "X", "cat": "FEE", "name": "f", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event, other, other]}))
    assert read_traces(tmp_path, use_cache=False).message == "trace.json: contains no event of a known kind, only 'FEE'"


@pytest.mark.parametrize("broken", ["", "-nan", '"a"b"'])
def test_a_broken_value_of_rocprofiler_costs_that_value(tmp_path, broken):
    text = json.dumps(rocprof_document(training_process()), indent=1)
    (tmp_path / "1_results.json").write_text(text)
    whole = read_traces(tmp_path, use_cache=False)
    changed, count = re.subn(r'"size": 72', f'"size": {broken}', text)
    changed, more = re.subn(r'"hostname": "[^"]*"', f'"hostname": {broken}', changed)
    assert (count > 1, more) == (True, 1)
    (tmp_path / "1_results.json").write_text(changed)
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.message) == (whole.status, whole.message)
    assert [len(table) for table in found.tables.values()] == [len(table) for table in whole.tables.values()]
