"""PyTorch execution traces as input: counts, FLOP and bytes, and no figure that needs times."""

from __future__ import annotations

import json
from pathlib import Path

import execution_writer as write
import pytest
from paths import TESTS

from cclsearch.cli import main
from cclsearch.plugins import METRICS
from cclsearch.trace.answers.operators import build_call_tree
from cclsearch.trace.events import CollectiveKind, Kind, Reason
from cclsearch.trace.metric import Status
from cclsearch.trace.read import read_traces
from cclsearch.trace.score import score_view, try_diagnose
from cclsearch.trace.view import TraceView

RECORDED = TESTS / "recorded" / "gloo-execution2"
COUNTED = {"op_calls", "op_flops", "comm_calls", "comm_volume"}


def view_of(folder: Path, data: bytes) -> TraceView:
    (folder / "et_rank0.json").write_bytes(data)
    return TraceView(read_traces(folder, use_cache=False))


def recorded_alone(folder: Path) -> Path:
    for path in RECORDED.glob("execution_*.gz"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_recorded_trace_gives_counts_flops_and_bytes_as_counted_by_hand(tmp_path):
    found = read_traces(recorded_alone(tmp_path))
    assert (found.status, found.ranks, found.world_size) == ("ok", (0, 1), 2)
    metrics = score_view(TraceView(found)).metrics
    forward = 2 * 16 * (64 * 128 + 128 * 8)
    weights = 64 * 128 + 128 + 128 * 8 + 8
    assert metrics["op_flops"].value == 2 * forward + 2 * 16 * 128 * 8
    assert metrics["comm_calls"].value == 1
    assert metrics["comm_volume"].value == 4 * weights
    assert metrics["comm_calls"].n_steps == 3
    by_name = metrics["op_calls"].inputs["by_name"]
    assert (by_name["aten::addmm"], by_name["aten::mm"]) == (2, 3)


def test_no_figure_that_needs_times_is_made_up(tmp_path):
    trace = TraceView(read_traces(recorded_alone(tmp_path)))
    results = {name: METRICS.get(name)(trace) for name in METRICS.names()}
    assert {name for name, result in results.items() if result.status is not Status.NOT_AVAILABLE} == COUNTED
    from_a_log = {"output_tokens_per_s", "requests_per_s", "peak_memory"}
    assert {results[name].reason for name in set(results) - COUNTED - from_a_log} == {Reason.NO_TIMES}
    assert try_diagnose(trace) is None


@pytest.mark.parametrize("option", ["--perfetto", "--unclassified", "--picture", "--chakra"])
def test_what_needs_times_is_refused_in_one_line(tmp_path, option, cli):
    command = ["what-if" if option == "--chakra" else "score", str(recorded_alone(tmp_path)), option]
    assert "without times" in cli.err([*command, *([] if option == "--unclassified" else [str(tmp_path / "out")])])


def test_the_command_shows_what_can_be_told_and_the_tree_of_calls(tmp_path, capsys, cli):
    shown = cli.out(["score", str(recorded_alone(tmp_path))])
    assert "Without times" in shown
    assert [line.split()[0] for line in shown.splitlines()[-4:]] == [
        "op_calls",
        "op_flops",
        "comm_calls",
        "comm_volume",
    ]
    assert main(["score", str(tmp_path), "--operators"]) == 0
    assert any(
        line.split() == ["aten::addmm", "2", "2.949e+05", "FLOP"] for line in capsys.readouterr().out.splitlines()
    )


def test_nccl_calls_have_group_sizes_and_type_from_attributes_or_inputs(tmp_path):
    trace = view_of(tmp_path, write.as_bytes())
    (table,) = trace.trace_set.tables.values()
    calls = [table.collectives[number] for number in table.coll_id[table.rows_of(Kind.COMM)].tolist()]
    assert [(call.kind, call.dtype, call.in_bytes, call.out_bytes, call.group_ranks) for call in calls] == [
        (CollectiveKind.ALL_REDUCE, "BFloat16", 200, 200, (0, 1, 2, 3)),
        (CollectiveKind.REDUCE_SCATTER, "c10::BFloat16", 512, 128, (0, 1, 2, 3)),
    ]
    assert (table.rank, table.world_size, table.accelerator) == (2, 4, "gpu")
    assert METRICS.get("comm_volume")(trace).value == 200 * 2 * 3 / 4 + 512 * 3 / 4
    kernels = METRICS.get("op_calls")(trace).inputs["triton_kernels"]
    assert kernels == {"triton_poi_fused_add_0": 1}


def test_an_operator_inside_another_is_below_it_and_its_flops_count_once(tmp_path):
    trace = view_of(tmp_path, write.as_bytes())
    tree = build_call_tree(trace)
    linear = tree.children["aten::linear"]
    assert (linear.calls, linear.flops, linear.children["aten::mm"].flops) == (1, 1024, 1024)
    assert tree.children["aten::mm"].flops == 1024
    assert METRICS.get("op_flops")(trace).value == 2048
    below = tree.children["c10d::allreduce_"].children["record_param_comms"]
    assert list(below.children) == ["nccl:all_reduce"]


@pytest.mark.parametrize("schema", ["1.0.0", "1.0.1", "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4"])
def test_every_schema_gives_the_same_products(tmp_path, schema):
    make = write.node if "chakra" in schema else write.flat_node
    products = [make(n, "aten::mm", inputs=(write.tensor(8, 16), write.tensor(16, 4))) for n in (3, 4)]
    trace = view_of(tmp_path, write.as_bytes(products, schema))
    assert (trace.trace_set.status, METRICS.get("op_flops")(trace).value) == ("ok", 2048)
    assert [len(table) for table in trace.trace_set.tables.values()] == [len(products)]


def test_the_root_of_a_broadcast_and_the_peer_of_a_send_are_not_the_ranks_own(tmp_path):
    stated = [("allreduce", 2), *[("broadcast", 0)] * 3, *[("send", 3)] * 2, ("recv", 1)]
    nodes = [
        write.node(number, "record_param_comms", inputs=write.call_inputs(*call))
        for number, call in enumerate(stated, start=4)
    ]
    (tmp_path / "et.json").write_bytes(write.as_bytes(nodes))
    (table,) = read_traces(tmp_path, use_cache=False).tables.values()
    calls = [table.collectives[number] for number in table.coll_id[table.rows_of(Kind.COMM)].tolist()]
    assert (table.rank, [call.peer for call in calls]) == (2, [None] * 4 + [3, 3, 1])


@pytest.mark.parametrize(
    ("nodes", "status", "flops"),
    [
        ([write.node(n, "aten::mm", n ^ 1, inputs=(write.tensor(2, 3), write.tensor(3, 5))) for n in (4, 5)], "ok", 60),
        ([write.node(4, "aten::mm", 4, inputs=(write.tensor(2, 3), write.tensor(3, 5)))] * 2, "partial", 60),
        ([write.node(4, "aten::mm", inputs=(write.tensor(10**12, 10**12), write.tensor(10**12, 1)))], "ok", None),
        ([write.node(4, "aten::mm", inputs=(write.tensor(10**400, 2), write.tensor(2, 1)))], "ok", None),
        ([write.node(4, "aten::mm", inputs=(write.tensor(-2, 3), write.tensor(3, 5)))], "ok", None),
        ([{**write.node(4, "aten::mm"), "id": "4"}, write.node(5, "aten::add")], "partial", None),
        ([write.node(2**63, "aten::mm"), write.node(5, "aten::add")], "partial", None),
    ],
    ids=["cycle", "same id twice", "huge", "not a 64-bit size", "negative", "text as id", "id beyond 62 bits"],
)
def test_odd_nodes_give_a_status_and_no_made_up_flops(tmp_path, nodes, status, flops):
    trace = view_of(tmp_path, write.as_bytes(nodes))
    assert trace.trace_set.status == status
    assert METRICS.get("op_flops")(trace).value == flops


def test_a_product_without_shapes_makes_the_flops_a_lower_bound(tmp_path):
    known = write.node(4, "aten::mm", inputs=(write.tensor(2, 3), write.tensor(3, 5)))
    result = METRICS.get("op_flops")(view_of(tmp_path, write.as_bytes([known, write.node(5, "aten::bmm")])))
    assert (result.value, result.status, result.reason) == (60, "partial", Reason.NO_SHAPES)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (write.as_bytes([], "2.0.0"), Reason.FORMAT_UNSUPPORTED),
        (write.as_bytes([]), Reason.UNREADABLE),
        (json.dumps(write.document([])).encode()[:150], Reason.TRACE_TRUNCATED),
    ],
)
def test_without_nodes_or_of_another_schema_there_is_a_reason(tmp_path, data, reason):
    found = view_of(tmp_path, data).trace_set
    assert (found.status, found.reason) == ("not_available", reason)
