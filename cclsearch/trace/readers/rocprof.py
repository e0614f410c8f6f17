"""Reads rocprofiler-sdk's JSON (`rocprofv3 --output-format json`) into one table per device of each process.

The file has one list of records per domain (kernels, copies, HIP calls, ROCTx ranges), and tables of names: kernels by
`kernel_id`, calls by the numbers of their kind and operation, ranges by correlation id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from cclsearch.trace.events import DeviceInfo, EventTable, Kind, Reason
from cclsearch.trace.readers.columns import positive_int
from cclsearch.trace.readers.json_sections import SectionReader
from cclsearch.trace.readers.stream import ByteStream, ReadLimits, TraceError, list_faults
from cclsearch.trace.readers.table_builder import NsysRow, build_nsys_table

TOOL = "rocprofiler-sdk-tool"
_CPU, _GPU = 1, 2
"""Types of agents."""


class _Handle(msgspec.Struct, gc=False):
    """A number in an object, as rocprofiler writes ids."""

    handle: int = -1


class _Correlation(msgspec.Struct, gc=False):
    internal: int = -1
    ancestor: int = 0


class _Size(msgspec.Struct, gc=False):
    x: int = 1
    y: int = 1
    z: int = 1

    @property
    def volume(self) -> int:
        return self.x * self.y * self.z


class _DispatchInfo(msgspec.Struct, gc=False):
    kernel_id: int = -1
    agent_id: _Handle = msgspec.field(default_factory=_Handle)
    queue_id: _Handle = msgspec.field(default_factory=_Handle)
    group_segment_size: int = 0
    workgroup_size: _Size = msgspec.field(default_factory=_Size)
    grid_size: _Size = msgspec.field(default_factory=_Size)
    """Size in work items."""


class _Record(msgspec.Struct, gc=False):
    """A record of any domain, times in ns."""

    kind: int = -1
    operation: int = -1
    thread_id: int = -1
    correlation_id: _Correlation = msgspec.field(default_factory=_Correlation)
    start_timestamp: int = -1
    end_timestamp: int = -1
    dispatch_info: _DispatchInfo | None = None
    stream_id: _Handle = msgspec.field(default_factory=_Handle)
    src_agent_id: _Handle = msgspec.field(default_factory=_Handle)
    dst_agent_id: _Handle = msgspec.field(default_factory=_Handle)
    bytes: int = -1

    @property
    def is_span(self) -> bool:
        return 0 <= self.start_timestamp <= self.end_timestamp < 2**62


class _Symbol(msgspec.Struct, gc=False):
    kernel_id: int = -1
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    kernel_name: str = ""
    arch_vgpr_count: int = 0


class _MemoryBank(msgspec.Struct, gc=False):
    size_in_bytes: int = 0


class _Agent(msgspec.Struct, gc=False):
    id: _Handle = msgspec.field(default_factory=_Handle)
    type: int = 0
    logical_node_type_id: int = -1
    name: str = ""
    product_name: str = ""
    cu_count: int = 0
    mem_banks: list[_MemoryBank] = []


class _Text(msgspec.Struct, gc=False):
    key: int = -1
    value: str = ""


class _Operations(msgspec.Struct, gc=False):
    kind: str = ""
    operations: list[str] = []


class _Node(msgspec.Struct, gc=False):
    hostname: str = ""


class _Metadata(msgspec.Struct, gc=False):
    node: _Node = msgspec.field(default_factory=_Node)


_DOMAINS = ("kernel_dispatch", "memory_copy", "hip_api", "hsa_api", "marker_api", "rccl_api")
_TYPES: dict[str, type[Any]] = {
    f"{TOOL}/metadata": _Metadata,
    f"{TOOL}/agents": _Agent,
    f"{TOOL}/kernel_symbols": _Symbol,
    f"{TOOL}/strings/buffer_records": _Operations,
    f"{TOOL}/strings/marker_api": _Text,
    **{f"{TOOL}/buffer_records/{domain}": _Record for domain in _DOMAINS},
}
_ENTERED = frozenset({"", TOOL, f"{TOOL}/strings", f"{TOOL}/buffer_records"})


@dataclass
class _Process:
    """One process in the file; names may follow the records that use them."""

    host: str = ""
    agents: dict[int, _Agent] = field(default_factory=dict)
    kernels: dict[int, _Symbol] = field(default_factory=dict)
    operations: list[_Operations] = field(default_factory=list)
    messages: dict[int, str] = field(default_factory=dict)
    """Text of ROCTx ranges by correlation id."""
    ancestors: dict[int, int] = field(default_factory=dict)
    """HIP call of each HSA call inside one, by correlation id."""
    records: dict[str, list[_Record]] = field(default_factory=dict)

    @property
    def num_entries(self) -> int:
        """Number of records and names."""
        names = len(self.kernels) + len(self.messages) + len(self.ancestors) + len(self.operations)
        return names + sum(map(len, self.records.values()))

    def add(self, section: str, batch: list[Any]) -> None:
        """Keep the records of one section."""
        if section == "metadata":
            self.host = batch[0].node.hostname
        elif section == "agents":
            self.agents.update((agent.id.handle, agent) for agent in batch)
        elif section == "kernel_symbols":
            self.kernels.update((symbol.kernel_id, symbol) for symbol in batch)
        elif section == "strings/buffer_records":
            self.operations += batch
        elif section == "strings/marker_api":
            self.messages.update((text.key, text.value) for text in batch)
        elif section == "buffer_records/hsa_api":
            calls = (call.correlation_id for call in batch)
            self.ancestors.update((call.internal, call.ancestor) for call in calls if call.ancestor)
        else:
            spans = [record for record in batch if record.is_span]
            self.records.setdefault(section.rpartition("/")[2], []).extend(spans)


def read_rocprof(path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    """Return one table per device that has rows; raises TraceError if nothing can be read."""
    processes: list[_Process] = []
    with ByteStream(path, limits) as stream:
        reader = SectionReader(stream, limits, entered=_ENTERED, types=_TYPES)
        for place, batch in reader:
            if not batch or not processes:
                processes.append(_Process())
            if batch:
                processes[-1].add(place.removeprefix(f"{TOOL}/"), batch)
            limits.check_entries(sum(process.num_entries for process in processes), "records")
    tables = [table for process in processes for table in _build_tables(process, path.name)]
    if not tables:
        if not reader.complete:
            raise TraceError(Reason.TRACE_TRUNCATED, "ends before its first kernel")
        raise TraceError(Reason.NO_GPU_EVENTS, "contains no kernel and no copy of any device")
    reasons = list_faults(is_complete=reader.complete, num_bad=reader.num_bad)
    return tuple(replace(table, reasons=(*reasons, *table.reasons)) for table in tables)


def _build_tables(process: _Process, source: str) -> Iterator[EventTable]:
    by_agent: dict[int, list[NsysRow]] = {}
    for agent, row in (*_kernel_rows(process), *_copy_rows(process)):
        by_agent.setdefault(agent, []).append(row)
    if not by_agent:
        return
    host = list(_host_rows(process))
    for agent, rows in sorted(by_agent.items(), key=lambda item: (_device_of(process, item[0]).ordinal, item[0])):
        device = _device_of(process, agent)
        table = build_nsys_table(rows, host, device, base_ns=0, source=source)
        marker = "roctx" if table.steps else ""
        yield replace(table, format="rocprof", step_source=marker, host=process.host)


def _device_of(process: _Process, handle: int) -> DeviceInfo:
    agent = process.agents.get(handle)
    if agent is None:
        return DeviceInfo(0)
    ordinal = agent.logical_node_type_id if 0 <= agent.logical_node_type_id < 2**15 else 0
    memory = sum(bank.size_in_bytes for bank in agent.mem_banks)
    return DeviceInfo(
        ordinal,
        agent.product_name or agent.name,
        num_sms=positive_int(agent.cu_count, 2**31),
        memory_bytes=positive_int(memory),
    )


def _kernel_rows(process: _Process) -> Iterator[tuple[int, NsysRow]]:
    for record in process.records.get("kernel_dispatch", ()):
        info = record.dispatch_info or _DispatchInfo()
        symbol = process.kernels.get(info.kernel_id) or _Symbol()
        name = symbol.formatted_kernel_name or symbol.demangled_kernel_name or symbol.kernel_name
        row = _row(process, Kind.COMPUTE, record, name or f"unnamed kernel {info.kernel_id}", info.queue_id.handle)
        threads, items = info.workgroup_size.volume, info.grid_size.volume
        if 0 < threads < 2**31 and 0 < items < 2**62:
            registers, shared = (
                value if 0 <= value < 2**31 else 0 for value in (symbol.arch_vgpr_count, info.group_segment_size)
            )
            row.grid = (-(-items // threads), threads, registers, shared)
        yield info.agent_id.handle, row


def _copy_rows(process: _Process) -> Iterator[tuple[int, NsysRow]]:
    """Yield the copies; one between two devices belongs to the one that receives it."""
    for record in process.records.get("memory_copy", ()):
        source, target = (
            getattr(process.agents.get(handle.handle), "type", 0)
            for handle in (record.src_agent_id, record.dst_agent_id)
        )
        operation = _operation(process, record)
        if _GPU not in (source, target):
            if source == target == _CPU:
                continue
            to_device = operation.endswith(("HOST_TO_DEVICE", "DEVICE_TO_DEVICE"))
        else:
            to_device = target == _GPU
        if source and target:
            is_peer = source == target == _GPU and record.src_agent_id.handle != record.dst_agent_id.handle
            direction = "PtoP" if is_peer else f"{'DH'[source == _CPU]}to{'DH'[target == _CPU]}"
        else:
            words = operation.removeprefix("MEMORY_COPY_").split("_TO_")
            direction = "to".join(word[:1] for word in words) if len(words) == 2 else "unknown"
        row = _row(process, Kind.MEMCPY, record, f"Memcpy {direction}", -1)
        row.bytes = record.bytes if 0 <= record.bytes < 2**62 else -1
        yield (record.dst_agent_id if to_device else record.src_agent_id).handle, row


def _host_rows(process: _Process) -> Iterator[NsysRow]:
    for record in process.records.get("hip_api", ()):
        yield _row(process, Kind.RUNTIME, record, _operation(process, record) or "runtime call", record.thread_id)
    for record in process.records.get("marker_api", ()):
        message = process.messages.get(record.correlation_id.internal)
        if message and record.end_timestamp > record.start_timestamp:
            yield _row(process, Kind.ANNOTATION, record, message[:1000], record.thread_id)
    for record in process.records.get("rccl_api", ()):
        if operation := _operation(process, record):
            yield _row(process, Kind.ANNOTATION, record, f"rccl:{operation}", record.thread_id)


def _row(process: _Process, kind: Kind, record: _Record, name: str, place: int) -> NsysRow:
    """Return the row; a device row is on its HIP stream if the file has one, else on its hardware queue."""
    is_host = kind in (Kind.RUNTIME, Kind.ANNOTATION)
    if not is_host and record.stream_id.handle > 0:
        place = record.stream_id.handle
    row = NsysRow(kind, record.start_timestamp, record.end_timestamp, name, place)
    if kind != Kind.ANNOTATION:
        call = record.correlation_id.internal
        row.corr = process.ancestors.get(call, call) if not is_host else call
    return row


def _operation(process: _Process, record: _Record) -> str:
    if not 0 <= record.kind < len(process.operations):
        return ""
    names = process.operations[record.kind].operations
    return names[record.operation] if 0 <= record.operation < len(names) else ""
