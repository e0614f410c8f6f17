"""Scans regions of a large file in other threads while its beginning is read: the C library runs without Python's lock.

A region is a run of blocks. Its thread cuts it into the same pieces as the reader would, and ends before the first one
that the library refuses; the reader continues there. The table is therefore the same as without threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cclsearch.trace.readers.json_structs import TimePrefix
from cclsearch.trace.readers.kineto_native import PieceScanner, ScannedPiece

MIN_REGION_BYTES = 32 << 20
"""A smaller region saves less than 30 ms."""


class PieceLayout(NamedTuple):
    """How a file is cut into pieces: after the last event that ends in a block (of `block_bytes`)."""

    path: Path
    block_bytes: int
    separator: bytes
    prefix: TimePrefix
    base_us: int

    def cut(self, text: bytearray | bytes, size: int) -> int:
        """Return the end of the last event that another one follows; 0 without one."""
        found = text.rfind(self.separator, 1, size)
        return found + self.separator.find(b"}") + 1 if found > 0 else 0


class RegionScan:
    """The scan of the blocks from `first` to before `last`, in its own thread; call `wait`, then see `end`."""

    def __init__(self, layout: PieceLayout, start: int, first: int, last: int) -> None:
        self.start = start
        """Position of the first event, which begins before block `first`."""
        self.end = start
        """Position up to which the pieces go."""
        self._layout = layout
        self._blocks = range(first, last)
        self._pieces: list[ScannedPiece] = []
        self._is_cancelled = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> list[ScannedPiece]:
        """Return the scanned pieces, in the order of the file."""
        self._thread.join()
        return self._pieces

    def cancel(self) -> None:
        """End the thread."""
        self._is_cancelled = True
        self._thread.join()

    def _run(self) -> None:
        pieces: list[ScannedPiece] = []
        end = self.start
        try:
            scanner = PieceScanner()
            scanner.base_us = self._layout.base_us
            for position in self._scan(scanner):
                end = position
                if not scanner.has_room(4 * self._layout.block_bytes):
                    _take(scanner, pieces)
            _take(scanner, pieces)
        except (OSError, MemoryError):
            return
        self._pieces, self.end = pieces, end

    def _scan(self, scanner: PieceScanner) -> Iterator[int]:
        """Yield the position after each piece that was scanned."""
        layout, size = self._layout, self._layout.block_bytes
        buffer = bytearray(4 * size)
        view = memoryview(buffer)
        position, filled = self.start, 0
        with layout.path.open("rb", buffering=0) as file:
            file.seek(position)
            for block in self._blocks:
                stop = (block + 1) * size - position
                while filled < stop and (count := file.readinto(view[filled:stop])):
                    filled += count
                if filled < stop or self._is_cancelled:
                    return
                cut = layout.cut(buffer, filled)
                if cut and not scanner.scan(buffer, _skip_space(buffer, cut), cut, layout.prefix):
                    return
                if not cut and filled >= 2 * size:
                    return
                if cut:
                    buffer[: filled - cut] = buffer[cut:filled]
                    position, filled = position + cut, filled - cut
                    yield position


def _take(scanner: PieceScanner, pieces: list[ScannedPiece]) -> None:
    piece = scanner.take()
    if piece:
        pieces.append(piece.copy_of(scanner))


def _skip_space(buffer: bytearray, stop: int) -> int:
    start = 0
    while start < stop and buffer[start] in b" \t\r\n":
        start += 1
    return start


def scan_ahead(layout: PieceLayout, position: int, threads: int) -> list[RegionScan]:
    """Begin to scan the file after its first part, from `position`, in `threads - 1` regions of equal size."""
    if not layout.separator:
        return []
    size, block = layout.path.stat().st_size, layout.block_bytes
    parts = min(threads, (size - position) // MIN_REGION_BYTES)
    firsts = sorted({(position + (size - position) * part // parts) // block for part in range(1, parts)})
    regions = []
    for first, last in zip(firsts, [*firsts, size // block][1:], strict=True):
        start = _start_before(layout, first)
        if start and first < last:
            regions.append(RegionScan(layout, start, first, last))
    return regions


def _start_before(layout: PieceLayout, block: int) -> int:
    """Return where the pieces before this block end; 0 if no event ends in the block before it."""
    begin = (block - 1) * layout.block_bytes
    if begin <= 0:
        return 0
    with layout.path.open("rb", buffering=0) as file:
        file.seek(begin)
        text = file.read(layout.block_bytes)
    cut = layout.cut(text, len(text))
    return begin + cut if cut and len(text) == layout.block_bytes else 0
