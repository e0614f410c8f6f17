"""Reads Nsight Systems' SQLite export (`nsys export --type sqlite`) into one table per device of each process.

Versions differ in tables and columns: missing ones are left out, and metrics that need them report a reason. A device
is (process, device id), since each rank may call its device 0.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from cclsearch.trace.events import DeviceInfo, EventTable, Kind, Reason
from cclsearch.trace.readers.columns import positive_int
from cclsearch.trace.readers.stream import ReadLimits, TraceError, list_faults
from cclsearch.trace.readers.table_builder import NsysRow, build_nsys_table

_KERNEL, _MEMCPY, _MEMSET = (f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET"))
_RUNTIME, _SYNC = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_COPY_KINDS = dict(enumerate(["HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"], start=1))
_NVTX_RANGES = (34, 35, 59, 60)
"""Event types of ranges with an end, in old and new exports."""
_SERIAL = re.compile(r",\s*(op_id|seq|sizes|input_op_ids)\s*=.*$", re.DOTALL)
_PROCESS_MASK = ~0xFFFFFF
_MAX_QUERY_S = 1800.0
_BATCH = 50_000
_LOCK_WAIT_S = 1.0
_MAX_VALUE_BYTES = 16 << 20


@dataclass
class _Export:
    """An open export: its tables and their columns."""

    connection: sqlite3.Connection
    columns: dict[str, tuple[str, ...]]
    strings: dict[int, str] = field(default_factory=dict)
    num_bad: int = 0
    """Rows of devices whose times cannot be."""

    def read(self, table: str, *wanted: str) -> Iterator[tuple[Any, ...]]:
        """Yield these columns of all rows; None for a column missing in this version, nothing without the table."""
        known = self.columns.get(table)
        if known is None:
            return
        chosen = ", ".join(f'"{name}"' if name in known else "NULL" for name in wanted)
        cursor = self.connection.execute(f'SELECT {chosen} FROM "{table}"')
        while batch := cursor.fetchmany(_BATCH):
            yield from batch

    def read_spans(self, table: str, *wanted: str) -> Iterator[tuple[Any, ...]]:
        """Yield start, end and these columns of the rows with a valid span of time."""
        for row in self.read(table, "start", "end", *wanted):
            start, end = row[:2]
            if isinstance(start, int) and isinstance(end, int) and 0 <= start <= end < 2**62:
                yield row
            else:
                self.num_bad += table in (_KERNEL, _MEMCPY, _MEMSET)


def read_nsys(path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    """Return one table per device that has rows; raises TraceError if nothing can be read."""
    if path.suffix.lower() in (".nsys-rep", ".qdrep"):
        raise TraceError(Reason.FORMAT_UNSUPPORTED, "export it first: nsys export --type sqlite FILE")
    size = path.stat().st_size
    if size > limits.raw_bytes:
        raise TraceError(Reason.TOO_LARGE, f"a file of {size >> 20} MiB; the limit is {limits.raw_bytes >> 20} MiB")
    try:
        connection = _connect(path)
        try:
            return _read(_open(connection), path, limits)
        finally:
            connection.close()
    except (sqlite3.Error, OverflowError) as error:
        raise TraceError(Reason.UNREADABLE, f"SQLite: {error}") from None


def _connect(path: Path) -> sqlite3.Connection:
    location = path.absolute().as_uri()
    connection = sqlite3.connect(f"{location}?mode=ro", uri=True, timeout=_LOCK_WAIT_S)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if "locked" in str(error) or path.with_name(path.name + "-wal").exists():
            raise
        connection = sqlite3.connect(f"{location}?immutable=1", uri=True)  # the folder cannot be written
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    started = time.monotonic()
    connection.set_progress_handler(lambda: time.monotonic() - started > _MAX_QUERY_S, 1_000_000)
    return connection


def _open(connection: sqlite3.Connection) -> _Export:
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA query_only = ON")
    names = [
        name
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        if isinstance(name, str) and re.fullmatch(r"\w+", name)
    ]
    columns = {name: tuple(str(row[1]) for row in connection.execute(f'PRAGMA table_info("{name}")')) for name in names}
    file = _Export(connection, columns)
    file.strings = {number: value for number, value in file.read("StringIds", "id", "value") if isinstance(value, str)}
    return file


def _read(file: _Export, path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    if any(name.startswith("rocpd_") for name in file.columns):
        raise TraceError(Reason.FORMAT_UNSUPPORTED, "rocprofv3's database; record with --output-format json")
    if not {_KERNEL, _MEMCPY, _RUNTIME, "NVTX_EVENTS"} & set(file.columns):
        if "COMMUNICATION_OP" in file.columns or "COMPUTE_TASK_INFO" in file.columns or "CANN_API" in file.columns:
            raise TraceError(Reason.FORMAT_UNSUPPORTED, "a database of Ascend's profiler, which is not supported")
        raise TraceError(Reason.UNREADABLE, "a SQLite file, but not an export of Nsight Systems")
    _check_tables(file)
    by_device: dict[tuple[int, int], list[NsysRow]] = {}
    by_process: dict[int, list[NsysRow]] = {}
    numbers = count(1)
    for process, ordinal, row in _device_rows(file):
        by_device.setdefault((ordinal, process), []).append(row)
        limits.check_entries(next(numbers), "rows")
    if not by_device:
        raise TraceError(Reason.NO_GPU_EVENTS, "contains no kernel and no copy of any device")
    for process, row in _host_rows(file):
        by_process.setdefault(process, []).append(row)
        limits.check_entries(next(numbers), "rows")
    infos = _read_devices(file)
    base_ns = positive_int(next(file.read("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"), (0,))[0]) or 0
    is_one_process = len({process for _, process in by_device}) == 1 and len(by_process) <= 1
    tables = []
    for (ordinal, process), rows in sorted(by_device.items()):
        host = next(iter(by_process.values()), []) if is_one_process else by_process.get(process, [])
        device = infos.get(ordinal, DeviceInfo(ordinal))
        tables.append(build_nsys_table(rows, host, device, base_ns=base_ns, source=path.name))
    return tuple(replace(table, reasons=list_faults(is_complete=True, num_bad=file.num_bad)) for table in tables)


def _check_tables(file: _Export) -> None:
    """Raise TraceError if kernels are not listed or have no names, since every metric would be wrong."""
    has_launches = any("aunch" in text for text in file.strings.values()) or not file.strings
    if _KERNEL not in file.columns and has_launches and next(file.read(_RUNTIME, "start"), None) is not None:
        raise TraceError(Reason.UNREADABLE, f"kernels were launched, but the table {_KERNEL} is missing")
    if not file.strings and next(file.read(_KERNEL, "start"), None) is not None:
        raise TraceError(Reason.UNREADABLE, "kernels without names: the table StringIds is missing")


def _device_rows(file: _Export) -> Iterator[tuple[int, int, NsysRow]]:
    wanted = ("deviceId", "streamId", "correlationId", "globalPid")
    launch = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
    names = ("shortName", "demangledName", "nameId", "staticSharedMemory", "dynamicSharedMemory")
    for values in file.read_spans(_KERNEL, *wanted, *launch, *names):
        short, long = _string(file, values[13], values[15]), _string(file, values[14], values[13])
        grid = _ints(values[6:12])
        row = NsysRow(Kind.COMPUTE, values[0], values[1], long or short or "unnamed kernel", _int(values[3]))
        row.corr = _int(values[4])
        if grid is not None and grid[0] * grid[1] * grid[2] < 2**62:
            shared = max(_int(values[16]), 0) + max(_int(values[17]), 0)
            row.grid = (grid[0] * grid[1] * grid[2], grid[3] * grid[4] * grid[5], max(_int(values[12]), 0), shared)
        yield _int(values[5]), _int(values[2]), row
    for table, kind in ((_MEMCPY, Kind.MEMCPY), (_MEMSET, Kind.MEMSET)):
        for values in file.read_spans(table, *wanted, "bytes", "copyKind"):
            copy = f"Memcpy {_COPY_KINDS.get(values[7], 'unknown')}"
            name = copy if kind == Kind.MEMCPY else "Memset (Device)"
            row = NsysRow(kind, values[0], values[1], name, _int(values[3]))
            row.corr, row.bytes = _int(values[4]), _int(values[6])
            yield _int(values[5]), _int(values[2]), row


def _host_rows(file: _Export) -> Iterator[tuple[int, NsysRow]]:
    for start, end, thread, corr, name_id in file.read_spans(_RUNTIME, "globalTid", "correlationId", "nameId"):
        name = re.sub(r"_v\d+$", "", _string(file, name_id) or "runtime call")
        row = NsysRow(Kind.RUNTIME, start, end, name, _int(thread))
        row.corr = _int(corr)
        yield _int(thread) & _PROCESS_MASK, row
    ranges = ("eventType", "text", "textId", "globalTid")
    for start, end, event_type, text, text_id, thread in file.read_spans("NVTX_EVENTS", *ranges):
        name = text if isinstance(text, str) and text else _string(file, text_id)
        if name and event_type in _NVTX_RANGES:
            plain = _SERIAL.sub("", name)
            kind = Kind.CPU_OP if plain != name else Kind.ANNOTATION
            yield _int(thread) & _PROCESS_MASK, NsysRow(kind, start, end, plain[:1000], _int(thread))
    for start, end, process in file.read_spans(_SYNC, "globalPid"):
        yield _int(process), NsysRow(Kind.SYNC, start, end, "synchronization", 0)
    for start, end, thread in file.read_spans("PROFILER_OVERHEAD", "globalTid"):
        yield _int(thread) & _PROCESS_MASK, NsysRow(Kind.OVERHEAD, start, end, "profiler", _int(thread))


def _read_devices(file: _Export) -> dict[int, DeviceInfo]:
    found: dict[int, DeviceInfo] = {}
    for table, *columns in (
        ("TARGET_INFO_GPU", "id", "name", "smCount", "totalMemory"),
        ("TARGET_INFO_CUDA_DEVICE", "cudaId", "name", "numMultiprocessors", "memorySize"),
    ):
        for number, name, sms, memory in file.read(table, *columns):
            if isinstance(number, int) and number not in found:
                found[number] = DeviceInfo(number, str(name or ""), positive_int(sms), positive_int(memory))
    return found


def _string(file: _Export, *numbers: Any) -> str:
    for number in numbers:
        if isinstance(number, str):
            return number
        if isinstance(number, int) and number in file.strings:
            return file.strings[number]
    return ""


def _int(value: Any) -> int:
    return value if isinstance(value, int) else -1


def _ints(values: Sequence[Any]) -> tuple[int, ...] | None:
    numbers = tuple(value for value in values if isinstance(value, int) and 0 < value < 2**31)
    return numbers if len(numbers) == len(values) else None
