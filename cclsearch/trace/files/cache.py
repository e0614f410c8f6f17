"""Cache of parsed columns in the user's cache folder, so that a trace is parsed once.

Layout: magic, length and CRC-32 of a JSON header, the header, then the columns in the order of `_layout`. Columns
are memory-mapped, so a metric reads only the columns it uses. A cache file is untrusted: nothing in it is executed, and
lengths and row references are checked before use. If any check fails, the trace is parsed again. Files appear whole and
may vanish at any time, so that any number of processes can share the folder.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import COLUMNS, SPARSE_COLUMNS, EventTable, MemoryPoints, TableFacts
from cclsearch.trace.names.kernels import load_classes

READER_VERSION = 10
"""Increase it whenever the content of the columns changes."""

MAX_CACHE_BYTES = 4 << 30
"""Size of the cache; beyond it, the files that were not used for longest are deleted."""

_MAGIC = b"CCLCOLS1"
_SUFFIX = ".ccl-columns"
_UNFINISHED = ".unfinished"
_UNFINISHED_S = 3600.0
"""Age of a file that a killed process left."""
_PREFIX = struct.Struct("<8sQI")
_ALIGN = 64
_MAX_HEADER_BYTES = 1 << 30
_MEMORY = {"ts_ns": "<i8", "allocated_bytes": "<i8", "reserved_bytes": "<i8", "device": "<i2"}


@dataclass(frozen=True, eq=False, kw_only=True)
class _TableHeader(TableFacts):
    """A table without its arrays, which follow in the order of `_layout`."""

    num_rows: int
    num_points: int
    """Length of the allocator's reports."""
    lengths: dict[str, int]
    """Number of rows that have each sparse column."""


@dataclass(frozen=True)
class _Header:
    version: str
    size: int
    mtime_ns: int
    tables: list[_TableHeader]


class _Damaged(Exception):
    """The content of the cache file differs from its header."""


def cache_path(trace: Path) -> Path:
    """Return the path of the cache file of that trace, in `XDG_CACHE_HOME` or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # remains "~" for a user who has none, as in containers: then nothing is kept
    folder = base if os.path.isabs(base) else os.path.join(home if os.path.isabs(home) else os.devnull, ".cache")
    name = hashlib.sha256(os.fsencode(os.path.realpath(trace))).hexdigest()[:32]
    return Path(folder) / "ccl-search" / "traces" / f"{name}{_SUFFIX}"


def current_version() -> str:
    """Return the cache version: READER_VERSION and checksums of the rules and the kernel classes in force."""
    folder = resources.files("cclsearch.trace.rules")
    rules = b"".join(folder.joinpath(name).read_bytes() for name in ("names.yaml", "steps.yaml"))
    return f"{READER_VERSION}-{zlib.crc32(rules):08x}-{load_classes().fingerprint}"


def save_tables(target: Path, trace: Path, tables: Sequence[EventTable]) -> bool:
    """Write the cache by atomic replacement; False (not an error) if the folder cannot be written."""
    try:
        stat = trace.stat()
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=_UNFINISHED)
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, stat.st_size, stat.st_mtime_ns, tables)
        os.replace(temporary, target)
    except (OSError, OverflowError, ValueError):  # full disk, or numbers out of range
        Path(temporary).unlink(missing_ok=True)
        return False
    _delete_oldest(target)
    return True


def _delete_oldest(newest: Path) -> None:
    """Delete cache files, those used last first to stay, until the folder has its size; other processes may too."""
    found, total = [], 0
    for path in newest.parent.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            stat = path.stat()
            found.append((path != newest, -stat.st_mtime, stat.st_size, path))
    old = [path for path in newest.parent.glob(f"*{_UNFINISHED}") if _age_s(path) > _UNFINISHED_S]
    for is_other, _, size, path in sorted(found):
        total += size
        if is_other and total > MAX_CACHE_BYTES:
            old.append(path)
    for path in old:
        with suppress(OSError):
            path.unlink()


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def load_tables(source: Path, trace: Path) -> tuple[EventTable, ...] | None:
    """Return the cached tables of that trace, columns mapped; None without a cache of this trace and version."""
    try:
        stat, own = trace.stat(), source.stat()
        if own.st_uid != os.geteuid():
            return None  # written by another user
        with source.open("rb") as file:
            header, start = _read_header(file, own.st_size)
        same = (header.version, header.size, header.mtime_ns) == (current_version(), stat.st_size, stat.st_mtime_ns)
        if not same:
            return None
        data = np.memmap(source, np.uint8, "r") if own.st_size else np.zeros(0, np.uint8)
        tables = _open_tables(header.tables, data[start:])
        for table in tables:
            release_memory(table)
        with suppress(OSError):
            os.utime(source)
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


def _layout(table: _TableHeader) -> Iterator[tuple[str, str, int]]:
    """Yield name, type and length of the arrays of a table, in the order in which they are written."""
    yield from ((name, dtype, table.num_rows) for name, dtype in COLUMNS.items())
    yield "name_class", "|u1", len(table.names)
    yield from ((f"memory.{name}", dtype, table.num_points) for name, dtype in _MEMORY.items())
    for name, length in table.lengths.items():
        yield f"{name}.rows", "<i4", length
        yield name, SPARSE_COLUMNS[name], length


def _write(file: IO[bytes], size: int, mtime_ns: int, tables: Sequence[EventTable]) -> None:
    headers = [_describe(table) for table in tables]
    text = msgspec.json.encode(_Header(current_version(), size, mtime_ns, headers))
    text += b" " * (-(_PREFIX.size + len(text)) % _ALIGN)
    file.write(_PREFIX.pack(_MAGIC, len(text), zlib.crc32(text)))
    file.write(text)
    for header, table in zip(headers, tables, strict=True):
        arrays = {f"memory.{name}": getattr(table.memory, name) for name in _MEMORY}
        for name, (rows, values) in table.sparse.items():
            arrays |= {f"{name}.rows": rows, name: values}
        for name, dtype, _ in _layout(header):
            array = np.ascontiguousarray(arrays[name] if name in arrays else getattr(table, name), np.dtype(dtype))
            file.write(array.data)
            file.write(b"\0" * (-array.nbytes % _ALIGN))


def _describe(table: EventTable) -> _TableHeader:
    facts = {name: getattr(table, name) for name in TableFacts.__dataclass_fields__}
    return _TableHeader(
        **{**facts, "op_costs": dict(table.op_costs)},
        num_rows=len(table),
        num_points=len(table.memory.ts_ns),
        lengths={name: len(rows) for name, (rows, _) in table.sparse.items()},
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


def _open_tables(headers: Sequence[_TableHeader], data: NDArray[np.uint8]) -> tuple[EventTable, ...]:
    at = 0
    tables = []
    for header in headers:
        if not set(header.lengths) <= set(SPARSE_COLUMNS):
            raise _Damaged
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, length in _layout(header):
            kind = np.dtype(dtype)
            if length < 0 or at + length * kind.itemsize > len(data):
                raise _Damaged
            arrays[name] = np.ndarray((length,), kind, data, at)
            at += -(-length * kind.itemsize // _ALIGN) * _ALIGN
        tables.append(_open_table(header, arrays))
    if at != len(data):
        raise _Damaged
    return tuple(tables)


def _open_table(header: _TableHeader, arrays: dict[str, NDArray[Any]]) -> EventTable:
    sparse = {name: (arrays[f"{name}.rows"], arrays[name]) for name in header.lengths}
    _check_references(header, arrays, sparse)
    columns: dict[str, Any] = {name: arrays[name] for name in COLUMNS}
    facts = {name: getattr(header, name) for name in TableFacts.__dataclass_fields__}
    return EventTable(
        **columns,
        **{**facts, "op_costs": MappingProxyType(dict(header.op_costs))},
        name_class=arrays["name_class"],
        sparse=MappingProxyType(sparse),
        memory=MemoryPoints(*(arrays[f"memory.{name}"] for name in _MEMORY)),
    )


def _check_references(header: _TableHeader, arrays: dict[str, NDArray[Any]], sparse: dict[str, Any]) -> None:
    """Raise _Damaged if a column that is used as an index is out of range."""
    limits = {"coll_id": header.collectives, "shape_id": header.shapes, "grid_id": header.grids}
    _check_range(arrays["name_id"], 0, len(header.names))
    _check_range(arrays["step_id"], -1, len(header.steps))
    for name, (rows, values) in sparse.items():
        _check_range(rows, 0, header.num_rows)
        if name in limits:
            _check_range(values, -1, len(limits[name]))
        elif name in ("launch", "op"):
            _check_range(values, -1, header.num_rows)


def _check_range(values: NDArray[Any], low: int, limit: int) -> None:
    if len(values) and (int(values.min()) < low or int(values.max()) >= limit):
        raise _Damaged
