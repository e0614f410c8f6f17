"""Chakra traces: writing and reading."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from trace_tables import Timeline, make_set

from cclsearch.core.errors import UserError
from cclsearch.plugins import METRICS
from cclsearch.trace.diagnosis.causes import median_window
from cclsearch.trace.events import CollectiveKind, EventTable, Kind, Reason
from cclsearch.trace.export.chakra import (
    bytes_field,
    delimited,
    describe_unsized_collectives,
    export_chakra,
    present_uint_field,
    text_field,
    uint_field,
)
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

COMP_NODE, MEM_LOAD_NODE, COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE = 4, 2, 5, 6, 7
ALL_REDUCE, ALL_GATHER = 0, 2


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def read_fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield (field number, wire type, value) of a message, for protobuf wire types 0, 1, 2 and 5."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value: int | bytes
            value, at = read_varint(data, at)
        elif kind == 2:
            length, at = read_varint(data, at)
            assert at + length <= len(data)
            value, at = data[at : at + length], at + length
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = struct.unpack("<q" if kind == 1 else "<i", data[at : at + size])[0], at + size
        else:
            raise AssertionError(f"no field of the schema has wire type {kind}")
        yield number, kind, value


@dataclass
class Message:
    """One message: the values of each field number."""

    fields: dict[int, list[int | bytes]] = field(default_factory=dict)

    def integer(self, number: int) -> int:
        (value,) = self.fields.get(number, [0])
        assert isinstance(value, int)
        return value

    def text(self, number: int) -> str:
        (value,) = self.fields.get(number, [b""])
        assert isinstance(value, bytes)
        return value.decode()

    def packed(self, number: int) -> list[int]:
        found: list[int] = []
        for value in self.fields.get(number, []):
            if isinstance(value, int):
                found.append(value)
                continue
            at = 0
            while at < len(value):
                one, at = read_varint(value, at)
                found.append(one)
        return found

    def attributes(self, number: int) -> dict[str, int | str]:
        """Return attributes (AttributeProto): name 1, int64_val 9, uint64_val 13, bool_val 27 or string_val 29."""
        found: dict[str, int | str] = {}
        for value in self.fields.get(number, []):
            assert isinstance(value, bytes)
            inner = parse(value)
            (kind,) = set(inner.fields) - {1}
            assert kind in (9, 13, 27, 29)
            found[inner.text(1)] = inner.text(29) if kind == 29 else inner.integer(kind)
        return found


def parse(data: bytes) -> Message:
    message = Message()
    for number, _, value in read_fields(data):
        message.fields.setdefault(number, []).append(value)
    return message


def read_trace(path: Path) -> tuple[Message, list[Message]]:
    """Return the GlobalMetadata and the nodes; each message follows its length."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        length, at = read_varint(data, at)
        assert at + length <= len(data)
        messages.append(parse(data[at : at + length]))
        at += length
    return messages[0], messages[1:]


def training_tables() -> list[EventTable]:
    tables = []
    for rank in range(2):
        timeline = Timeline(rank=rank, world_size=2)
        for i in range(6):
            number, begin = timeline.step(i * 100, i * 100 + 90), i * 100
            timeline.kernel(begin, 30, "gemm", launched_us=begin - 5, step_id=number)
            timeline.copy(begin + 30, 5, bytes=4096, step_id=number)
            timeline.collective(begin + 35, 20, CollectiveKind.ALL_REDUCE, 1 << 20, group_ranks=(0, 1), step_id=number)
            timeline.collective(begin + 56, 10, CollectiveKind.ALL_GATHER, 2048, group_desc="mesh_tp", step_id=number)
            kind = CollectiveKind.SEND if rank == 0 else CollectiveKind.RECV
            timeline.collective(begin + 70, 5, kind, 512, peer=1 - rank, step_id=number)
        tables.append(timeline.table())
    return tables


@pytest.fixture
def exported(tmp_path: Path) -> list[tuple[Message, list[Message]]]:
    paths = export_chakra(TraceView(make_set(training_tables())), tmp_path / "out")
    assert [path.name for path in paths] == ["chakra.0.et", "chakra.1.et"]
    return [read_trace(path) for path in paths]


def test_metadata_has_rank_and_world_size(exported):
    for rank, (metadata, _) in enumerate(exported):
        assert metadata.text(1)  # version
        assert metadata.attributes(2)["rank"] == rank
        assert metadata.attributes(2)["world_size"] == 2


def test_nodes_are_those_of_one_step_with_their_types(exported):
    types = [[node.integer(3) for node in nodes] for _, nodes in exported]
    assert types[0] == [COMP_NODE, MEM_LOAD_NODE, COMM_COLL_NODE, COMM_COLL_NODE, COMM_SEND_NODE]
    assert types[1] == [COMP_NODE, MEM_LOAD_NODE, COMM_COLL_NODE, COMM_COLL_NODE, COMM_RECV_NODE]


def test_times_are_microseconds_from_the_start_of_the_step(exported):
    nodes = exported[0][1]
    assert [node.integer(6) for node in nodes] == [0, 30, 35, 56, 70]
    assert [node.integer(7) for node in nodes] == [30, 5, 20, 10, 5]


def test_dependencies_are_earlier_nodes_without_cycles(exported):
    for _, nodes in exported:
        ids = [node.integer(1) for node in nodes]
        assert len(set(ids)) == len(ids)
        assert 0 not in ids
        for node in nodes:
            depends = node.packed(4) + node.packed(5)
            assert all(other in ids and other < node.integer(1) for other in depends)
        assert nodes[2].packed(5) == [ids[1]]  # the all-reduce waited for the copy that ended as it began


def test_collectives_have_kind_size_and_group(exported):
    nodes = exported[0][1]
    reduce, gather, send = (node.attributes(10) for node in nodes[2:])
    assert (reduce["comm_type"], reduce["comm_size"], reduce["involved_ranks"]) == (ALL_REDUCE, 1 << 20, "0,1")
    assert (gather["comm_type"], gather["comm_size"]) == (ALL_GATHER, 2048)
    assert (send["comm_src"], send["comm_dst"]) == (0, 1)
    received = exported[1][1][4].attributes(10)
    assert (received["comm_src"], received["comm_dst"]) == (0, 1)
    assert nodes[0].attributes(10)["is_cpu_op"] == 0
    assert nodes[1].attributes(10)["tensor_size"] == 4096


def test_names_are_utf8_and_clipped(tmp_path):
    timeline = Timeline()
    timeline.kernel(0, 5, "kernel \udcff\x1b[31m" + "x" * 500)
    (path,) = export_chakra(TraceView(make_set([timeline.table()])), tmp_path)
    _, (node,) = read_trace(path)
    assert len(node.text(2)) <= 120
    assert "\x1b" not in node.text(2)


def test_a_trace_without_device_events_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no device event"):
        export_chakra(TraceView(make_set([Timeline().table()])), tmp_path)


@pytest.mark.parametrize(("size", "notes"), [(None, ["1 of 2 collectives have no recorded message size"]), (8, [])])
def test_collectives_without_a_size_are_noted(size, notes):
    timeline = Timeline(world_size=2)
    timeline.collective(0, 10, message_bytes=size)
    timeline.collective(20, 10, CollectiveKind.BARRIER, message_bytes=None)
    lines = describe_unsized_collectives(TraceView(make_set([timeline.table()])))
    assert [line.split(":")[0] for line in lines] == notes


METADATA = delimited(text_field(1, "0.0.4"))


def node(number: int, kind: int, start_us: int, duration_us: int, *attributes: tuple[str, int, int | str]) -> bytes:
    """Return a node; attributes are (name, field of the type, value)."""
    body = uint_field(1, number) + text_field(2, f"node {number}") + uint_field(3, kind)
    body += uint_field(6, start_us) + uint_field(7, duration_us)
    for name, place, value in attributes:
        value = bytes_field(place, value.encode()) if isinstance(value, str) else present_uint_field(place, value)
        body += bytes_field(10, text_field(1, name) + value)
    return delimited(body)


def describe(table: EventTable, rows: np.ndarray) -> list[tuple[object, ...]]:
    calls = [table.collectives[number] if number >= 0 else None for number in table.coll_id[rows].tolist()]
    first = int(table.ts_ns[rows[0]])
    return [
        (
            int(table.kind[row]),
            table.names[table.name_id[row]],
            (int(table.ts_ns[row]) - first) // 1000,
            int(table.dur_ns[row]),
            int(table.bytes[row]),
            call and (call.kind, call.message_bytes, call.peer),
        )
        for row, call in zip(rows.tolist(), calls, strict=True)
    ]


def test_our_own_export_reads_back(tmp_path):
    trace = TraceView(make_set(training_tables()))
    export_chakra(trace, tmp_path)
    found = read_traces(tmp_path)
    assert (found.status, sorted(found.tables), found.world_size) == ("ok", [0, 1], 2)
    for rank, view in trace.ranks.items():
        start, end = median_window(view)
        rows = view.device_rows
        rows = rows[(view.table.ts_ns[rows] >= start) & (view.table.ts_ns[rows] < end)]
        table = found.tables[rank]
        assert describe(table, table.rows_of(*Kind)) == describe(view.table, rows)
        assert table.format == "chakra"


def test_a_linked_trace_has_host_and_device_rows(tmp_path):
    on_host, on_device = ("is_cpu_op", 27, 1), ("is_cpu_op", 27, 0)
    call = (("comm_type", 9, 0), ("comm_size", 9, 4096), ("pg_name", 29, "3"), on_device, ("stream", 7, 20))
    data = (
        METADATA
        + node(1, 4, 10, 5, on_host)
        + node(2, 4, 20, 5, on_device, ("stream", 9, 7))
        + node(3, 7, 30, 9, *call)
    )
    (tmp_path / "rank3.et").write_bytes(data)
    found = read_traces(tmp_path)
    table = found.tables[3]
    assert table.kind.tolist() == [Kind.COMPUTE, Kind.COMM, Kind.CPU_OP]
    assert (table.ts_ns.tolist(), table.dur_ns.tolist()) == ([10_000, 20_000, 0], [5_000, 9_000, 5_000])
    assert table.stream[:2].tolist() == [7, 20]
    (one,) = table.collectives
    assert (one.kind, one.in_bytes, one.out_bytes, one.group) == (CollectiveKind.ALL_REDUCE, 4096, None, "3")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (METADATA, Reason.NO_GPU_EVENTS),
        (b"", Reason.UNREADABLE),
        (b"no protocol buffer at all", Reason.UNREADABLE),
        (METADATA + node(1, 4, 2**63, 5), Reason.UNREADABLE),
        (METADATA + node(1, 4, 7, 5)[:-2], Reason.TRACE_TRUNCATED),
    ],
)
def test_without_times_or_nodes_there_is_a_reason(tmp_path, data, reason):
    (tmp_path / "chakra.0.et").write_bytes(data)
    found = read_traces(tmp_path)
    assert (found.status, found.reasons) == ("not_available", (reason,))


def test_a_file_cut_inside_a_node_is_partial(tmp_path):
    (tmp_path / "chakra.0.et").write_bytes(METADATA + node(1, 4, 7, 5) + node(2, 4, 12, 5)[:-3])
    found = read_traces(tmp_path)
    assert (found.status, found.reasons, len(found.tables[0])) == ("partial", (Reason.TRACE_TRUNCATED,), 1)


@pytest.mark.parametrize("duration_us", [0, 5])
def test_without_start_times_nodes_and_bytes_are_counted(tmp_path, duration_us):
    call = (("comm_type", 9, 0), ("comm_size", 9, 4096), ("involved_ranks", 29, "0,1,2,3"))
    nodes = [node(1, 4, 0, duration_us), node(2, 7, 0, duration_us, *call), node(3, 4, 0, duration_us)]
    (tmp_path / "chakra.0.et").write_bytes(METADATA + b"".join(nodes))
    trace = TraceView(read_traces(tmp_path))
    results = {name: METRICS.get(name)(trace) for name in ("op_calls", "comm_calls", "comm_volume", "op_flops")}
    assert {name: result.value for name, result in results.items()} == {
        "op_calls": 2,
        "comm_calls": 1,
        "comm_volume": 4096 * 2 * 3 / 4,
        "op_flops": None,
    }
    assert METRICS.get("comm_time")(trace).reason == Reason.NO_TIMES


def test_computation_alone_without_start_times_is_counted(tmp_path):
    on_host = ("is_cpu_op", 27, 1)
    (tmp_path / "chakra.0.et").write_bytes(METADATA + node(1, 4, 0, 5, on_host) + node(2, 4, 0, 7, on_host))
    assert METRICS.get("op_calls")(TraceView(read_traces(tmp_path))).value == 2
