"""Scans pieces of Kineto's JSON with the C library `native/kineto_scan.c`, if it was built with the package.

The library accepts a piece only if it is sure of the result, and gives the same rows as the Python way for it; every
other piece is read in Python. CCL_NATIVE=0 switches it off.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import Kind
from cclsearch.trace.kinds import KINETO_KINDS
from cclsearch.trace.readers.json_structs import Meta, TimePrefix

VERSION = 1
SWITCH = "CCL_NATIVE"
DEVICE_KINDS = (Kind.COMPUTE, Kind.MEMCPY, Kind.MEMSET, Kind.DEVICE_ANNOTATION, Kind.SYNC)
NAMES, THREADS, GRIDS, SHAPES, CALLS, CATEGORIES = range(6)

_ACCEPTED, _REFUSED = 0, 1
_HOST, _RUNTIME, _ON_DEVICE = 0, 1, 2
_SMALLEST_EVENT_BYTES = len('{"ph":"M"},')
_INPUTS = (
    *(("text", ctypes.c_void_p), ("size", ctypes.c_int64), ("time_prefix", ctypes.c_char_p)),
    *(("time_prefix_size", ctypes.c_int64), ("time_offset_us", ctypes.c_double), ("capacity", ctypes.c_int64)),
    *(("base_us", ctypes.c_int64), ("has_base", ctypes.c_int64)),
)
_COUNTS = ("rows", "details", "shaped", "calls", "metas", "points", "bad")
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
    library.ccl_scan.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Piece)]
    return library


def open_scanner() -> PieceScanner | None:
    """Return a scanner for one file; None without the library, or if it is switched off."""
    return PieceScanner() if os.environ.get(SWITCH, "") != "0" and load_library(library_path()) else None


class ScannedPiece:
    """The columns of one piece: views that are valid until the same scanner scans again."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._arrays = {name: np.empty(capacity, dtype) for name, dtype in _COLUMNS.items()}
        self.raw = _Piece(capacity=capacity)
        for name, array in self._arrays.items():
            setattr(self.raw, name, array.ctypes.data)
        self.metas: list[Meta] = []
        self.buffer = bytearray()
        self.start = 0

    def __len__(self) -> int:
        return int(self.raw.rows + len(self.metas) + self.raw.points + self.raw.bad)

    def __iter__(self) -> Iterator[Meta]:
        """Iterate over the events that are not in columns: names of processes and threads."""
        return iter(self.metas)

    def slice(self, start: int, size: int) -> bytes:
        """Return this part of the piece's text."""
        return bytes(self.buffer[self.start + start : self.start + start + size])

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
        self._piece = ScannedPiece(0)
        self._unread: dict[int, set[int]] = {NAMES: set(), THREADS: set()}
        self._texts: dict[int, list[Any]] = {NAMES: [], THREADS: []}
        self._new_categories: dict[int, str] = {}
        self._num_categories = self.count(CATEGORIES)
        self.base_us: int | None = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.ccl_free(self._handle)

    def scan(self, buffer: bytearray, start: int, stop: int, prefix: TimePrefix) -> ScannedPiece | None:
        """Return the columns of `buffer[start:stop]`, a bracket or comma and the events after it; None: refused."""
        piece = self._piece_for(stop - start)
        text = ctypes.c_char.from_buffer(buffer, start)
        raw = piece.raw
        raw.text, raw.size = ctypes.addressof(text), stop - start
        raw.time_prefix, raw.time_prefix_size, raw.time_offset_us = prefix.old, len(prefix.old), float(prefix.offset_us)
        raw.base_us, raw.has_base = self.base_us or 0, self.base_us is not None
        answer = self._library.ccl_scan(self._handle, ctypes.byref(raw))
        if answer not in (_ACCEPTED, _REFUSED):
            raise MemoryError
        if not self._read_texts(piece) or answer == _REFUSED:
            return None
        piece.buffer, piece.start = buffer, start
        try:
            piece.metas = self._read_metas(piece, prefix)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        if raw.has_base:
            self.base_us = raw.base_us
        return piece

    def _piece_for(self, size: int) -> ScannedPiece:
        capacity = size // _SMALLEST_EVENT_BYTES + 1
        if self._piece.capacity < capacity:
            self._piece = ScannedPiece(capacity)
        return self._piece

    def _read_metas(self, piece: ScannedPiece, prefix: TimePrefix) -> list[Meta]:
        if not piece.raw.metas:
            return []
        spans = zip(piece.meta_start.tolist(), piece.meta_size.tolist(), strict=True)
        text = b",".join(piece.slice(start, size) for start, size in spans)
        if prefix.old:
            text = text.replace(prefix.old, prefix.new)
        metas: list[Meta] = self._meta_decoder.decode(b"[" + text + b"]")
        return metas

    def _read_texts(self, piece: ScannedPiece) -> bool:
        """Decode the new names and threads; False if the piece uses one that cannot be decoded."""
        for table, read in ((NAMES, _read_name), (THREADS, _read_thread)):
            texts, unread = self._texts[table], self._unread[table]
            for number in range(len(texts), self.count(table)):
                try:
                    texts.append(read(self.text(table, number)))
                except (msgspec.MsgspecError, ValueError):
                    texts.append(None)
                    unread.add(number)
            if unread and not unread.isdisjoint((piece.name if table == NAMES else piece.thread).tolist()):
                return False
        return True

    def count(self, table: int) -> int:
        """Return the number of texts in this table."""
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

    def new_categories(self) -> list[str]:
        """Return the categories that the last piece has and no piece before it had."""
        for number in range(self._num_categories, self.count(CATEGORIES)):
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


def _read_thread(raw: bytes) -> int | str:
    return _read_name(raw[1:-1]) if raw.startswith(b'"') else int(raw)
