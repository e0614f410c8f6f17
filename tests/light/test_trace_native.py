"""The scanner in C gives exactly the tables of the Python way, for every trace and for every damage."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trace_writer as write
from paths import ROOT
from trace_mutations import ODD_MEMBERS, ODD_VALUES, difference, mutate

from cclsearch.trace.events import DEVICE_WORK, EventTable, FileReport
from cclsearch.trace.files.find import TraceFile
from cclsearch.trace.read import read_file, read_traces
from cclsearch.trace.readers import json_events
from cclsearch.trace.readers.kineto import parts, read, scanner
from cclsearch.trace.readers.kineto.read import ScannedPieces
from cclsearch.trace.readers.native import build
from cclsearch.trace.readers.stream import ReadLimits

NUM_DAMAGED = 400
NUM_ODD = 240


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the present source."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("native") / "kineto_scan.so"
    problem = build.compile_scanner(target, ("-Werror", *build.FLAGS))
    assert problem == ""
    return target


class Scans:
    """How many pieces the library accepted and refused."""

    accepted = 0
    refused = 0


@pytest.fixture
def scans(built: Path, monkeypatch: pytest.MonkeyPatch) -> Scans:
    monkeypatch.setattr(scanner, "library_path", lambda: built)
    counted, scan = Scans(), scanner.PieceScanner.scan

    def count(self: Any, *arguments: Any) -> Any:
        is_accepted = scan(self, *arguments)
        counted.accepted += is_accepted
        counted.refused += not is_accepted
        return is_accepted

    monkeypatch.setattr(scanner.PieceScanner, "scan", count)
    return counted


def read_both(path: Path, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> tuple[tuple[EventTable, ...], FileReport]:
    """Read the file in every way, check that they agree, and return the result."""
    results = []
    for switch, threads in (("0", 1), ("1", 1), ("1", 2)):
        monkeypatch.setenv(scanner.SWITCH, switch)
        file = TraceFile(path, path.name, "chrome-json", "kineto")
        results.append(read_file(file, limits=ReadLimits(threads=threads, **limits)))
    expected, expected_report = results[0]
    for tables, report in results[1:]:
        assert report == expected_report
        assert [difference(*pair) for pair in zip(tables, expected, strict=True)] == [""] * len(expected)
    return results[0]


def rich_events() -> list[dict[str, Any]]:
    """Events of every kind that the reader keeps, and some that it drops."""
    memory = {"Device Type": 1, "Device Id": 0, "Total Allocated": 512, "Total Reserved": 2048}
    return [
        *write.gpu_events(steps=3),
        *write.cpu_events()[:40],
        {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1500.5, "s": "t", "args": memory},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "ts": 0, "args": {"name": "main \u00e9"}},
        {"ph": "s", "id": 7, "pid": 1, "tid": 1, "ts": 1100, "cat": "ac2g", "name": "ac2g"},
        write.span("python_function", 'nn.Module: <built-in "x">', 1000, 50, tid=1),
        write.span("cpu_op", 'caf\u00e9 \u4e2d "quoted" \\ back', 1010, 5, tid="other"),
        write.span("gpu_memcpy", "Memcpy", 1020, 5, device=0, stream=7, correlation=2**33, bytes="4096"),
        write.span("cuda_sync", "Stream Wait", 1030, 0, device=0, stream=2**40, correlation=17),
    ]


def with_long_times(text: str) -> str:
    """Return the trace with Unix microseconds that float64 cannot resolve to nanoseconds."""
    return re.sub(r'"ts": (\d+)[.\d]*', lambda found: f'"ts": {1712195495_000000 + int(found[1]) % 10**6}.772', text)


@pytest.mark.parametrize("layout", ["kineto", "one line", "compact", "indented", "bare list"])
def test_every_layout_is_scanned_and_gives_the_table_of_the_python_way(tmp_path, scans, monkeypatch, layout):
    document = write.kineto_document(rich_events())
    text = {
        "kineto": lambda: write.layout_kineto(document),
        "one line": lambda: json.dumps(document),
        "compact": lambda: json.dumps(document, separators=(",", ":"), ensure_ascii=False),
        "indented": lambda: json.dumps(document, indent=4),
        "bare list": lambda: json.dumps(document["traceEvents"]),
    }[layout]()
    tables, report = read_both(write.write_kineto(tmp_path / "rank0_trace.json", text=text), monkeypatch)
    assert report.status == "complete"
    assert len(tables[0].memory.ts_ns) == 1
    assert (scans.accepted > 0, scans.refused) == (True, 0)


def test_recorded_traces_are_scanned_and_give_the_same_tables(tmp_path, scans, monkeypatch):
    for number, source in enumerate(sorted((ROOT / "tests" / "recorded" / "gloo-ddp2").rglob("*.json*"))):
        target = tmp_path / str(number) / source.name
        target.parent.mkdir()
        shutil.copy(source, target)
        read_both(target, monkeypatch)
    assert (scans.accepted >= 2, scans.refused) == (True, 0)


def test_times_beyond_float64_keep_their_nanoseconds(tmp_path, scans, monkeypatch):
    text = write.layout_kineto(write.kineto_document(rich_events(), base_ns=0))
    text = with_long_times(text)
    (table,), _ = read_both(write.write_kineto(tmp_path / "rank0_trace.json", text=text), monkeypatch)
    assert table.base_ns == 1712195495_001000_772
    assert set((table.ts_ns % 1000).tolist()) == {0}
    assert scans.accepted > 0


def test_damaged_traces_give_the_same_tables_and_reports(tmp_path, scans, monkeypatch):
    draw = random.Random(22)
    document = write.kineto_document(rich_events())
    texts = [write.layout_kineto(document), json.dumps(document, ensure_ascii=False), json.dumps(document, indent=1)]
    texts.append(with_long_times(texts[0]))
    for number in range(NUM_DAMAGED):
        monkeypatch.setattr(json_events, "BLOCK_BYTES", draw.choice([2000, 9000, json_events.BLOCK_BYTES]))
        path = tmp_path / f"rank0_{number % 4}_trace.json"
        path.write_bytes(mutate(texts[number % 4], draw))
        read_both(path, monkeypatch)
        path.unlink()
    assert min(scans.accepted, scans.refused) > NUM_DAMAGED // 10


def test_an_odd_value_in_an_event_like_those_before_it_gives_the_same_table(tmp_path, scans, monkeypatch):
    draw = random.Random(23)
    events = [event for event in rich_events() if event["ph"] != "M"]
    for number in range(NUM_ODD):
        seen = json.dumps({"traceEvents": [*events, *events]}, ensure_ascii=number % 2 == 0)
        shown = json.dumps(draw.choice(events), ensure_ascii=False)
        places = list(re.finditer(r'(?<=": )("[^"]*"|-?[\d.]+|\[[^\]]*\])|(?<=": ")|(?<=\d)(?=[,}])', shown))
        place, odd = draw.choice(places), draw.choice([*ODD_VALUES, "7", "00", ".5", "é", "\\u00e9", "1" * 18])
        inside = odd.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        one = shown[: place.start()] + inside + shown[place.end() :]
        if draw.random() < 0.2:
            one = shown.replace('"args": {', '"args": {' + draw.choice(ODD_MEMBERS))
        text = seen.removesuffix("]}") + f", {one}, " + seen.removeprefix('{"traceEvents": [')
        path = tmp_path / "rank0_trace.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        read_both(path, monkeypatch)
    assert min(scans.accepted, scans.refused) > NUM_ODD // 10


def test_more_layouts_than_are_learned_give_the_same_table(tmp_path, scans, monkeypatch):
    events = [write.span("cpu_op", "x", 10.0 * n, 5, **{f"key {n % 97} of {n}": n}) for n in range(3000)]
    events += [write.span("kernel", "k", 7.0 * n, 5, device=0, stream=7, **{"k" * n: 1}) for n in range(300)]
    text = json.dumps(write.kineto_document([*events, *rich_events(), *events]))
    (table,), _ = read_both(write.write_kineto(tmp_path / "rank0_trace.json", text=text), monkeypatch)
    assert len(table) > 2 * len(events)
    assert (scans.accepted > 0, scans.refused) == (True, 0)


def test_a_shape_that_is_written_in_two_ways_is_one_shape(tmp_path, scans, monkeypatch):
    monkeypatch.setattr(json_events, "BLOCK_BYTES", 700)
    text = json.dumps(write.kineto_document(write.gpu_events(steps=6)), separators=(",", ":"))
    broken = text.replace('"ts":3010.0', '"ts":NaN')  # the events around it are written anew when they are read
    assert broken != text
    (table,), report = read_both(write.write_kineto(tmp_path / "rank0_trace.json", text=broken), monkeypatch)
    assert (report.status, len(table.shapes), len(table.grids)) == ("partial", 1, 1)
    assert [len(table.sparse[name][0]) for name in ("shape_id", "grid_id")] == [6, 6]


def process_events(pid: int, device: int, *, later_us: float = 0.0, device_pid: int | None = None) -> Any:
    """The events of one process, as Kineto writes them: the `pid` of a device row is the device's number."""
    for event in write.gpu_events(steps=4):
        on_device = "device" in event["args"]
        args = {**event["args"], "device": device} if on_device else event["args"]
        shown = (device if device_pid is None else device_pid) if on_device else pid
        yield {**event, "pid": shown, "ts": event["ts"] + later_us, "args": args}


@pytest.mark.parametrize("device_pids", [(None, None), (70, 71)], ids=["device's number", "process"])
def test_the_processes_of_one_file_have_a_table_each(tmp_path, scans, monkeypatch, device_pids):
    ranks = [
        list(process_events(70 + rank, 1 - rank, later_us=60.0 * rank, device_pid=device_pids[rank])) for rank in (0, 1)
    ]
    merged = write.kineto_document([event for pair in zip(*ranks, strict=True) for event in pair], world=2)
    tables, report = read_both(
        write.write_kineto(tmp_path / "trace.json", text=write.layout_kineto(merged)), monkeypatch
    )
    assert (report.status, len(tables), scans.refused) == ("complete", 2, 0)
    for table, events in zip(tables, reversed(ranks), strict=True):  # in the order of the devices
        text = write.layout_kineto(write.kineto_document(events))
        ((alone,), _) = read_both(write.write_kineto(tmp_path / "alone.json", text=text), monkeypatch)
        assert [step.number for step in table.steps] == [5, 6, 7, 8]
        assert table.devices == alone.devices
        for name in ("ts_ns", "dur_ns", "kind", "device", "step_id", "launch", "op", "bytes", "shape_id", "coll_id"):
            assert getattr(table, name).tolist() == getattr(alone, name).tolist()
    assert read_traces(tmp_path / "trace.json", use_cache=False).ranks == (0, 1)


@pytest.mark.parametrize("device", [0, 1], ids=["one device", "launches at the same time"])
def test_processes_whose_device_rows_cannot_be_told_apart_are_refused(tmp_path, scans, monkeypatch, device):
    events = [*process_events(70, 0), *process_events(71, device, later_us=2.0)]
    path = write.write_kineto(tmp_path / "trace.json", text=write.layout_kineto(write.kineto_document(events)))
    tables, report = read_both(path, monkeypatch)
    assert (len(tables), report.reason) == (0, "mixed_runs")
    assert "70 and 71" in report.message
    assert "one file per process" in report.message


def test_a_damaged_process_id_makes_no_second_process(tmp_path, scans, monkeypatch):
    events = [event for _ in range(8) for event in process_events(70, 0)]
    events[1] = {**events[1], "pid": 7}
    path = write.write_kineto(tmp_path / "trace.json", text=write.layout_kineto(write.kineto_document(events)))
    (table,), _ = read_both(path, monkeypatch)
    assert len(table) == len(events)


def test_threads_scan_a_file_and_give_back_what_is_refused(tmp_path, scans, monkeypatch):
    monkeypatch.setattr(json_events, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(parts, "PART_BLOCKS", 16)
    groups: list[bool] = []

    def count(kind: type[Any]) -> None:
        scan = kind.scan

        def counted(self: Any, part: parts.Part) -> None:
            scan(self, part)
            groups.append(part.reached == part.stop)

        monkeypatch.setattr(kind, "scan", counted)

    count(parts.PlainParts)
    count(parts.PackedParts)
    events = [event for _ in range(36) for event in rich_events()]
    text = write.layout_kineto(write.kineto_document(events))
    path = write.write_kineto(tmp_path / "rank0_trace.json", text=text)
    read_both(path, monkeypatch)
    num_groups = len(groups)
    assert num_groups >= len(text) // (2000 * parts.PART_BLOCKS) >= 10
    assert all(groups)
    middle = text.index('"dur": ', len(text) // 2) + len('"dur": ')
    path.write_text(text[:middle] + 'NaN, "x": ' + text[middle:])
    assert read_both(path, monkeypatch)[1].status == "partial"
    assert not all(groups[num_groups:])
    num_groups = len(groups)
    packed = path.with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_both(packed, monkeypatch)[1].status == "complete"
    assert sum(groups[num_groups:]) >= 10
    packed.write_bytes(packed.read_bytes()[: packed.stat().st_size * 2 // 3])
    assert read_both(packed, monkeypatch)[1].reason == "trace_truncated"
    for limits in ({"raw_bytes": len(text) // 2}, {"rows": 300}):
        assert read_both(path, monkeypatch, **limits)[1].reason == "too_large"


@pytest.mark.parametrize("threads", [2, 4])
def test_parts_that_are_refused_in_the_middle_give_the_same_table(tmp_path, scans, monkeypatch, threads):
    monkeypatch.setattr(json_events, "BLOCK_BYTES", 2000)
    call = {"device": 0, "stream": 20, "Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float"}
    odd = [
        '{"ph": "X", "cat": "cpu_op", "name": "\\ud800 alone", "pid": 1, "tid": 1, "ts": 9.5, "dur": 1}',
        '{"ph": "M", "name": "thread_name", "pid": 1, "tid": [2], "ts": 0, "args": {"name": "a list"}}',
        json.dumps(write.span("kernel", "ncclKernel", 9.0, 1, **call, **{"Process Group Description": "first"})) + " ,",
    ]
    events = [json.dumps(event) for _ in range(12) for event in rich_events()]
    calls = [write.span("kernel", "ncclKernel", 9.0 * n, 1, **call) for n in range(3)]
    for number, one in enumerate(odd):
        at = len(events) * (number + 2) // 6
        text = ", ".join([*events[:at], one, *map(json.dumps, calls), *events[at:]]).replace(" ,, ", ' , {"ph": "q"}, ')
        path = tmp_path / "rank0_trace.json"
        path.write_text('{"traceEvents": [' + text + "]}")
        expected, report = read_both(path, monkeypatch)
        tables, again = read_file(
            TraceFile(path, path.name, "chrome-json", "kineto"), limits=ReadLimits(threads=threads)
        )
        assert (again, [difference(*pair) for pair in zip(tables, expected, strict=True)]) == (report, [""])
    assert min(scans.accepted, scans.refused) > 0


def test_kernels_are_classified_while_threads_scan(tmp_path, scans, monkeypatch):
    monkeypatch.setattr(json_events, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(parts, "PART_BLOCKS", 4)
    early: list[str] = []
    monkeypatch.setattr(read, "kernel_class", early.append)
    half = [event for _ in range(18) for event in rich_events()]
    new = [write.span("kernel", f"new_gemm_{n}", 9e6 + n, 1, device=0, stream=7) for n in range(3)]
    document = write.kineto_document([*half, *new, *half])
    path = write.write_kineto(tmp_path / "rank0_trace.json", text=write.layout_kineto(document))
    patience_s = sys.getswitchinterval()
    file = TraceFile(path, path.name, "chrome-json", "kineto")
    (table,), _ = read_file(file, limits=ReadLimits(threads=2))
    names = {table.names[number] for number in table.name_id[np.isin(table.kind, DEVICE_WORK)]}
    assert {"new_gemm_0", "new_gemm_1", "new_gemm_2"} <= set(early) <= names
    assert len(early) == len(set(early))
    assert sys.getswitchinterval() == patience_s


def test_an_error_in_one_thread_ends_the_others(tmp_path, scans, monkeypatch):
    monkeypatch.setattr(json_events, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(parts, "PART_BLOCKS", 4)
    add, used = ScannedPieces.add, []

    def fail_later(self: ScannedPieces, piece: Any) -> None:
        used.append(piece)
        if len(used) == 5:
            raise MemoryError
        add(self, piece)

    monkeypatch.setattr(ScannedPieces, "add", fail_later)
    document = write.kineto_document([event for _ in range(36) for event in rich_events()])
    path = write.write_kineto(tmp_path / "rank0_trace.json", text=write.layout_kineto(document))
    file = TraceFile(path, path.name, "chrome-json", "kineto")
    tables, report = read_file(file, limits=ReadLimits(threads=3))
    assert (len(tables), report.reason, len(used)) == (0, "too_large", 5)


@pytest.mark.parametrize("num_edges", [0, 1, 50])
def test_looking_times_up_gives_what_numpy_gives(built, monkeypatch, num_edges):
    monkeypatch.setattr(scanner, "library_path", lambda: built)
    draw = np.random.default_rng(22)
    edges = np.sort(draw.integers(-20, 20, num_edges))
    values = draw.integers(-1, 9, num_edges + 1).astype(np.int32)
    times = np.concatenate([draw.integers(-25, 25, 1000), [np.iinfo(np.int64).min, np.iinfo(np.int64).max]])
    expected = values[np.searchsorted(edges, times, side="right")]
    assert scanner.look_up(edges, values, times).tolist() == expected.tolist()


def test_a_library_of_another_version_is_not_used(built, monkeypatch):
    monkeypatch.setattr(scanner, "library_path", lambda: built)
    assert scanner.open_scanner() is not None
    monkeypatch.setattr(scanner, "VERSION", scanner.VERSION + 1)
    scanner.load_library.cache_clear()
    assert scanner.open_scanner() is None
    scanner.load_library.cache_clear()


def test_the_package_reads_traces_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(scanner, "library_path", lambda: tmp_path / "missing.so")
    path = write.write_kineto(tmp_path / "rank0_trace.json")
    assert scanner.open_scanner() is None
    assert read_file(TraceFile(path, path.name, "chrome-json", "kineto"))[1].status == "complete"
