"""Scans pieces of Kineto's JSON with the C library `native/kineto_scan.c`, if it was built with the package.

The library accepts a piece only if it is sure of the result, and gives the same rows as the Python way for it; every
other piece is read in Python. CCL_NATIVE=0 switches it off.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import Kind
from cclsearch.trace.kinds import KINETO_KINDS
from cclsearch.trace.readers.json_structs import Meta, TimePrefix

VERSION = 5
SWITCH = "CCL_NATIVE"
DEVICE_KINDS = (Kind.COMPUTE, Kind.MEMCPY, Kind.MEMSET, Kind.DEVICE_ANNOTATION, Kind.SYNC)
NAMES, THREADS, GRIDS, SHAPES, CALLS, CATEGORIES = range(6)

EVENTS_AT_ONCE = 1 << 17
"""Room for events that are collected before they are added to a table; more than one block of a file can hold."""

_ACCEPTED, _REFUSED = 0, 1
_HOST, _RUNTIME, _ON_DEVICE = 0, 1, 2
_SMALLEST_EVENT_BYTES = len('{"ph":"M"},')
_INPUTS = (
    *(("text", ctypes.c_void_p), ("time_prefix", ctypes.c_char_p)),
    *(("time_prefix_size", ctypes.c_int64), ("time_offset_us", ctypes.c_double), ("capacity", ctypes.c_int64)),
    *(("base_us", ctypes.c_int64), ("has_base", ctypes.c_int64)),
)
_COUNTS = ("events", "rows", "details", "shaped", "calls", "metas", "points", "bad")
_COLUMNS = {
    "ts_ns": "<i8",
    "dur_ns": "<i8",
    "kind": "|u1",
    "name": "<i4",
    "thread": "<i4",
    "stream": "<i4",
    "corr": "<i4",
    "device": "<i2",
    "detail_row": "<i4",
    "detail_grid": "<i4",
    "detail_bytes": "<i8",
    "detail_ext": "<i8",
    "detail_blocks": "<f8",
    "shaped_row": "<i4",
    "shaped_key": "<i4",
    "shaped_ext": "<i8",
    "call_row": "<i4",
    "call_key": "<i4",
    "call_start": "<i8",
    "call_size": "<i8",
    "meta_start": "<i8",
    "meta_size": "<i8",
    "point_us": "<f8",
    "point_allocated": "<i8",
    "point_reserved": "<i8",
    "point_device": "<i2",
}
_COUNT_OF = {"detail": "details", "shaped": "shaped", "call": "calls", "meta": "metas", "point": "points"}


class _Piece(ctypes.Structure):
    """The structure `Piece` of the C source."""

    _fields_ = [
        *_INPUTS,
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_void_p) for name in _COLUMNS),
    ]


def library_path() -> Path:
    """Return where the library is, if it was built."""
    return Path(__file__).with_name("native") / "kineto_scan.so"


@cache
def load_library(path: Path) -> ctypes.CDLL | None:
    """Return the library; None if the package was installed without a compiler, or on an unsuitable machine."""
    try:
        library = ctypes.CDLL(str(path))
        if library.ccl_version() != VERSION or ctypes.sizeof(ctypes.c_void_p) != 8:
            return None
    except (OSError, AttributeError):
        return None
    library.ccl_new.argtypes, library.ccl_new.restype = [ctypes.c_uint64], ctypes.c_void_p
    library.ccl_free.argtypes, library.ccl_free.restype = [ctypes.c_void_p], None
    library.ccl_add_category.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    library.ccl_count.argtypes, library.ccl_count.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int64
    library.ccl_text.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)]
    library.ccl_text.restype = ctypes.c_void_p
    library.ccl_set_shaped.argtypes, library.ccl_set_shaped.restype = (
        [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int],
        None,
    )
    library.ccl_was_seen.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    stops = ctypes.POINTER(ctypes.c_int64)
    library.ccl_scan.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Piece), stops, ctypes.c_int64]
    return library


def open_scanner() -> PieceScanner | None:
    """Return a scanner for one file; None without the library, or if it is switched off."""
    return PieceScanner() if os.environ.get(SWITCH, "") != "0" and load_library(library_path()) else None


class ScannedPiece:
    """The columns of one or more scanned pieces: views that are valid until the scanner scans again."""

    def __init__(self, scanner: PieceScanner, capacity: int) -> None:
        self.scanner = scanner
        """The scanner whose numbers the columns have."""
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


class PieceScanner:
    """Scans the pieces of one file; its numbers of names, threads and keys are its own (see `Numbering`)."""

    def __init__(self) -> None:
        library = load_library(library_path())
        assert library is not None
        self._library = library
        self._handle = library.ccl_new(secrets.randbits(64))
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
        self._num_categories = self._count(CATEGORIES)
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
        """Return what was scanned since the last call; None if that is nothing."""
        if self._is_taken or not self._piece.raw.events:
            return None
        self._is_taken = True
        return self._piece

    def scan(self, buffer: bytearray, start: int, stops: Sequence[int], prefix: TimePrefix) -> bool:
        """Scan consecutive pieces from `start`, which end at `stops`; return whether all are accepted.

        Each is a bracket or comma and the events after it; space may precede it.
        """
        if self._is_taken:
            self._piece.clear()
            self._is_taken = False
        piece, raw = self._piece, self._piece.raw
        before = tuple(getattr(raw, name) for name in _COUNTS)
        text = ctypes.c_char.from_buffer(buffer, start)
        raw.text = ctypes.addressof(text)
        raw.time_prefix, raw.time_prefix_size, raw.time_offset_us = prefix.old, len(prefix.old), float(prefix.offset_us)
        raw.base_us, raw.has_base = self.base_us or 0, self.base_us is not None
        ends = (ctypes.c_int64 * len(stops))(*(stop - start for stop in stops))
        answer = self._library.ccl_scan(self._handle, ctypes.byref(raw), ends, len(stops))
        if answer not in (_ACCEPTED, _REFUSED):
            raise MemoryError
        is_read = self._read_texts(before[_COUNTS.index("rows")])
        if answer == _REFUSED:
            return False
        try:
            metas = self._read_metas(memoryview(buffer)[start:], before[_COUNTS.index("metas")], prefix)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            is_read, metas = False, []
        if not is_read:
            for name, count in zip(_COUNTS, before, strict=True):
                setattr(raw, name, count)
            return False
        self._keep_calls(memoryview(buffer)[start:], before[_COUNTS.index("calls")])
        piece.metas += metas
        piece.categories += self._seen_categories()
        if raw.has_base:
            self.base_us = raw.base_us
        return True

    def _read_metas(self, text: memoryview, first: int, prefix: TimePrefix) -> list[Meta]:
        starts, sizes = self._piece.meta_start[first:].tolist(), self._piece.meta_size[first:].tolist()
        if not starts:
            return []
        joined = b",".join(text[start : start + size] for start, size in zip(starts, sizes, strict=True))
        if prefix.old:
            joined = joined.replace(prefix.old, prefix.new)
        metas: list[Meta] = self._meta_decoder.decode(b"[" + joined + b"]")
        return metas

    def _keep_calls(self, text: memoryview, first: int) -> None:
        """Keep the arguments of the first event with each new key of a call."""
        if len(self.call_args) == self._count(CALLS):
            return
        piece = self._piece
        for call, key in enumerate(piece.call_key[first:].tolist(), first):
            if key not in self.call_args:
                start, size = int(piece.call_start[call]), int(piece.call_size[call])
                name = int(piece.name[piece.call_row[call]])
                self.call_args[key] = (name, msgspec.Raw(bytes(text[start : start + size])))

    def _read_texts(self, first_row: int) -> bool:
        """Decode the new names and threads; False if a row from `first_row` uses one that cannot be decoded."""
        for table, read in ((NAMES, _read_name), (THREADS, _read_thread)):
            texts, unread = self._texts[table], self._unread[table]
            for number in range(len(texts), self._count(table)):
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

    def _count(self, table: int) -> int:
        return int(self._library.ccl_count(self._handle, table))

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
        for number in range(self._num_categories, self._count(CATEGORIES)):
            self._new_categories[number] = self.text(CATEGORIES, number).decode()
            self._num_categories = number + 1
        found = [n for n in self._new_categories if self._library.ccl_was_seen(self._handle, n)]
        return [self._new_categories.pop(number) for number in found]


class Numbering:
    """Maps a scanner's numbers to those of a table, which are given in the order of first use."""

    def __init__(self, number_of: Callable[[int], int]) -> None:
        self._number_of = number_of
        self._known = np.full(256, -1, np.int32)

    def translate(self, numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the table's numbers; `number_of` is asked once for each new one."""
        if not len(numbers):
            return numbers
        largest = int(numbers.max())
        if largest >= len(self._known):
            self._known = np.concatenate([self._known, np.full(largest + len(self._known), -1, np.int32)])
        found: NDArray[np.int32] = self._known[numbers]
        if int(found.min()) < 0:
            for number in dict.fromkeys(numbers[found < 0].tolist()):
                self._known[number] = self._number_of(number)
            found = self._known[numbers]
        return found


def _read_name(raw: bytes) -> str:
    return msgspec.json.decode(b'"' + raw + b'"', type=str) if b"\\" in raw else raw.decode()


def _read_thread(raw: bytes) -> tuple[int | str, int | str]:
    process, thread, _ = raw.split(b"\0")
    return _read_id(process), _read_id(thread)


def _read_id(raw: bytes) -> int | str:
    return _read_name(raw[1:-1]) if raw.startswith(b'"') else int(raw)
