"""Exported Chakra traces, read back by an independent reader of the published schema."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from trace_tables import Timeline, make_set

from cclsearch.core.errors import UserError
from cclsearch.trace.events import CollectiveKind, EventTable
from cclsearch.trace.export.chakra import describe_unsized_collectives, export_chakra
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


def test_metadata_has_rank_and_world_size(exported: list[tuple[Message, list[Message]]]) -> None:
    for rank, (metadata, _) in enumerate(exported):
        assert metadata.text(1)  # version
        assert metadata.attributes(2)["rank"] == rank
        assert metadata.attributes(2)["world_size"] == 2


def test_nodes_are_those_of_one_step_with_their_types(exported: list[tuple[Message, list[Message]]]) -> None:
    types = [[node.integer(3) for node in nodes] for _, nodes in exported]
    assert types[0] == [COMP_NODE, MEM_LOAD_NODE, COMM_COLL_NODE, COMM_COLL_NODE, COMM_SEND_NODE]
    assert types[1] == [COMP_NODE, MEM_LOAD_NODE, COMM_COLL_NODE, COMM_COLL_NODE, COMM_RECV_NODE]


def test_times_are_microseconds_from_the_start_of_the_step(exported: list[tuple[Message, list[Message]]]) -> None:
    nodes = exported[0][1]
    assert [node.integer(6) for node in nodes] == [0, 30, 35, 56, 70]
    assert [node.integer(7) for node in nodes] == [30, 5, 20, 10, 5]


def test_dependencies_are_earlier_nodes_without_cycles(exported: list[tuple[Message, list[Message]]]) -> None:
    for _, nodes in exported:
        ids = [node.integer(1) for node in nodes]
        assert len(set(ids)) == len(ids)
        assert 0 not in ids
        for node in nodes:
            depends = node.packed(4) + node.packed(5)
            assert all(other in ids and other < node.integer(1) for other in depends)
        assert nodes[2].packed(5) == [ids[1]]  # the all-reduce waited for the copy that ended as it began


def test_collectives_have_kind_size_and_group(exported: list[tuple[Message, list[Message]]]) -> None:
    nodes = exported[0][1]
    reduce, gather, send = (node.attributes(10) for node in nodes[2:])
    assert (reduce["comm_type"], reduce["comm_size"], reduce["involved_ranks"]) == (ALL_REDUCE, 1 << 20, "0,1")
    assert (gather["comm_type"], gather["comm_size"]) == (ALL_GATHER, 2048)
    assert (send["comm_src"], send["comm_dst"]) == (0, 1)
    received = exported[1][1][4].attributes(10)
    assert (received["comm_src"], received["comm_dst"]) == (0, 1)
    assert nodes[0].attributes(10)["is_cpu_op"] == 0
    assert nodes[1].attributes(10)["tensor_size"] == 4096


def test_names_are_utf8_and_clipped(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.kernel(0, 5, "kernel \udcff\x1b[31m" + "x" * 500)
    (path,) = export_chakra(TraceView(make_set([timeline.table()])), tmp_path)
    _, (node,) = read_trace(path)
    assert len(node.text(2)) <= 120
    assert "\x1b" not in node.text(2)


def test_a_trace_without_device_events_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no device event"):
        export_chakra(TraceView(make_set([Timeline().table()])), tmp_path)


@pytest.mark.parametrize(("size", "notes"), [(None, ["1 of 2 collectives have no recorded message size"]), (8, [])])
def test_collectives_without_a_size_are_noted(size: int | None, notes: list[str]) -> None:
    timeline = Timeline(world_size=2)
    timeline.collective(0, 10, message_bytes=size)
    timeline.collective(20, 10, CollectiveKind.BARRIER, message_bytes=None)
    lines = describe_unsized_collectives(TraceView(make_set([timeline.table()])))
    assert [line.split(":")[0] for line in lines] == notes
