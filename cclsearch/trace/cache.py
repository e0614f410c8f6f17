"""Cache of parsed columns next to a trace, so that it is parsed once: `.<name>.ccl-columns`.

Layout: magic, length and CRC-32 of a JSON header, the header, then the columns at the offsets that it names. Columns
are memory-mapped, so a metric reads only the columns it uses. A cache file is untrusted: nothing in it is executed, and
types, lengths, offsets and row references are checked before use. If any check fails, the trace is parsed again.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import COLUMNS, SPARSE_COLUMNS, EventTable, MemoryPoints, TableFacts
from cclsearch.trace.kernel_classes import load_classes

READER_VERSION = 6
"""Increase it whenever the content of the columns changes."""

_MAGIC = b"CCLCOLS1"
_PREFIX = struct.Struct("<8sQI")
_ALIGN = 64
_MAX_HEADER_BYTES = 1 << 30
_MEMORY = {"ts_ns": "<i8", "allocated_bytes": "<i8", "reserved_bytes": "<i8", "device": "<i2"}


@dataclass(frozen=True)
class _ArraySpan:
    """Position of an array: offset in bytes from the start of the data, and number of values."""

    offset: int
    length: int


@dataclass(frozen=True, eq=False, kw_only=True)
class _TableHeader(TableFacts):
    """A table with the positions of its arrays."""

    columns: dict[str, _ArraySpan]
    name_class: _ArraySpan
    sparse: dict[str, tuple[_ArraySpan, _ArraySpan]]
    memory: dict[str, _ArraySpan]


@dataclass(frozen=True)
class _Header:
    version: str
    size: int
    mtime_ns: int
    data_bytes: int
    tables: list[_TableHeader]


class _Damaged(Exception):
    """The content of the cache file differs from its header."""


def cache_path(trace: Path) -> Path:
    """Return the path of the cache file of that trace."""
    return trace.with_name(f".{trace.name}.ccl-columns")


def current_version() -> str:
    """Return the cache version: READER_VERSION and checksums of the rules and the kernel classes in force."""
    folder = resources.files("cclsearch.trace.rules")
    rules = b"".join(folder.joinpath(name).read_bytes() for name in ("names.yaml", "steps.yaml"))
    return f"{READER_VERSION}-{zlib.crc32(rules):08x}-{load_classes().fingerprint}"


def save_tables(target: Path, trace: Path, tables: Sequence[EventTable]) -> bool:
    """Write the cache by atomic replacement; False (not an error) if the folder cannot be written."""
    try:
        stat = trace.stat()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".ccl-columns-")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, stat.st_size, stat.st_mtime_ns, tables)
        os.replace(temporary, target)
    except (OSError, OverflowError, ValueError):  # full disk, or numbers out of range
        Path(temporary).unlink(missing_ok=True)
        return False
    return True


def load_tables(source: Path, trace: Path) -> tuple[EventTable, ...] | None:
    """Return the cached tables of that trace, columns mapped; None without a cache of this trace and version."""
    try:
        stat, own = trace.stat(), source.stat()
        if own.st_uid not in (os.geteuid(), stat.st_uid):
            return None  # written by another user, who is not the trace's owner either
        with source.open("rb") as file:
            header, start = _read_header(file, own.st_size)
        same = (header.version, header.size, header.mtime_ns) == (current_version(), stat.st_size, stat.st_mtime_ns)
        if not same or start + header.data_bytes != own.st_size:
            return None
        data = np.memmap(source, np.uint8, "r") if own.st_size else np.zeros(0, np.uint8)
        tables = tuple(_open_table(table, data[start:]) for table in header.tables)
        for table in tables:
            release_memory(table)
        return tables
    except (OSError, ValueError, _Damaged, msgspec.MsgspecError, RecursionError):
        return None


def release_memory(table: EventTable) -> None:
    """Forget the dense form of sparse columns, and let the system take back the memory of mapped ones.

    Both come back when used, from the cache file.
    """
    for name in SPARSE_COLUMNS:
        table.__dict__.pop(name, None)
    array: Any = table.ts_ns
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    if array is not None and hasattr(mmap, "MADV_DONTNEED"):
        array.madvise(mmap.MADV_DONTNEED)


def _write(file: IO[bytes], size: int, mtime_ns: int, tables: Sequence[EventTable]) -> None:
    arrays: list[NDArray[Any]] = []
    end = 0

    def add_array(values: NDArray[Any], dtype: str) -> _ArraySpan:
        nonlocal end
        offset = -(-end // _ALIGN) * _ALIGN
        arrays.append(np.ascontiguousarray(values, np.dtype(dtype)))
        end = offset + arrays[-1].nbytes
        return _ArraySpan(offset, len(values))

    headers = [_describe(table, add_array) for table in tables]
    text = msgspec.json.encode(_Header(current_version(), size, mtime_ns, end, headers))
    text += b" " * (-(_PREFIX.size + len(text)) % _ALIGN)
    file.write(_PREFIX.pack(_MAGIC, len(text), zlib.crc32(text)))
    file.write(text)
    written = 0
    for array in arrays:
        offset = -(-written // _ALIGN) * _ALIGN
        file.write(b"\0" * (offset - written))
        file.write(array.data)
        written = offset + array.nbytes


def _describe(table: EventTable, add_array: Callable[[NDArray[Any], str], _ArraySpan]) -> _TableHeader:
    facts = {name: getattr(table, name) for name in TableFacts.__dataclass_fields__}
    return _TableHeader(
        **{**facts, "op_costs": dict(table.op_costs)},
        columns={name: add_array(getattr(table, name), dtype) for name, dtype in COLUMNS.items()},
        name_class=add_array(table.name_class, "|u1"),
        sparse={
            name: (add_array(rows, "<i4"), add_array(values, SPARSE_COLUMNS[name]))
            for name, (rows, values) in table.sparse.items()
        },
        memory={name: add_array(getattr(table.memory, name), dtype) for name, dtype in _MEMORY.items()},
    )


def _read_header(file: IO[bytes], file_size: int) -> tuple[_Header, int]:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise _Damaged
    magic, length, checksum = _PREFIX.unpack(prefix)
    if magic != _MAGIC or length > min(_MAX_HEADER_BYTES, file_size):
        raise _Damaged
    text = file.read(length)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise _Damaged
    return msgspec.json.decode(text, type=_Header), _PREFIX.size + length


def _open_table(header: _TableHeader, data: NDArray[np.uint8]) -> EventTable:
    def open_array(span: _ArraySpan, dtype: str) -> NDArray[Any]:
        kind = np.dtype(dtype)
        stop = span.offset + span.length * kind.itemsize
        if span.offset < 0 or span.length < 0 or span.offset % _ALIGN or stop > len(data):
            raise _Damaged
        return np.ndarray((span.length,), kind, data, span.offset)

    if set(header.columns) != set(COLUMNS) or set(header.memory) != set(_MEMORY):
        raise _Damaged
    columns: dict[str, Any] = {name: open_array(header.columns[name], dtype) for name, dtype in COLUMNS.items()}
    rows = {len(column) for column in columns.values()}
    if len(rows) != 1:
        raise _Damaged
    count = rows.pop()
    classes = open_array(header.name_class, "|u1")
    if len(classes) != len(header.names):
        raise _Damaged
    sparse = {}
    for name, (row_span, value_span) in header.sparse.items():
        pair = open_array(row_span, "<i4"), open_array(value_span, SPARSE_COLUMNS.get(name, "|u1"))
        if name not in SPARSE_COLUMNS or len(pair[0]) != len(pair[1]):
            raise _Damaged
        _check_range(pair[0], 0, count)
        sparse[name] = pair
    _check_references(header, columns, sparse, count)
    memory = [open_array(header.memory[name], dtype) for name, dtype in _MEMORY.items()]
    if len({len(part) for part in memory}) != 1:
        raise _Damaged
    facts = {name: getattr(header, name) for name in TableFacts.__dataclass_fields__}
    return EventTable(
        **columns,
        **{**facts, "op_costs": MappingProxyType(dict(header.op_costs))},
        name_class=classes,
        sparse=MappingProxyType(sparse),
        memory=MemoryPoints(*memory),
    )


def _check_references(
    header: _TableHeader, columns: dict[str, NDArray[Any]], sparse: dict[str, Any], count: int
) -> None:
    """Raise _Damaged if a column that is used as an index is out of range."""
    _check_range(columns["name_id"], 0, len(header.names))
    _check_range(columns["step_id"], -1, len(header.steps))
    for name, limit in (
        ("coll_id", len(header.collectives)),
        ("shape_id", len(header.shapes)),
        ("grid_id", len(header.grids)),
        ("launch", count),
        ("op", count),
    ):
        if name in sparse:
            _check_range(sparse[name][1], -1, limit)


def _check_range(values: NDArray[Any], low: int, limit: int) -> None:
    if len(values) and (int(values.min()) < low or int(values.max()) >= limit):
        raise _Damaged
