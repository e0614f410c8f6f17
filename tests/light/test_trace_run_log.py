"""Figures from files next to the traces: the run's peak memory, and a server's request log."""

from __future__ import annotations

import json
import shutil

import pytest
from paths import TESTS
from trace_measures import measure, step_timeline

from cclsearch.trace.metric import Status
from cclsearch.trace.read import read_traces
from cclsearch.trace.run_log import RunLog, read_run_log
from cclsearch.trace.score import score_traces

RECORDED = TESTS / "recorded" / "gloo-ddp2"


def test_peak_memory_of_the_whole_run_comes_from_result_json(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "trace")
    without = score_traces(read_traces(tmp_path / "trace"), names=["peak_memory"]).metrics["peak_memory"]
    (tmp_path / "result.json").write_text(json.dumps({"peak_memory_bytes": [700, 900], "memory_kind": "rss"}))
    found = score_traces(read_traces(tmp_path / "trace"), names=["peak_memory"]).metrics["peak_memory"]
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
