"""What readers leave out, refuse, or take from a log."""

from __future__ import annotations

import json
import shutil
import sqlite3
from typing import Any

import pytest
import trace_writer as write
from paths import TESTS
from test_trace_chakra import read_trace
from trace_measures import measure, step_timeline
from trace_tables import Timeline, make_set

from cclsearch.trace.events import CollectiveKind, Kind, Reason
from cclsearch.trace.export.chakra import describe_unsized_collectives, export_chakra
from cclsearch.trace.files.run_log import RunLog, read_run_log
from cclsearch.trace.matching import share_clock
from cclsearch.trace.metric import Status
from cclsearch.trace.read import read_traces
from cclsearch.trace.score import diagnose_trace, score_view
from cclsearch.trace.view import TraceView


def test_missing_sizes_of_collectives_do_not_lower_the_quality():
    timeline = step_timeline()
    timeline.collectives = [type(call)(kind=call.kind) for call in timeline.collectives]
    for row in timeline.rows:
        if row["kind"] in (Kind.COMM, Kind.MEMCPY):
            row["launch"] = 0
    quality = measure([timeline.table()], "trace_quality")
    assert quality.value == 1.0
    assert quality.inputs["args_coverage"] == 0.0
    assert "0.0% of communication time is of known size" in quality.detail
    assert "launch matched 100.0%" in quality.detail


def test_communication_outside_of_the_steps_is_told_apart_from_none():
    timeline = Timeline()
    for i in range(6):
        number = timeline.step(i * 100, i * 100 + 90)
        timeline.kernel(i * 100, 90, step_id=number)
    silent = timeline.table()
    timeline.collective(700, 50)
    table = timeline.table()
    assert "outside of them the traces have 1 all_reduce (5e-05 s)" in measure([table], "exposed_comm_frac").detail
    assert "outside of them" in measure([table], "overlap").detail
    assert "outside of them" in measure([table], "comm_volume").detail
    assert measure([silent], "overlap").detail == "no communication was recorded"
    sentences = diagnose_trace(TraceView(make_set([table]))).sentences
    assert sentences[-1].startswith("No communication in the steps; outside of them")
    assert "includes waiting" not in " ".join(sentences)


def mtia_events() -> list[dict[str, Any]]:
    return [
        write.span("cpu_op", "aten::mm", 1000, 20),
        write.span("mtia_runtime", "launch", 1005, 5),
        write.span("mtia_ccp_events", "FC", 1020, 300),
    ]


def test_a_trace_of_an_unsupported_accelerator_with_host_operators_is_refused(tmp_path):
    write.write_kineto(tmp_path / "rank0.json", write.kineto_document(mtia_events(), gpu=False))
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.reason) == (Status.NOT_AVAILABLE, Reason.FORMAT_UNSUPPORTED)


def test_gpu_events_beside_those_of_another_accelerator_are_read(tmp_path):
    write.write_kineto(tmp_path / "rank0.json", write.kineto_document([*mtia_events(), *write.gpu_events()]))
    assert read_traces(tmp_path, use_cache=False).status is Status.OK


def test_devices_of_one_report_share_its_clock(tmp_path):
    found = read_traces(write.write_nsys(tmp_path / "report.sqlite"), use_cache=False)
    assert share_clock(found.tables.values())
    assert TraceView(found).matching.offset_ns == {0: 0, 1: 0}


def test_chakra_counts_the_devices_and_names_the_only_other_rank(tmp_path):
    report = write.write_nsys(tmp_path / "report.sqlite")
    trace = TraceView(read_traces(report, use_cache=False))
    for rank, path in enumerate(export_chakra(trace, tmp_path / "out")):
        metadata, _ = read_trace(path)
        assert metadata.attributes(2)["world_size"] == 2
        assert metadata.attributes(2)["rank"] == rank


@pytest.mark.parametrize(("num_ranks", "node_type", "peer"), [(2, 5, 1), (3, 4, None)])
def test_a_message_without_a_recorded_peer_has_one_only_if_there_is_one(tmp_path, num_ranks, node_type, peer):
    tables = []
    for rank in range(num_ranks):
        timeline = Timeline(rank=rank)
        timeline.kernel(0, 10, launched_us=0)
        timeline.collective(10, 5, CollectiveKind.SEND_RECV, 512, group=None, group_size=None)
        tables.append(timeline.table())
    trace = TraceView(make_set(tables))
    _, (_, message) = read_trace(export_chakra(trace, tmp_path)[0])
    assert message.integer(3) == node_type
    assert message.attributes(10).get("comm_dst") == peer
    notes = describe_unsized_collectives(trace)
    assert notes == (
        [] if peer else ["3 point-to-point messages name no other rank: computation of equal length in Chakra"]
    )


def test_a_collective_depends_on_the_work_whose_result_it_sends(tmp_path):
    timeline = Timeline(world_size=1)
    timeline.kernel(0, 10, launched_us=0)
    launch = timeline.add(Kind.RUNTIME, 1, 1, "cudaLaunchKernel", device=-1)
    timeline.collective(60, 5, launch=launch)  # 50 us later, so nothing else shows the dependency
    _, (_, reduce) = read_trace(export_chakra(TraceView(make_set([timeline.table()])), tmp_path)[0])
    assert reduce.packed(5) == [1]


@pytest.mark.parametrize(
    ("name", "data", "advice"),
    [
        ("out.pftrace", b"\n\x04abcd", "--output-format json"),
        ("908_kernel_trace.csv", b'"Kind"\n', "--output-format json"),
        ("a.otf2", b"", "--output-format json"),
        ("kernels.ncu-rep", b"NVR", "nsys profile"),
        ("report.nsys-rep", b"x", "nsys export"),
        ("report.qdstrm", b"x", "QdstrmImporter"),
        ("profile.ntff", b"x", "not supported"),
        ("host.pb", b"\n\x00", "xplane.pb"),
    ],
)
def test_a_known_format_is_refused_with_what_to_do(tmp_path, name, data, advice):
    (tmp_path / name).write_bytes(data)
    for path in (tmp_path, tmp_path / name):
        found = read_traces(path)
        assert (found.status, found.reasons) == ("not_available", (Reason.FORMAT_UNSUPPORTED,))
        assert advice in found.message


def test_a_database_of_rocprofv3_is_refused_with_what_to_do(tmp_path):
    connection = sqlite3.connect(tmp_path / "7_results.db")
    connection.execute("CREATE TABLE rocpd_kernel_dispatch_7 (id INTEGER)")
    connection.commit()
    connection.close()
    found = read_traces(tmp_path)
    assert found.reasons == (Reason.FORMAT_UNSUPPORTED,)
    assert "--output-format json" in found.message


def test_beside_a_trace_that_can_be_read_it_is_left_out(tmp_path):
    write.write_kineto(tmp_path / "rank0_trace.json")
    (tmp_path / "out.pftrace").write_bytes(b"\n\x04abcd")
    found = read_traces(tmp_path)
    assert (found.status, found.reasons, list(found.tables)) == ("ok", (), [0])


RECORDED = TESTS / "recorded" / "gloo-ddp2"


def test_peak_memory_of_the_whole_run_comes_from_result_json(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "trace")
    without = score_view(TraceView(read_traces(tmp_path / "trace")), ["peak_memory"]).metrics["peak_memory"]
    (tmp_path / "result.json").write_text(json.dumps({"peak_memory_bytes": [700, 900], "memory_kind": "rss"}))
    found = score_view(TraceView(read_traces(tmp_path / "trace")), ["peak_memory"]).metrics["peak_memory"]
    assert (found.value, found.status, found.per_rank) == (900.0, Status.OK, {0: 700.0, 1: 900.0})
    assert "result.json" in found.detail
    assert without.value != 900.0


def test_memory_of_a_process_is_not_shown_as_memory_of_an_accelerator():
    log = RunLog(peak_memory_bytes=(900,), is_device_memory=False)
    found = measure([step_timeline().table()], "peak_memory", set_fields={"run_log": log})
    assert found.value is None


def test_latencies_come_from_the_request_log_if_there_is_one(tmp_path):
    (tmp_path / "requests.json").write_text(json.dumps({"ttfts": [0.1, 0.2, 0.9], "itls": [[0.01, 0.03], [], [0.04]]}))
    log = read_run_log(tmp_path)
    assert log is not None
    fields = {"run_log": log}
    first = measure([step_timeline().table()], "ttft", set_fields=fields)
    token = measure([step_timeline().table()], "tpot", set_fields=fields)
    assert (first.value, first.inputs["num_requests"]) == (0.2, 3)
    assert token.value == pytest.approx(0.03)
    assert "request log" in first.detail


@pytest.mark.parametrize("name", ["result.json", "bench.json", "bench.jsonl"])
def test_statistics_of_a_load_generator_are_used_if_it_lists_no_requests(tmp_path, name):
    found = {"completed": 8, "duration": 2.0, "median_ttft_ms": 41.5, "p99_ttft_ms": 90.0, "median_tpot_ms": "nan"}
    (tmp_path / name).write_text(json.dumps(found))
    log = read_run_log(tmp_path)
    if name == "result.json":  # the file of the trial contract
        assert log is None
        return
    first = measure([step_timeline().table()], "ttft", set_fields={"run_log": log})
    assert (first.value, first.inputs) == (pytest.approx(0.0415), {"p99_s": 0.09, "num_requests": 8})
    assert first.detail.endswith(f"as written in {name}")
    assert measure([step_timeline().table()], "tpot", set_fields={"run_log": log}).value is None


def test_a_request_log_may_have_one_request_per_line(tmp_path):
    (tmp_path / "requests.jsonl").write_text(
        '{"ttft_s": 0.5, "tpot_s": 0.02}\nno json\n{"ttft_s": -1}\n{"ttft_s": 0.7}\n'
    )
    log = read_run_log(tmp_path)
    assert log == RunLog(ttft_s=(0.5, 0.7), tpot_s=(0.02,))


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"peak_memory_bytes": "many"}', '{"peak_memory_bytes": [NaN, true]}']
)
def test_results_without_figures_are_ignored(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    assert read_run_log(tmp_path) is None
