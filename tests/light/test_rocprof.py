"""rocprofiler-sdk's JSON: names, devices, launches, steps and reasons."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rocprof_writer import dispatch, record, rocprof_document, rocprof_process, training_process

from cclsearch.trace.events import CollectiveKind, Kind, Reason, TraceSet
from cclsearch.trace.files.find import find_traces
from cclsearch.trace.read import read_file, read_traces
from cclsearch.trace.readers import json_sections
from cclsearch.trace.readers.stream import ReadLimits
from cclsearch.trace.score import score_view, try_diagnose
from cclsearch.trace.view import TraceView

EMPTY: dict[str, list[dict[str, Any]]] = {"marker_api": [], "hip_api": []}


def read(folder: Path, document: Any, name: str = "908_results.json", indent: int | None = None) -> TraceSet:
    data = json.dumps(document, indent=indent).encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return read_traces(folder, use_cache=False)


@pytest.mark.parametrize("name", ["908_results.json", "908_results.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_training_has_its_rows_names_launches_and_steps(tmp_path, name, indent):
    found = read(tmp_path, rocprof_document(training_process()), name, indent)
    assert (found.status, found.reasons, list(found.tables)) == ("ok", (), [0])
    table = found.tables[0]
    assert (table.format, table.host, table.clock, table.step_source) == ("rocprof", "node7", "trace", "roctx")
    assert [(step.number, step.name, step.complete) for step in table.steps] == [
        (i, f"step {i}", True) for i in range(3)
    ]
    gemms, calls, copies = (table.rows_of(kind) for kind in (Kind.COMPUTE, Kind.COMM, Kind.MEMCPY))
    assert table.dur_ns[gemms].tolist() == [3000] * 3
    assert table.stream[gemms].tolist() == [5] * 3
    assert table.names[table.name_id[gemms[0]]].startswith("Cijk_Ailk_Bljk")
    assert [table.names[table.name_id[row]] for row in table.launch[gemms]] == ["hipLaunchKernel"] * 3
    assert table.step_id[gemms].tolist() == [0, 1, 2]
    assert table.collectives[table.coll_id[calls[0]]].kind is CollectiveKind.ALL_REDUCE
    assert (table.names[table.name_id[copies[0]]], table.bytes[copies].tolist()) == ("Memcpy HtoD", [4096] * 3)
    grid = table.grids[table.grid_id[gemms[0]]]
    assert (grid.blocks, grid.threads_per_block, grid.shared_memory_bytes) == (8, 256, 1024)
    device = table.devices[0]
    assert (device.name, device.num_sms, device.memory_bytes) == ("AMD Instinct MI300X", 304, 2 << 30)


def test_metrics_of_a_step_are_those_of_its_records(tmp_path):
    found = read(tmp_path, rocprof_document(training_process(6)))
    metrics = score_view(TraceView(found)).metrics
    assert metrics["trace_step_time"].value == pytest.approx(10e-6)
    assert metrics["comm_time"].value == pytest.approx(3e-6)
    assert metrics["exposed_comm_frac"].value == pytest.approx(0.2)


def test_without_rccls_calls_the_sentence_names_the_kernel_and_no_operation_or_group(tmp_path):
    found = read(tmp_path, rocprof_document({**training_process(), "buffer_records": kernels_alone()}))
    diagnosis = try_diagnose(TraceView(found))
    (sentence,) = [text for text in diagnosis.sentences if text.startswith("Collectives with")]
    assert "operation not recorded (ncclDevKernel_Generic) 9 us, 3 calls" in sentence


def kernels_alone() -> dict[str, list[dict[str, Any]]]:
    return {"marker_api": [], "kernel_dispatch": training_process()["buffer_records"]["kernel_dispatch"]}


def test_each_device_of_each_process_is_a_rank(tmp_path):
    both = rocprof_process(**EMPTY, kernel_dispatch=[dispatch(5, 9, 1, 7, agent=103), dispatch(1, 3, 2, 8)])
    found = read(tmp_path, rocprof_document(both, training_process()))
    assert [len(table) for table in found.tables.values()] == [1, 1, 24]
    assert [table.devices[0].ordinal for table in found.tables.values()] == [0, 1, 0]
    assert found.tables[0].stream.tolist() == [3]


def test_names_may_follow_the_records(tmp_path):
    process = training_process()
    late = {key: process[key] for key in reversed(process)}
    table = read(tmp_path, rocprof_document(late)).tables[0]
    assert sum(name.startswith("Cijk") for name in table.names) == 1
    assert len(table.steps) == 3


def test_blocks_of_any_size_read_the_same(tmp_path, monkeypatch):
    document = rocprof_document(training_process(40))
    whole = read(tmp_path, document).tables[0]
    for size in (64, 1000, 4096):
        monkeypatch.setattr(json_sections, "BLOCK_BYTES", size)
        table = read(tmp_path, document).tables[0]
        assert table.ts_ns.tolist() == whole.ts_ns.tolist()
        assert [table.names[i] for i in table.name_id] == [whole.names[i] for i in whole.name_id]


def test_a_record_that_does_not_fit_is_left_out_and_said(tmp_path):
    process = training_process()
    records = process["buffer_records"]["kernel_dispatch"]
    records[2] = {**records[2], "start_timestamp": "soon"}
    records[3] = {**records[3], "end_timestamp": -5}
    found = read(tmp_path, rocprof_document(process))
    assert (found.status, found.reasons) == ("partial", (Reason.UNREADABLE,))
    assert len(found.tables[0].rows_of(Kind.COMPUTE, Kind.COMM)) == 4


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (rocprof_document(), Reason.NO_GPU_EVENTS),
        (rocprof_document(rocprof_process(**EMPTY)), Reason.NO_GPU_EVENTS),
        ({"rocprofiler-sdk-tool": 5}, Reason.NO_GPU_EVENTS),
    ],
)
def test_without_device_rows_there_is_a_reason(tmp_path, document, reason):
    found = read(tmp_path, document)
    assert (found.status, found.reasons) == ("not_available", (reason,))


def test_a_file_cut_in_its_records_is_partial(tmp_path):
    data = json.dumps(rocprof_document(training_process(50)))
    at = data.index('"buffer_records": {') + 40_000
    (tmp_path / "1_results.json").write_text(data[:at])
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.reasons) == ("partial", (Reason.TRACE_TRUNCATED,))
    assert 0 < len(found.tables[0]) < 50 * 8


def test_too_many_records_and_a_too_large_value_are_refused(tmp_path):
    (tmp_path / "1_results.json").write_text(json.dumps(rocprof_document(training_process())))
    (file,) = find_traces(tmp_path)
    assert read_file(file, limits=ReadLimits(rows=200))[1].reason is Reason.TOO_LARGE
    nested = '{"rocprofiler-sdk-tool": [{"odd": ' + "[" * 100_000
    (tmp_path / "1_results.json").write_text(nested)
    assert read_file(file)[1].reason is Reason.UNREADABLE
    (tmp_path / "1_results.json").write_text('{"rocprofiler-sdk-tool": [{"odd": "' + "x" * 5_000_000)
    assert read_file(file, limits=ReadLimits(event_bytes=1 << 20))[1].reason is Reason.TOO_LARGE


def test_copies_between_devices_and_unknown_agents(tmp_path):
    def copy(start: int, source: int, target: int) -> dict[str, Any]:
        ends = {"src_agent_id": {"handle": source}, "dst_agent_id": {"handle": target}, "bytes": 8}
        return record("memory_copy", start, start + 1, 1, 1, **ends)

    copies = [copy(1, 102, 103), copy(2, 102, 102), copy(3, 102, 100), copy(4, 55, 56), copy(5, 100, 100)]
    found = read(tmp_path, rocprof_document(rocprof_process(**EMPTY, memory_copy=copies)))
    names = sorted(table.names[n] for table in found.tables.values() for n in table.name_id)
    assert names == ["Memcpy DtoD", "Memcpy DtoH", "Memcpy HtoD", "Memcpy PtoP"]
    assert found.tables[max(found.tables)].devices[0].ordinal == 1
