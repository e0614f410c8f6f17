"""Scans pieces of Kineto's JSON with the C library `readers/native/kineto_scan.c`, if it was built with the package.

The library accepts a piece only if it is sure of the result, and gives the same rows as the Python way for it; every
other piece is read in Python. CCL_NATIVE=0 switches it off.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import Kind
from cclsearch.trace.names.kinds import KINETO_KINDS
from cclsearch.trace.readers.json_structs import Id, Meta, TimePrefix

VERSION = 8
SWITCH = "CCL_NATIVE"
DEVICE_KINDS = (Kind.COMPUTE, Kind.MEMCPY, Kind.MEMSET, Kind.DEVICE_ANNOTATION, Kind.SYNC)
HOST_KINDS = (Kind.CPU_OP, Kind.RUNTIME)
"""Kinds of rows that show which processes ran on the host."""
NAMES, THREADS, GRIDS, SHAPES, CALLS, CATEGORIES = range(6)

ROW_COLUMNS = ("ts_ns", "dur_ns", "kind", "name_id", "device", "stream", "corr", "process")
"""Columns of a table that `copy_rows` fills."""
EVENTS_AT_ONCE = 1 << 18
"""Room for events that are collected before they are added to a table; more than one block of a file can hold."""

_ACCEPTED, _REFUSED = 0, 1
_HOST, _RUNTIME, _ON_DEVICE = 0, 1, 2
_HOST_KIND_OF = np.full(256, len(HOST_KINDS), np.uint8)
_HOST_KIND_OF[list(HOST_KINDS)] = range(len(HOST_KINDS))
_SMALLEST_EVENT_BYTES = len('{"ph":"M"},')
_INPUTS = (
    *(("text", ctypes.c_void_p), ("time_prefix", ctypes.c_char_p)),
    *(("time_prefix_size", ctypes.c_int64), ("time_offset_us", ctypes.c_double), ("capacity", ctypes.c_int64)),
    *(("base_us", ctypes.c_int64), ("has_base", ctypes.c_int64), ("kept", ctypes.c_void_p)),
)
_COUNTS = (
    *("events", "rows", "sizes", "blocks", "externals", "grids", "shaped", "calls", "firsts", "metas", "points", "bad"),
)
_COLUMNS = {
    **dict.fromkeys(("ts_ns", "dur_ns"), "<i8"),
    "kind": "|u1",
    **dict.fromkeys(("name", "thread", "stream", "corr"), "<i4"),
    "device": "<i2",
    **dict.fromkeys(("size_row", "block_row", "external_row", "grid_row"), "<i4"),
    "size_bytes": "<i8",
    "block_per_sm": "<f8",
    "external_id": "<i8",
    **dict.fromkeys(("grid_key", "shaped_row", "shaped_key"), "<i4"),
    "shaped_ext": "<i8",
    **dict.fromkeys(("call_row", "call_key", "first_key", "first_name"), "<i4"),
    **dict.fromkeys(("first_start", "first_size", "meta_start", "meta_size"), "<i8"),
    "point_us": "<f8",
    **dict.fromkeys(("point_allocated", "point_reserved"), "<i8"),
    "point_device": "<i2",
}
"""Columns and their types, in the order of the C source."""
_COUNT_OF = {
    **{"size": "sizes", "block": "blocks", "external": "externals", "grid": "grids", "shaped": "shaped"},
    **{"call": "calls", "first": "firsts", "meta": "metas", "point": "points"},
}


class _Piece(ctypes.Structure):
    """The structure `Piece` of the C source."""

    _fields_ = [
        *_INPUTS,
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_void_p) for name in _COLUMNS),
    ]


_AT, _NUMBER, _INT, _PIECE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.POINTER(_Piece)
_NUMBERS = ctypes.POINTER(ctypes.c_int64)
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "ccl_new": (_AT, ctypes.c_uint64),
    "ccl_free": (None, _AT),
    "ccl_add_category": (_INT, _AT, ctypes.c_char_p, _NUMBER, _INT, _INT),
    "ccl_count": (_NUMBER, _AT, _INT),
    "ccl_text": (_AT, _AT, _INT, _NUMBER, _NUMBERS),
    "ccl_set_shaped": (None, _AT, _NUMBER, _INT),
    "ccl_was_seen": (_INT, _AT, _NUMBER),
    "ccl_look_up": (None, _AT, _NUMBER, _AT, _AT, _NUMBER, _AT),
    "ccl_translate": (None, _AT, _AT, _NUMBER, _AT),
    "ccl_find_new": (_NUMBER, _AT, _AT, _NUMBER, _AT),
    "ccl_copy_rows": (None, _AT, _PIECE, *[_AT] * (5 + len(ROW_COLUMNS))),
    "ccl_scan": (_INT, _AT, _PIECE, _NUMBERS, _NUMBER),
    "ccl_undo": (None, _AT, _PIECE, _PIECE),
    "ccl_scan_file": (
        *(_INT, _AT, _PIECE, _INT, _NUMBERS, _NUMBER),
        *(_AT, _NUMBER, ctypes.c_char_p, _NUMBER, _NUMBER, ctypes.POINTER(_INT)),
    ),
}
"""Function of the library -> the types of its result and arguments."""


def library_path() -> Path:
    """Return where the library is, if it was built."""
    return Path(__file__).parents[1] / "native" / "kineto_scan.so"


@cache
def load_library(path: Path) -> ctypes.CDLL | None:
    """Return the library; None if the package was installed without a compiler, or on an unsuitable machine."""
    try:
        library = ctypes.CDLL(str(path))
        if library.ccl_version() != VERSION or ctypes.sizeof(ctypes.c_void_p) != 8:
            return None
    except (OSError, AttributeError):
        return None
    for name, (answer, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = answer, arguments
    return library


def open_scanner() -> PieceScanner | None:
    """Return a scanner for one file; None without the library, or if it is switched off."""
    return PieceScanner() if _library() else None


def _library() -> ctypes.CDLL | None:
    return load_library(library_path()) if os.environ.get(SWITCH, "") != "0" else None


def look_up(edges: NDArray[np.int64], values: NDArray[np.int32], times: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return `values[np.searchsorted(edges, times, side="right")]`."""
    library = _library()
    if library is None:
        return np.asarray(values[np.searchsorted(edges, times, side="right")])
    found = np.empty(len(times), np.int32)
    used = [np.ascontiguousarray(array) for array in (edges, values, times)]
    place = [array.ctypes.data for array in (*used, found)]
    library.ccl_look_up(place[0], len(edges), place[1], place[2], len(times), place[3])
    return found


class ScannedPiece:
    """The columns of one or more scanned pieces: views that are valid until the scanner scans again."""

    def __init__(self, scanner: PieceScanner, capacity: int) -> None:
        self.scanner = scanner
        """The scanner whose numbers the columns use."""
        self.capacity = capacity
        self._arrays = {name: np.empty(capacity, dtype) for name, dtype in _COLUMNS.items()}
        self.raw = _Piece(capacity=capacity)
        for name, array in self._arrays.items():
            setattr(self.raw, name, array.ctypes.data)
        self.metas: list[Meta] = []
        self.categories: list[str] = []

    def clear(self) -> None:
        """Forget the columns."""
        for name in _COUNTS:
            setattr(self.raw, name, 0)
        self.metas, self.categories = [], []

    def __iter__(self) -> Iterator[Meta]:
        """Iterate over the events that are not in columns: names of processes and threads."""
        return iter(self.metas)

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Return a column, as long as the piece has values for it."""
        try:
            array = self._arrays[name]
        except KeyError:
            raise AttributeError(name) from None
        return array[: getattr(self.raw, _COUNT_OF.get(name.partition("_")[0], "rows"))]


@dataclass(frozen=True)
class Cutting:
    """Cuts text after the last event that another one follows."""

    block_bytes: int
    separator: bytes
    prefix: TimePrefix
    base_us: int
    cancel: ctypes.c_int = field(default_factory=ctypes.c_int)
    """Not 0 as soon as the rest is not needed."""

    def find_stop(self, text: bytearray, end: int) -> int:
        """Return the position after the last event in `text[:end]` that another one follows; 0 without one."""
        cut = text.rfind(self.separator, 0, end)
        return cut + self.separator.find(b"}") + 1 if cut > 0 else 0


class PieceScanner:
    """Scans the pieces of one file; its numbers of names, threads and keys are its own (see `Numbering`)."""

    def __init__(self) -> None:
        library = load_library(library_path())
        assert library is not None
        self._library = library
        self._handle = library.ccl_new(int.from_bytes(os.urandom(8)))
        if not self._handle:
            raise MemoryError
        for category, kind in KINETO_KINDS.items():
            flag = _ON_DEVICE if kind in DEVICE_KINDS else _RUNTIME if kind == Kind.RUNTIME else _HOST
            name = category.encode()
            library.ccl_add_category(self._handle, name, len(name), int(kind), flag)
        self._meta_decoder = msgspec.json.Decoder(list[Meta])
        self._piece = ScannedPiece(self, EVENTS_AT_ONCE)
        self._is_taken = False
        self._unread: dict[int, set[int]] = {NAMES: set(), THREADS: set()}
        self._texts: dict[int, list[Any]] = {NAMES: [], THREADS: []}
        self._new_categories: dict[int, str] = {}
        self._num_categories = self.count(CATEGORIES)
        self.call_args: dict[int, tuple[int, msgspec.Raw]] = {}
        """Number of a call's key -> number of the name and arguments of its first event."""
        self.base_us: int | None = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.ccl_free(self._handle)

    def has_room(self, size: int) -> bool:
        """Return whether a piece of this size can be scanned before `take` is called."""
        return self._is_taken or self._piece.raw.events + size // _SMALLEST_EVENT_BYTES < self._piece.capacity

    def take(self) -> ScannedPiece | None:
        """Return the events scanned since the last call; None if there are none."""
        if self._is_taken or not self._piece.raw.events:
            return None
        self._is_taken = True
        return self._piece

    def scan(self, buffer: bytearray, start: int, stop: int, prefix: TimePrefix) -> bool:
        """Scan a bracket or comma and the events after it; space may precede it. Return whether it is accepted."""
        before = self._begin(prefix)
        raw = self._piece.raw
        text = ctypes.c_char.from_buffer(buffer, start)
        raw.text = ctypes.addressof(text)
        answer = self._library.ccl_scan(self._handle, ctypes.byref(raw), ctypes.byref(ctypes.c_int64(stop - start)), 1)
        return self._read_rest(answer, before, prefix) and answer == _ACCEPTED

    def scan_file(self, file: int, span: tuple[int, int], text: bytearray, cutting: Cutting) -> int:
        """Scan a part of an open file block by block, each of half the size of `text`; return the accepted part's end.

        That is the end of a block, or of the part: of a refused block nothing is kept.
        """
        before = self._begin(cutting.prefix)
        (start, stop), after = span, cutting.separator.find(b"}") + 1
        position, room = ctypes.c_int64(start), ctypes.c_char.from_buffer(text)
        answer = self._library.ccl_scan_file(
            *(self._handle, ctypes.byref(self._piece.raw), file, ctypes.byref(position), stop, ctypes.addressof(room)),
            *(len(text), cutting.separator, len(cutting.separator), after, cutting.cancel),
        )
        return position.value if self._read_rest(answer, before, cutting.prefix) else start

    def _begin(self, prefix: TimePrefix) -> _Piece:
        """Return the state of the piece before events are added to it."""
        if self._is_taken:
            self._piece.clear()
            self._is_taken = False
        raw = self._piece.raw
        raw.time_prefix, raw.time_prefix_size, raw.time_offset_us = prefix.old, len(prefix.old), float(prefix.offset_us)
        raw.base_us, raw.has_base = self.base_us or 0, self.base_us is not None
        return _Piece.from_buffer_copy(raw)

    def _read_rest(self, answer: int, before: _Piece, prefix: TimePrefix) -> bool:
        """Read the events that are not in columns; False, and the scan is dropped, if Python's parser refuses one."""
        if answer not in (_ACCEPTED, _REFUSED):
            raise MemoryError
        piece, raw = self._piece, self._piece.raw
        is_read = self._read_texts(before.rows)
        try:
            metas = self._read_metas(before.metas, prefix)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            is_read = False
        if not is_read:
            self._library.ccl_undo(self._handle, ctypes.byref(raw), ctypes.byref(before))
            return False
        for first in range(before.firsts, raw.firsts):
            args = self._kept_text(piece.first_start[first], piece.first_size[first])
            self.call_args[int(piece.first_key[first])] = int(piece.first_name[first]), msgspec.Raw(args)
        piece.metas += metas
        piece.categories += self._seen_categories()
        if raw.has_base:
            self.base_us = raw.base_us
        return True

    def _kept_text(self, start: int, size: int) -> bytes:
        return ctypes.string_at(self._piece.raw.kept + int(start), int(size))

    def _read_metas(self, first: int, prefix: TimePrefix) -> list[Meta]:
        if first == self._piece.raw.metas:
            return []
        joined = b",".join(map(self._kept_text, self._piece.meta_start[first:], self._piece.meta_size[first:]))
        if prefix.old:
            joined = joined.replace(prefix.old, prefix.new)
        metas: list[Meta] = self._meta_decoder.decode(b"[" + joined + b"]")
        return metas

    def _read_texts(self, first_row: int) -> bool:
        """Decode the new names and threads; False if a row from `first_row` uses one that cannot be decoded."""
        for table, read in ((NAMES, _read_name), (THREADS, _read_thread)):
            texts, unread = self._texts[table], self._unread[table]
            for number in range(len(texts), self.count(table)):
                try:
                    texts.append(read(self.text(table, number)))
                except (msgspec.MsgspecError, ValueError):
                    texts.append(None)
                    unread.add(number)
            if unread:
                used = self._piece.name if table == NAMES else self._piece.thread
                if not unread.isdisjoint(used[first_row:].tolist()):
                    return False
        return True

    def count(self, table: int) -> int:
        """Return how many texts the table has."""
        return int(self._library.ccl_count(self._handle, table))

    def copy_rows(
        self, maps: Sequence[NDArray[np.int32]], host_rows: NDArray[np.int64], target: Mapping[str, NDArray[Any]]
    ) -> None:
        """Copy the rows of the piece that was taken, and count them by process and `HOST_KINDS`.

        `maps`: the numbers of names and threads, and the process of each thread.
        """
        arrays: list[NDArray[Any]] = [_HOST_KIND_OF, *maps, host_rows, *(target[name] for name in ROW_COLUMNS)]
        places = (array.ctypes.data for array in arrays)
        self._library.ccl_copy_rows(self._handle, ctypes.byref(self._piece.raw), *places)

    def translate(self, known: NDArray[np.int32], numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return `known[numbers]`; every number is within `known`."""
        found = np.empty(len(numbers), np.int32)
        self._library.ccl_translate(known.ctypes.data, numbers.ctypes.data, len(numbers), found.ctypes.data)
        return found

    def find_new(self, known: NDArray[np.int32], numbers: NDArray[np.int32]) -> list[int]:
        """Return the numbers whose entry of `known` is -1, in the order of first use, and set it to 0."""
        found = np.empty(len(known), np.int32)
        count = self._library.ccl_find_new(known.ctypes.data, numbers.ctypes.data, len(numbers), found.ctypes.data)
        return list(found[:count].tolist())

    def text(self, table: int, number: int) -> bytes:
        """Return the text of that number as it is in the file."""
        size = ctypes.c_int64()
        address = self._library.ccl_text(self._handle, table, number, ctypes.byref(size))
        return ctypes.string_at(address, size.value)

    def decoded(self, table: int, number: int) -> Any:
        """Return the name or thread of that number."""
        return self._texts[table][number]

    def set_shaped(self, name: int, is_shaped: bool) -> None:
        """Say whether shapes are kept for the operator of that name; until then they are."""
        self._library.ccl_set_shaped(self._handle, name, is_shaped)

    def _seen_categories(self) -> list[str]:
        """Return the categories that the last piece has and no accepted piece before it had."""
        for number in range(self._num_categories, self.count(CATEGORIES)):
            self._new_categories[number] = self.text(CATEGORIES, number).decode()
            self._num_categories = number + 1
        if not self._new_categories:
            return []
        found = [n for n in self._new_categories if self._library.ccl_was_seen(self._handle, n)]
        return [self._new_categories.pop(number) for number in found]


class Numbering:
    """Maps a scanner's numbers to a table's, which follow the order of first use."""

    def __init__(self, scanner: PieceScanner, table: int, number_of: Callable[[int], int]) -> None:
        self._scanner = scanner
        self._table = table
        self._number_of = number_of
        self._known = np.full(256, -1, np.int32)

    def translate(self, numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the table's numbers; `number_of` is asked once for each new one."""
        return self._scanner.translate(self.map_of(numbers), numbers)

    def map_of(self, numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the table's number for each of the scanner's, with an entry for each of these."""
        count = self._scanner.count(self._table)
        if count > len(self._known):
            self._known = np.concatenate([self._known, np.full(count, -1, np.int32)])
        if int(self._known[:count].min(initial=0)) < 0:
            for number in self._scanner.find_new(self._known, numbers):
                self._known[number] = self._number_of(number)
        return self._known


def _read_name(raw: bytes) -> str:
    return msgspec.json.decode(b'"' + raw + b'"', type=str) if b"\\" in raw else raw.decode()


def _read_thread(raw: bytes) -> tuple[int | str, int | str]:
    process, thread, _ = raw.split(b"\0")
    return _read_id(process), _read_id(thread)


def _read_id(raw: bytes) -> int | str:
    found: int | str = _read_name(raw[1:-1]) if raw.startswith(b'"') else msgspec.json.decode(raw, type=Id)
    return found
