"""`score --perfetto`: every event, compared with the rows and causes of the trace."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trace_writer as write

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.trace.diagnosis.causes import split_idle_ns
from cclsearch.trace.diagnosis.critical_path import walk_critical_path
from cclsearch.trace.export.perfetto import Slice, export_perfetto, split_lanes
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView


@dataclass
class Shown:
    """What Perfetto's UI shows: closed slices, counters and arrows."""

    processes: list[str] = field(default_factory=list)
    slices: list[tuple[int, str, str, int, int, dict[str, int | str]]] = field(default_factory=list)
    """(rank's process, track, name, start, end, notes)."""
    counters: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    arrows_out: Counter[int] = field(default_factory=Counter)
    arrows_in: Counter[int] = field(default_factory=Counter)

    def on(self, track: str, process: int = 1) -> list[tuple[str, int, int]]:
        return sorted(
            ((name, start, end) for p, t, name, start, end, _ in self.slices if (p, t) == (process, track)),
            key=lambda item: item[1:],
        )


def to_ns(time_us: float) -> int:
    assert abs(time_us * 1000 - round(time_us * 1000)) < 1e-3
    return round(time_us * 1000)


def decode(path: Path) -> Shown:
    shown = Shown()
    tracks: dict[tuple[int, int], str] = {}
    open_ends: dict[tuple[int, int], list[int]] = {}
    for event in json.loads(path.read_bytes())["traceEvents"]:
        place = event["pid"], event.get("tid")
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                assert place not in tracks
                tracks[place] = event["args"]["name"]
            elif event["pid"] > len(shown.processes):
                shown.processes.append(event["args"]["name"])
            continue
        time = to_ns(event["ts"])
        if event["ph"] == "X":
            end, stack = time + to_ns(event["dur"]), open_ends.setdefault(place, [])
            while stack and stack[-1] <= time:
                stack.pop()
            assert not stack or stack[-1] >= end  # Perfetto wants the slices of a track to nest
            stack.append(end)
            shown.slices.append((event["pid"], tracks[place], event["name"], time, end, event["args"]))
        elif event["ph"] == "C":
            shown.counters.setdefault(event["name"], []).append((time, event["args"]["value"]))
        else:
            assert time == shown.slices[-1][3]  # an arrow belongs to the slice before it
            (shown.arrows_out if event["ph"] == "s" else shown.arrows_in)[event["id"]] += 1
    return shown


def open_view(folder: Path, ranks: int = 1) -> TraceView:
    for rank in range(ranks):
        document = write.kineto_document(write.gpu_events(lag_us=50.0 + 20 * rank), rank=rank, world=ranks)
        for event in document["traceEvents"]:
            if "Process Group Ranks" in event["args"]:
                event["args"] |= write.collective_args(ranks=ranks)
        write.write_kineto(folder / f"rank{rank}_trace.json", document)
    return TraceView(read_traces(folder, use_cache=False))


def test_every_row_is_a_slice_with_its_name_and_time(tmp_path):
    trace = open_view(tmp_path)
    export_perfetto(trace, tmp_path / "t.out")
    shown = decode(tmp_path / "t.out")
    table = trace.ranks[0].table
    own = {"steps", "idle, by cause", "waiting for other ranks", "critical path"}
    rows = sorted((n, s, e) for _, track, n, s, e, _ in shown.slices if track not in own)
    expected = zip(table.name_id.tolist(), table.ts_ns.tolist(), table.end_ns.tolist(), strict=True)
    assert rows == sorted((table.names[name], start, end) for name, start, end in expected)
    assert shown.processes == ["rank 0 (NVIDIA A100-SXM4-80GB)"]
    assert [name for name, *_ in shown.on("stream 7")][:2] == [
        "ampere_sgemm_128x64_tn",
        "Memcpy HtoD (Pinned -> Device)",
    ]


def test_arrows_run_from_each_launch_to_what_it_launched(tmp_path):
    trace = open_view(tmp_path, 2)
    export_perfetto(trace, tmp_path / "t.out")
    shown = decode(tmp_path / "t.out")
    assert shown.arrows_out == shown.arrows_in
    assert set(shown.arrows_in.values()) == {1}
    assert len(shown.arrows_in) == 2 * 9


def test_steps_gaps_and_waits_are_those_of_the_figures(tmp_path):
    trace = open_view(tmp_path, 2)
    export_perfetto(trace, tmp_path / "t.out")
    shown = decode(tmp_path / "t.out")
    assert len(shown.processes) == 2
    for process, view in enumerate(trace.ranks.values(), start=1):
        steps = shown.on("steps", process)
        assert [end - start for _, start, end in steps] == view.parts.window_ns_W.tolist()
        assert [name for name, *_ in steps] == [f"step {number}" for number in view.windows.numbers]
        gaps = shown.on("idle, by cause", process)
        assert sum(end - start for _, start, end in gaps) == int(view.parts.idle_ns_W.sum())
        by_cause = Counter[str]()
        for name, start, end in gaps:
            by_cause[name] += end - start
        assert by_cause == {cause: ns for cause, ns in split_idle_ns(view).items() if ns}
        notes = [notes for p, t, *_, notes in shown.slices if (p, t) == (process, "steps")]
        assert [sum(part.values()) for part in notes] == view.parts.window_ns_W.tolist()


def test_the_critical_path_fills_a_step_and_passes_from_rank_to_rank(tmp_path):
    trace = open_view(tmp_path, 2)
    export_perfetto(trace, tmp_path / "t.out")
    shown = decode(tmp_path / "t.out")
    path = sorted((start, end, name) for rank in (1, 2) for name, start, end in shown.on("critical path", rank))
    spent = Counter[str]()
    for start, end, name in path:
        spent[name] += end - start
    assert spent == {part: ns for part, ns in walk_critical_path(trace).items() if ns}
    assert [end for _, end, _ in path][:-1] == [start for start, *_ in path][1:]  # without a gap
    assert path[0][0] in [start for _, start, _ in shown.on("steps", 1)]


def test_collectives_say_how_long_they_waited(tmp_path):
    trace = open_view(tmp_path, 2)
    for rank, longer in ((0, 0), (1, 100)):
        document = write.kineto_document(write.gpu_events(), rank=rank, world=2)
        for event in document["traceEvents"]:
            if "AllReduce" in event["name"]:
                event["ts"] -= longer
                event["dur"] += longer
        write.write_kineto(tmp_path / f"rank{rank}_trace.json", document)
    trace = TraceView(read_traces(tmp_path, use_cache=False))
    export_perfetto(trace, tmp_path / "t.out")
    shown = decode(tmp_path / "t.out")
    assert shown.on("waiting for other ranks", 1) == []
    assert [(name, end - start) for name, start, end in shown.on("waiting for other ranks", 2)] == [
        ("all_reduce", 100_000)
    ] * 3
    notes = next(n for p, t, name, *_, n in shown.slices if p == 2 and name.startswith("nccl") and t == "stream 20")
    assert (notes["transfer_ns"], notes["wait_ns"], notes["bytes"]) == (300_000, 100_000, 2 << 20)


def test_the_queue_is_a_counter(tmp_path):
    export_perfetto(open_view(tmp_path), tmp_path / "t.out")
    points = decode(tmp_path / "t.out").counters["launched, not started"]
    assert len(points) == 18
    assert (points[0][1], points[-1][1], max(value for _, value in points)) == (1, 0, 2)


def test_slices_that_overlap_get_another_track():
    slices = [Slice(*span, "a") for span in [(0, 10), (5, 15), (5, 9), (10, 12), (12, 12), (20, 20)]]
    first, second = split_lanes(slices)
    assert [item[:2] for item in first] == [(0, 10), (5, 9), (10, 12), (12, 12), (20, 20)]
    assert [item[:2] for item in second] == [(5, 15)]


def test_the_file_beside_the_traces_is_not_read_as_one(tmp_path):
    trace = open_view(tmp_path)
    export_perfetto(trace, tmp_path / "trace.json")
    assert [report.path for report in read_traces(tmp_path, use_cache=False).files] == ["rank0_trace.json"]


def test_without_device_work_nothing_is_written(tmp_path):
    with pytest.raises(UserError, match="no device event"):
        export_perfetto(TraceView(read_traces(tmp_path)), tmp_path / "t.out")
    assert list(tmp_path.iterdir()) == []


def test_score_writes_the_file_or_says_why_not(tmp_path, cli):
    write.write_kineto(tmp_path / "in" / "rank0_trace.json")
    assert main(["score", str(tmp_path / "in"), "--metric", "idle_frac", "--perfetto", str(tmp_path / "t")]) == 0
    assert len(decode(tmp_path / "t").processes) == 1
    assert "--perfetto" in cli.err(["score", str(tmp_path / "in"), "--perfetto", str(tmp_path / "no" / "t")])
