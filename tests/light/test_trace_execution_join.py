"""A profile beside the execution trace of its process: shapes and sizes come from it; other runs are noticed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import execution_writer
import pytest
import trace_writer as write
from test_trace_execution import RECORDED

from cclsearch.plugins import METRICS
from cclsearch.trace.events import TraceSet
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

SHAPED = ("op_flops", "comm_volume")


def copy_recorded(folder: Path, **renamed: str) -> Path:
    for path in RECORDED.glob("*.gz"):
        stem = path.name.removesuffix(".json.gz")
        (folder / f"{renamed.get(stem, stem)}.json.gz").write_bytes(path.read_bytes())
    return folder


def values_of(found: TraceSet) -> dict[str, float | None]:
    trace = TraceView(found)
    return {name: METRICS.get(name)(trace).value for name in SHAPED}


def test_shapes_and_sizes_that_the_profile_lacks_are_those_of_the_execution_trace(tmp_path):
    found = read_traces(copy_recorded(tmp_path))
    assert (found.status, found.ranks, {table.format for table in found.tables.values()}) == ("ok", (0, 1), {"kineto"})
    assert values_of(found) == {"op_flops": 622592, "comm_volume": 37408}
    assert "the sizes of 3 collectives of rank0_trace.json.gz are from execution_rank0.json.gz" in found.message
    for path in tmp_path.glob("execution_*"):
        path.unlink()
    assert values_of(read_traces(tmp_path)) == {"op_flops": None, "comm_volume": None}


def test_the_execution_trace_of_another_rank_is_noticed(tmp_path):
    swapped = {"execution_rank0": "execution_rank1", "execution_rank1": "execution_rank0"}
    found = read_traces(copy_recorded(tmp_path, **swapped))
    assert (found.status, values_of(found)["op_flops"]) == ("ok", None)
    assert "execution_rank0.json.gz is of another process than rank0_trace.json.gz: not joined" in found.message


def test_an_execution_trace_without_a_profile_of_its_rank_is_noticed(tmp_path):
    copy_recorded(tmp_path, execution_rank1="execution_rank5")
    assert "execution_rank5.json.gz is of a rank without a profiler's trace" in read_traces(tmp_path).message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"aten::mm"', '"aten::bmm"', "functions with the same id differ"),
        ('"rf_id"', '"id_of_rf"', "no record function id in common"),
    ],
)
def test_an_execution_trace_of_another_run_is_noticed(tmp_path, old, new, message):
    path = copy_recorded(tmp_path) / "execution_rank0.json.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(old.encode(), new.encode())))
    found = read_traces(tmp_path)
    assert message in found.message
    assert TraceView(found).ranks[0].table.shapes == ()


@pytest.mark.parametrize("size", [150, 4000])
def test_a_damaged_execution_trace_does_not_make_the_profile_partial(tmp_path, size):
    path = copy_recorded(tmp_path) / "execution_rank0.json.gz"
    path.with_name("execution_rank0.json").write_bytes(gzip.decompress(path.read_bytes())[:size])
    path.unlink()
    found = read_traces(tmp_path)
    assert (found.status, found.ranks) == ("ok", (0, 1))
    assert "execution_rank0.json" in found.message


def _gpu_events(*, is_bare: bool) -> list[dict[str, Any]]:
    """Return steps with record function ids; bare: without shapes, links to operators and arguments of collectives."""
    events = write.gpu_events(steps=3)
    for number, mark in enumerate([event for event in events if event["cat"] == "user_annotation"]):
        ids = {"Record function id": 10 * number + 8}
        events.append(write.span("cpu_op", "record_param_comms", mark["ts"] + 27, 10, **ids))
    for number, event in enumerate([event for event in events if event["name"] == "aten::mm"]):
        event["args"]["Record function id"] = 10 * number + 5
    kept = ("Record function id", "correlation", "device", "stream", "bytes")
    if is_bare:
        events = [{**event, "args": {k: v for k, v in event["args"].items() if k in kept}} for event in events]
    return events


def test_kernels_get_the_operator_with_shapes_around_their_launch_and_calls_their_sizes(tmp_path):
    product = (execution_writer.tensor(64, 32), execution_writer.tensor(32, 16))
    call = {"collective_name": "allreduce", "dtype": "BFloat16", "pg_name": "0", "pg_desc": "default_pg", "pg_size": 2}
    sizes = {"in_msg_nelems": 1 << 20, "out_msg_nelems": 1 << 20}
    nodes = [
        node
        for step in range(3)
        for node in (
            execution_writer.node(10 * step + 5, "aten::mm", inputs=product),
            execution_writer.node(10 * step + 8, "record_param_comms", **call, **sizes),
        )
    ]
    (tmp_path / "et_rank0.json").write_bytes(execution_writer.as_bytes(nodes))
    for is_bare in (False, True):
        document = write.kineto_document(_gpu_events(is_bare=is_bare), world=2)
        (tmp_path / "rank0_trace.json").write_text(json.dumps(document))
        found = read_traces(tmp_path, use_cache=False)
        assert values_of(found) == {"op_flops": 65536, "comm_volume": 2 << 20}
    assert "the shapes of 3 operators and the sizes of 3 collectives" in found.message
