"""Read Chakra execution traces (mlcommons/chakra, `schema/protobuf/et_def.proto`), one rank per file.

Only traces whose nodes have start times are a timeline: `what-if --chakra` writes such traces, and linking with a
profiler's trace gives them. Others are counted: their rows have places in the file instead of times (`is_timed` is
False). A file is a `GlobalMetadata` message and `Node` messages, each after its length. Fields: GlobalMetadata attr=2;
Node name=2 type=3 start_time_micros=6 duration_micros=7 attr=10; AttributeProto name=1 and the value by its type.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from cclsearch.trace.events import Collective, CollectiveKind, DeviceInfo, EventTable, Kind, Reason
from cclsearch.trace.names.kinds import classify_collective
from cclsearch.trace.readers.protobuf_wire import (
    Buffer,
    MalformedMessage,
    WireMessage,
    read_message_bytes,
    read_varint,
    to_signed,
)
from cclsearch.trace.readers.stream import ReadLimits, TraceError, list_faults
from cclsearch.trace.readers.table_builder import NsysRow, build_nsys_table

_MEMORY, _COMPUTE, _SEND, _RECV, _COLLECTIVE = (2, 3), 4, 5, 6, 7
"""`NodeType` of the schema."""
_KINDS = {
    **dict.fromkeys(_MEMORY, Kind.MEMCPY),
    _COMPUTE: Kind.COMPUTE,
    **dict.fromkeys((_SEND, _RECV, _COLLECTIVE), Kind.COMM),
}
_INTEGERS, _STRING = (7, 9, 11, 13, 27), 29
"""Fields of `AttributeProto` with a varint, and with a string."""
COMM_TYPES = (
    *(CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.GATHER),
    *(CollectiveKind.SCATTER, CollectiveKind.BROADCAST, CollectiveKind.ALL_TO_ALL, CollectiveKind.REDUCE_SCATTER),
    *(CollectiveKind.REDUCE_SCATTER, CollectiveKind.BARRIER),
)
"""By `CollectiveCommType` of the schema."""
_OWN_PRODUCER = "ccl-search"
_MAX_US = 2**62 // 1000 - 1

Attributes = dict[str, int | str]


@dataclass
class _Node:
    name: str
    type: int
    start_us: int
    duration_us: int
    place: int = 0
    """Place in the file, in a trace without times."""
    attributes: Attributes = field(default_factory=dict)

    def integer(self, name: str, default: int = -1) -> int:
        """Return a number of the attributes, also if it is written as text."""
        value = self.attributes.get(name, default)
        if isinstance(value, str):
            value = int(value) if value.isdecimal() and len(value) < 19 else default
        return value

    @property
    def duration_ns(self) -> int:
        exact = self.integer("duration_ns")
        return exact if 0 <= exact < 2**62 else self.duration_us * 1000


def read_chakra(path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    """Return the table of the file's rank; raises TraceError if it has no nodes with work."""
    data = read_message_bytes(path, limits)
    try:
        metadata, nodes, is_cut = _read_messages(data, limits)
    except MalformedMessage:
        raise TraceError(Reason.UNREADABLE, "not a Chakra execution trace") from None
    timed = [node for node in nodes if node.type in _KINDS]
    if not timed:
        raise TraceError(Reason.TRACE_TRUNCATED if is_cut else Reason.NO_GPU_EVENTS, "contains no node with work")
    is_timed = len(timed) == 1 or any(node.start_us for node in timed)
    if not is_timed:
        one: Attributes = {"duration_ns": 1}  # places in the file instead of times
        timed = [replace(n, start_us=0, place=at, attributes=n.attributes | one) for at, n in enumerate(timed)]
    table = _build(timed, metadata, path.name, is_timed=is_timed)
    return (replace(table, reasons=list_faults(is_complete=not is_cut)),)


def _read_messages(data: Buffer, limits: ReadLimits) -> tuple[Attributes, list[_Node], bool]:
    """Return the attributes of the metadata, the nodes, and whether the file ends inside a message."""
    metadata: Attributes | None = None
    nodes: list[_Node] = []
    at, end = 0, len(data)
    while at < end:
        try:
            length, at = read_varint(data, at, end, True)
        except MalformedMessage:
            if end - at > 9:  # else the length itself is cut
                raise
            return metadata or {}, nodes, True
        if at + length > end:
            if metadata is None:
                raise MalformedMessage
            return metadata, nodes, True
        if metadata is None:
            metadata = _read_attributes(WireMessage(data, (at, at + length)), 2)
        else:
            nodes.append(_read_node(WireMessage(data, (at, at + length))))
        limits.check_entries(len(nodes), "nodes")
        at += length
    if metadata is None:
        raise MalformedMessage
    return metadata, nodes, False


def _read_node(message: WireMessage) -> _Node:
    start_us, duration_us = message.number(6), message.number(7)
    if max(start_us, duration_us) > _MAX_US:
        raise MalformedMessage
    name = message.text(2)[:4000] or "unnamed node"
    return _Node(name, message.number(3), start_us, duration_us, attributes=_read_attributes(message, 10))


def _read_attributes(message: WireMessage, field: int) -> Attributes:
    found: Attributes = {}
    for attribute in message.messages(field):
        number = max(attribute.number(at, -1) for at in _INTEGERS)
        found[attribute.text(1)] = to_signed(number) if number >= 0 else attribute.text(_STRING)
    return found


def _build(nodes: list[_Node], metadata: Attributes, source: str, *, is_timed: bool) -> EventTable:
    """Return the table; without times computation counts as operators of the host."""
    is_cpu = all(node.integer("is_cpu_op", 0) for node in nodes)
    rows: list[NsysRow] = []
    host: list[NsysRow] = []
    for node in nodes:
        start_ns, kind = node.start_us * 1000 + node.place, _KINDS[node.type]
        row = NsysRow(kind, start_ns, start_ns + node.duration_ns, node.name, max(node.integer("stream", 0), 0))
        if (node.integer("is_cpu_op", 0) and not is_cpu) if is_timed else kind == Kind.COMPUTE:
            row.kind = Kind.CPU_OP
            host.append(row)
            continue
        size = node.integer("tensor_size")
        row.bytes = size if kind == Kind.MEMCPY and 0 <= size < 2**62 else -1
        if kind == Kind.COMM:
            row.call = _collective(node, is_own=metadata.get("producer") == _OWN_PRODUCER)
        rows.append(row)
    if not rows and is_timed:
        raise TraceError(Reason.NO_GPU_EVENTS, "contains no node of a device")
    table = build_nsys_table(rows, host, DeviceInfo(0), base_ns=0, source=source)
    rank, world = metadata.get("rank"), metadata.get("world_size")
    return replace(
        table,
        format="chakra",
        is_timed=is_timed,
        accelerator="cpu" if is_cpu else "gpu",
        rank=rank if isinstance(rank, int) and 0 <= rank < 2**31 else -1,
        world_size=world if isinstance(world, int) and 0 < world < 2**31 else None,
    )


def _collective(node: _Node, *, is_own: bool) -> Collective:
    number = node.integer("comm_type")
    kind = COMM_TYPES[number] if 0 <= number < len(COMM_TYPES) else classify_collective(node.name)
    peer = None
    if node.type in (_SEND, _RECV):
        kind = CollectiveKind.SEND if node.type == _SEND else CollectiveKind.RECV
        found = node.integer("comm_dst" if node.type == _SEND else "comm_src")
        peer = found if 0 <= found < 2**31 else None
    size = node.integer("comm_size")
    known = size if 0 <= size < 2**62 else None
    listed = str(node.attributes.get("involved_ranks", "")).split(",")
    ranks = tuple(int(part) for part in listed if part.isdecimal() and len(part) < 10)
    group = node.attributes.get("pg_name")
    is_output = kind is CollectiveKind.ALL_GATHER and is_own
    return Collective(
        kind,
        group=group if isinstance(group, str) and group else None,
        group_ranks=ranks or None,
        group_size=len(ranks) or None,
        in_bytes=None if is_output else known,
        out_bytes=known if is_output else None,
        peer=peer,
        has_args=known is not None,
    )
