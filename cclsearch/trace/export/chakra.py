"""Chakra execution traces for ASTRA-sim (mlcommons/chakra, `schema/protobuf/et_def.proto`), one file per rank.

A file is a `GlobalMetadata` message followed by `Node` messages, each after its length as a varint. Nodes are the
device events of one step: computation, copies and collectives with the dependencies that the trace shows. Their
attributes have the names that Chakra's converter and ASTRA-sim's feeder use (`comm_type`, `comm_size`, `pg_name`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from cclsearch.core.errors import UserError, writing_to
from cclsearch.core.text import one_line
from cclsearch.trace.collectives import count_unsized, group_label
from cclsearch.trace.diagnosis.causes import median_window
from cclsearch.trace.events import POINT_TO_POINT, Collective, CollectiveKind, EventTable, Kind
from cclsearch.trace.readers.chakra import COMM_TYPES
from cclsearch.trace.view import NO_TIMES, RankView, TraceView
from cclsearch.trace.whatif.graph import RankGraph, build_graph

_VARINT, _BYTES = 0, 2


def encode_varint(value: int) -> bytes:
    """Return an unsigned varint; negative numbers use the ten bytes of their two's complement, like int64."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@cache
def _key(number: int, kind: int) -> bytes:
    return encode_varint(number << 3 | kind)


def uint_field(number: int, value: int) -> bytes:
    """Return an integer, boolean or enum field; proto3 does not write zero."""
    return _key(number, _VARINT) + encode_varint(value) if value else b""


def present_uint_field(number: int, value: int) -> bytes:
    """Return an integer field that is written even if it is zero, as a member of a oneof must be."""
    return _key(number, _VARINT) + encode_varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    """Return a string, bytes or message field."""
    return _key(number, _BYTES) + encode_varint(len(value)) + value


def text_field(number: int, value: str) -> bytes:
    """Return a string field; proto3 does not write the empty string."""
    return bytes_field(number, value.encode("utf-8", "replace")) if value else b""


def packed_field(number: int, values: Iterable[int]) -> bytes:
    """Return a repeated integer field in packed form; nothing if there are no values."""
    packed = b"".join(encode_varint(value) for value in values)
    return bytes_field(number, packed) if packed else b""


def delimited(message: bytes) -> bytes:
    """Return a message after its length, as Chakra files store messages."""
    return encode_varint(len(message)) + message


SCHEMA_VERSION = "0.0.4"
_COMP_NODE, _SEND_NODE, _RECV_NODE, _COLL_NODE = 4, 5, 6, 7
_MEM_LOAD_NODE = 2
_INT64, _UINT64, _BOOL, _STRING = 9, 13, 27, 29
"""Fields of `AttributeProto` by the type of the value."""


def export_chakra(trace: TraceView, folder: Path) -> list[Path]:
    """Write `chakra.<rank>.et` for every rank with the events of its median step (without steps, of the whole file).

    Returns the paths. Raises UserError if no rank has a device event, or if the folder cannot be written to.
    """
    if not trace.is_timed:
        raise UserError(f"--chakra needs times: {NO_TIMES}")
    graphs = [(view, _graph_of(trace, view)) for view in trace.ranks.values() if len(view.windows.spans_W2)]
    if not graphs:
        raise UserError("no device event to export: choose a trace that `ccl-search score` can read")
    paths = []
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for view, graph in graphs:
            path = folder / f"chakra.{view.rank}.et"
            path.write_bytes(b"".join(_messages(trace, view.table, graph)))
            paths.append(path)
    return paths


def describe_unsized_collectives(trace: TraceView) -> list[str]:
    """Return one line each if collectives in the exported traces have no size, or messages no other rank."""
    steps = [(view.table, _graph_of(trace, view).rows) for view in trace.ranks.values() if len(view.windows.spans_W2)]
    unsized, total = count_unsized(steps)
    notes = []
    if unsized:
        notes.append(
            f"{unsized} of {total} collectives have no recorded message size: no comm_size in the Chakra traces"
        )
    unpaired = sum(
        _is_unpaired(trace, table, table.collectives[number])
        for table, rows in steps
        for number in table.coll_id[rows[table.kind[rows] == Kind.COMM]].tolist()
    )
    if unpaired:
        notes.append(f"{unpaired} point-to-point messages name no other rank: computation of equal length in Chakra")
    return notes


def _peer_of(trace: TraceView, table: EventTable, call: Collective) -> int | None:
    """Return the other rank of a point-to-point call: as recorded, else the only other one of its group or run."""
    if call.peer is not None:
        return call.peer
    group = call.group_ranks or (tuple(trace.ranks) if trace.num_devices == len(trace.ranks) else ())
    others = [rank for rank in group if rank != table.rank]
    return others[0] if len(others) == 1 else None


def _is_unpaired(trace: TraceView, table: EventTable, call: Collective) -> bool:
    """Whether the call is point to point with an unknown other rank: a simulator cannot deliver it."""
    return call.kind in POINT_TO_POINT and _peer_of(trace, table, call) is None


def _graph_of(trace: TraceView, view: RankView) -> RankGraph:
    return build_graph(trace, view, median_window(view), (trace.matching.offset_ns or {}).get(view.rank, 0))


def _messages(trace: TraceView, table: EventTable, graph: RankGraph) -> Iterator[bytes]:
    yield delimited(_global_metadata(table, trace.num_devices))
    first = int(graph.start_ns[0]) if len(graph.rows) else 0
    for i in range(len(graph.rows)):
        yield delimited(_node(trace, table, graph, i, first))


def _global_metadata(table: EventTable, world: int) -> bytes:
    return (
        text_field(1, SCHEMA_VERSION)
        + bytes_field(2, _int_attr("rank", table.rank))
        + bytes_field(2, _int_attr("world_size", world))
        + bytes_field(2, _text_attr("producer", "ccl-search"))
    )


def _node(trace: TraceView, table: EventTable, graph: RankGraph, i: int, first_ns: int) -> bytes:
    """Return one `Node`: ids start at 1, since a dependency on 0 would be encoded like no dependency."""
    row = int(graph.rows[i])
    kind = int(graph.kind[i])
    call = table.collectives[int(table.coll_id[row])] if kind == Kind.COMM else None
    peer = _peer_of(trace, table, call) if call is not None else None
    if call is not None and _is_unpaired(trace, table, call):
        call = None
    depends = sorted({int(j) + 1 for j in (graph.before[i], graph.waited[i], graph.producer[i]) if j >= 0})
    issued = [int(graph.issuer[i]) + 1] if graph.issuer[i] >= 0 else []
    duration_us = -(-int(graph.end_ns[i] - graph.start_ns[i]) // 1000)
    attributes = [_int_attr("is_cpu_op", table.accelerator == "cpu", _BOOL), *_attributes(table, graph, i, call, peer)]
    return (
        uint_field(1, i + 1)
        + text_field(2, one_line(table.names[int(table.name_id[row])], 120))
        + uint_field(3, _node_type(kind, call))
        + packed_field(4, issued)
        + packed_field(5, depends)
        + uint_field(6, (int(graph.start_ns[i]) - first_ns) // 1000)
        + uint_field(7, duration_us)
        + b"".join(bytes_field(10, attribute) for attribute in attributes)
    )


def _node_type(kind: int, call: Collective | None) -> int:
    if call is None:
        return _MEM_LOAD_NODE if kind in (Kind.MEMCPY, Kind.MEMSET) else _COMP_NODE
    if call.kind is CollectiveKind.RECV:
        return _RECV_NODE
    return _SEND_NODE if call.kind in (CollectiveKind.SEND, CollectiveKind.SEND_RECV) else _COLL_NODE


def _attributes(
    table: EventTable, graph: RankGraph, i: int, call: Collective | None, peer: int | None
) -> Iterator[bytes]:
    row = int(graph.rows[i])
    yield _int_attr("stream", int(table.stream[row]))
    yield _int_attr("duration_ns", int(graph.end_ns[i] - graph.start_ns[i]))
    if call is None:
        size = int(table.bytes[row])
        if size >= 0:
            yield _int_attr("tensor_size", size, _UINT64)
        return
    if call.kind in COMM_TYPES:
        yield _int_attr("comm_type", COMM_TYPES.index(call.kind))
    if call.message_bytes is not None:
        yield _int_attr("comm_size", call.message_bytes)
    yield _int_attr("transfer_ns", int(graph.transfer_ns[i]))
    yield _text_attr("pg_name", call.group or group_label(call))
    if call.group_ranks:
        yield _text_attr("involved_ranks", ",".join(map(str, call.group_ranks)))
    if peer is not None and call.kind in POINT_TO_POINT:
        receives = call.kind is CollectiveKind.RECV
        yield _int_attr("comm_src", peer if receives else table.rank)
        yield _int_attr("comm_dst", table.rank if receives else peer)


def _int_attr(name: str, value: int, field: int = _INT64) -> bytes:
    return text_field(1, name) + present_uint_field(field, value)


def _text_attr(name: str, value: str) -> bytes:
    return text_field(1, name) + bytes_field(_STRING, value.encode("utf-8", "replace"))
