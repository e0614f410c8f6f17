"""Reading a trace file of any content ends with a status: no crash, no hang, no unbounded memory."""

from __future__ import annotations

import json
import random
import sqlite3
import tempfile
from pathlib import Path

import execution_writer
import pytest
import trace_writer as write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rocprof_writer import rocprof_document, training_process
from test_trace_chakra import METADATA, node
from trace_mutations import mutate

from cclsearch.plugins import METRICS
from cclsearch.trace.answers.operators import build_call_tree
from cclsearch.trace.events import TraceSet
from cclsearch.trace.files.cache import cache_path
from cclsearch.trace.read import read_traces
from cclsearch.trace.score import score_view
from cclsearch.trace.view import RankView, TraceView
from cclsearch.trace.whatif.projection import prepare_replay

light = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

KINETO = write.layout_kineto(write.kineto_document(write.gpu_events())).encode()
CPU = write.layout_kineto(write.kineto_document(write.cpu_events(), gpu=False)).encode()
SPACE = write.tpu_space()
PROGRAM = write.jax_gpu_space(
    write.two_products(), [("nvjet_a", "graph"), ("loop_tanh_fusion", "graph"), ("nvjet_b", "custom-call.2")]
)
ROCPROF = json.dumps(rocprof_document(training_process())).encode()
CHAKRA = METADATA + b"".join(
    node(i, kind, 10 * i, 5, ("comm_type", 9, 0), ("comm_size", 9, 64), ("is_cpu_op", 27, 0), ("pg_name", 29, "0"))
    for i, kind in enumerate((4, 7, 5, 2), start=1)
)
EXECUTION = execution_writer.as_bytes()
WHOLE = {
    "rank0_trace.json": KINETO,
    "rank0_trace.json (CPU)": CPU,
    "h.xplane.pb": SPACE,
    "h.xplane.pb (program)": PROGRAM,
    "1_results.json": ROCPROF,
    "chakra.0.et": CHAKRA,
    "et_rank0.json": EXECUTION,
}
"""Name of a file, and what tells two of one name apart -> its content."""
STATUSES = ("ok", "partial", "not_available")

json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"])
arguments = st.dictionaries(
    st.sampled_from(
        [
            *("correlation", "External id", "device", "stream", "bytes", "grid"),
            *("Input Dims", "Collective name"),
        ]
    ),
    json_values,
)
kinds = st.sampled_from(["kernel", "cpu_op", "cuda_runtime", "user_annotation", "gpu_memcpy", "odd"])
events = st.dictionaries(keys, json_values) | st.fixed_dictionaries(
    {"ph": st.just("X"), "cat": kinds, "name": st.text(max_size=12), "ts": json_values, "dur": json_values},
    optional={"args": arguments | json_values, "tid": json_values},
)


def read_bytes(name: str, data: bytes) -> TraceSet:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        found = read_traces(folder)
        assert check(found) is found
        again = read_traces(folder)
        assert (again.status, again.ranks) == (found.status, found.ranks)
        assert cache_path(path).exists() == bool(found.tables)
        return found


def check(found: TraceSet) -> TraceSet:
    """Check the invariants of every answer."""
    assert (found.status == "not_available") == (not found.tables)
    assert (found.status == "ok") == (not found.reasons)
    for table in found.tables.values():
        assert len(table) > 0
        assert int(table.ts_ns.min()) >= 0
        assert int(table.dur_ns.min()) >= 0
        assert int(table.name_id.max()) < len(table.names)
        assert int(table.step_id.max()) < max(len(table.steps), 1)
        assert int(table.coll_id.max(initial=-1)) < max(len(table.collectives), 1)
    return found


@light
@given(data=st.data(), name=st.sampled_from(list(WHOLE)))
def test_damaged_bytes_give_a_status(data, name):
    damaged = bytearray(WHOLE[name])
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        piece = data.draw(st.binary(max_size=4))
        damaged[position : position + data.draw(st.integers(0, 8))] = piece
    assert read_bytes(name.split()[0], bytes(damaged)).status in STATUSES


@pytest.mark.parametrize("name", WHOLE)
@light
@given(st.floats(0, 1))
def test_a_file_truncated_anywhere_gives_a_status(name, share):
    data = WHOLE[name]
    assert read_bytes(name.split()[0], data[: round(len(data) * share)]).status in STATUSES


@light
@given(
    st.lists(events, max_size=6), st.dictionaries(st.sampled_from(["distributedInfo", "deviceProperties"]), json_values)
)
def test_odd_events_do_not_hide_the_good_ones(odd, head):
    document = {**head, "traceEvents": [*odd, *write.gpu_events(steps=1)]}
    found = read_bytes("rank0_trace.json", json.dumps(document).encode())
    assert found.tables, found.message


odd_node = st.dictionaries(
    st.sampled_from(["id", "name", "ctrl_deps", "inputs", "outputs", "attrs", "parent", "rf_id", "input_shapes"]),
    json_values,
)


@light
@given(st.integers(0, 2**32), st.lists(odd_node, max_size=5))
def test_any_execution_trace_gives_a_status_and_scores_with_a_reason(seed, odd):
    nodes = [*odd, *execution_writer.training_nodes()]
    data = mutate(json.dumps(execution_writer.document(nodes), indent=1), random.Random(seed))
    trace = TraceView(read_bytes("et_rank0.json", data))
    build_call_tree(trace)
    for result in score_view(trace).metrics.values():
        assert "raised" not in result.detail, result.detail
        assert result.value is None or not METRICS.get(result.name).needs_times or not trace.ranks


rocprof_keys = st.sampled_from(
    [
        *("agents", "kernel_symbols", "strings", "buffer_records"),
        *("metadata", "kernel_dispatch", "memory_copy", "marker_api"),
    ]
)
odd_sections = st.dictionaries(rocprof_keys, json_values | st.lists(st.dictionaries(rocprof_keys, json_values)))


@light
@given(odd_sections, odd_sections, st.sampled_from([0, -1, 2**63, 2**70, 1.5, "x", None, [], {}]), st.booleans())
def test_rocprofiler_json_of_any_shape_gives_a_status(sections, lists, value, is_first):
    process = training_process()
    process = {**sections, **process} if is_first else {**process, **sections}
    if isinstance(process.get("buffer_records"), dict):
        process["buffer_records"] = {**process["buffer_records"], **lists}
    for records in (process.get("agents"), training_process()["buffer_records"]["kernel_dispatch"]):
        for record in records if isinstance(records, list) else []:
            if isinstance(record, dict):
                record.update(start_timestamp=value, id={"handle": value}, cu_count=value)
    assert read_bytes("1_results.json", json.dumps(rocprof_document(process)).encode()).status in STATUSES


marker_names = st.sampled_from(
    [
        *("ProfilerStep#1", "ProfilerStep#1", "ProfilerStep#999999999999999", "step[DECODE bs=32]", "run_batch"),
        *("step[EXTEND bs=15 toks=15360]", "execute_32_context_0(a)_generation_32(b)", "Optimizer.step#SGD.step"),
        *("[Executor] _forward_step 3: 1 ctx reqs, 2 gen reqs", "PjitFunction(f)", "Optimizer.step#Adam.step"),
    ]
)
marker_events = st.builds(
    lambda category, name, start, length: write.span(category, name, start, length, tid=7, device=0, stream=7),
    st.sampled_from(["user_annotation", "gpu_user_annotation", "cpu_op"]),
    marker_names,
    st.integers(900, 4000),
    st.sampled_from([0, 1, 100, 1000, 10**9]),
)


@light
@given(st.lists(marker_events, max_size=8), st.booleans(), st.booleans())
def test_any_markers_give_windows_inside_the_trace_and_scores_with_a_reason(markers, has_launches, is_instant):
    work = [e for e in write.gpu_events(steps=2) if e["cat"] != "user_annotation"]
    work = [e for e in work if has_launches or e["cat"] != "cuda_runtime"]
    work = [{**e, "dur": 0} if is_instant and e["cat"] == "kernel" else e for e in work]
    document = {"traceEvents": [*work, *markers], "deviceProperties": [{"id": 0, "name": "gpu"}]}
    found = read_bytes("rank0_trace.json", json.dumps(document).encode())
    trace = TraceView(found)
    for view in trace.ranks.values():
        assert (view.parts.window_ns_W > 0).all()
        assert (view.parts.idle_ns_W >= 0).all()
        assert (view.parts.idle_ns_W <= view.parts.window_ns_W).all()
    for result in score_view(trace).metrics.values():
        assert "raised" not in result.detail, result.detail
    for answer in prepare_replay(trace).utilities().values():
        assert 0 <= answer.low_s <= answer.high_s


names_of_calls = st.sampled_from(["PjitFunction(f)", "PjitFunction(g)", "PJRT_LoadedExecutable_Execute", "other"])


@light
@given(st.lists(st.tuples(names_of_calls, st.integers(0, 9), st.integers(0, 4)), max_size=8), st.data())
def test_any_program_calls_of_an_xspace_give_windows_with_time(calls, data):
    host = [(name, start * 10**6, length * 10**6, {}) for name, start, length in calls]
    launches = [
        (("hipLaunchKernel"), start * 10**6, 10, {"correlation_id": n}) for n, (_, start, _) in enumerate(calls)
    ]
    kernels = [
        ("gemm", data.draw(st.integers(0, 20)) * 10**6, data.draw(st.integers(0, 3)) * 10**6, {"correlation_id": n})
        for n in range(data.draw(st.integers(1, 8)))
    ]
    space = write.plane("/device:GPU:0", {"Stream #1": kernels})
    space += write.plane("/host:CPU", {"python": host, "Host Threads/1": launches})
    found = read_bytes("h.xplane.pb", space)
    for table in found.tables.values():
        assert (RankView(table).parts.window_ns_W > 0).all()
    for result in score_view(TraceView(found)).metrics.values():
        assert "raised" not in result.detail, result.detail


@light
@given(st.binary(max_size=300), st.sampled_from(["trace.json", "trace.json.gz", "h.xplane.pb", "r.sqlite"]))
def test_noise_is_not_available(noise, name):
    assert read_bytes(name, noise).status == "not_available"


@pytest.mark.parametrize("table", ["CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"])
@pytest.mark.parametrize("value", [None, "text", 2**63 - 1])
def test_odd_values_in_an_export_give_a_status(tmp_path, table, value):
    path = write.write_nsys(tmp_path / "report.sqlite", processes=1)
    db = sqlite3.connect(path)
    for (column,) in db.execute(f"SELECT name FROM pragma_table_info('{table}')").fetchall():
        db.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid % 2', (value,))
        db.commit()
        assert check(read_traces(path, use_cache=False)).status in STATUSES
    db.close()
