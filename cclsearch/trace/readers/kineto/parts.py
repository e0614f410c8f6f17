"""Scans a large trace in several threads: the C library runs without Python's lock.

The text is cut into parts that end between two events. Of a plain file, every thread reads the parts that it scans; a
packed file is unpacked by the reader's thread, which also adds what was scanned to the table, in the order of the file.
If a part is refused, the reader reads on from there in order; the table is the same with any number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cclsearch.trace.readers.kineto.scanner import Cutting, PieceScanner, ScannedPiece
from cclsearch.trace.readers.stream import ByteStream, TraceError

if TYPE_CHECKING:
    from concurrent.futures import Future

# With 4 MB, Python's part of the work is 5 % of it.
PACKED_BLOCKS = 8
"""Number of blocks in a part of a packed file."""
# A thread reads the blocks one by one, so that each is in its cache when scanned.
PART_BLOCKS = 32
"""Number of blocks in a part of a plain file."""
# The last parts are smaller, so that all threads end together.
PARTS_LEFT = 2
"""Least number of parts that each thread still has to scan."""
# Python's work on a part takes 0.2 to 0.4 ms, the scan of so many about 1.2 ms.
MIN_PART_BLOCKS = 4
"""Number of blocks in the last parts."""
END_BYTES = 1 << 16
"""Size of the text in which the last event of a part is sought first."""


class Part:
    """Text between two events, and the scanner for it."""

    def __init__(self, cutting: Cutting) -> None:
        self.scanner = PieceScanner()
        self.scanner.base_us = cutting.base_us
        self.text = bytearray(2 * cutting.block_bytes)
        self.stop = self.reached = 0
        """Its end, and the end of its accepted text: positions in the file, for a packed file in `text`."""


@dataclass
class PlainParts:
    """The parts of a plain file from `position`: each thread reads its own."""

    stream: ByteStream
    cutting: Cutting
    threads: int
    position: int

    def cut(self, part: Part) -> bool:
        """Take the next part: smaller ones towards the end."""
        start, size, block_bytes = self.position, self.stream.plain_bytes, self.cutting.block_bytes
        blocks = (size - start) // (PARTS_LEFT * self.threads * block_bytes)
        end = min(start + min(max(blocks, MIN_PART_BLOCKS), PART_BLOCKS) * block_bytes, size)
        for first in (max(end - END_BYTES, start), start):
            text = bytearray(max(end - first, 0))
            found = self.cutting.find_stop(text, self.stream.read_at(first, memoryview(text)))
            if found:
                part.reached, part.stop = start, first + found
                self.position = part.stop
                return True
        return False

    def scan(self, part: Part) -> None:
        """Scan up to the end, or to the first block that is refused."""
        span = (part.reached, part.stop)
        part.reached = part.scanner.scan_file(self.stream.fileno, span, part.text, self.cutting)

    def give_back(self, unused: Sequence[Part]) -> None:
        """Let the stream continue at the first text that is not in the table."""
        self.stream.continue_at(unused[0].reached if unused else self.position)


@dataclass
class PackedParts:
    """The parts of a packed file after the text `rest`, which was unpacked before."""

    stream: ByteStream
    cutting: Cutting
    rest: bytes

    def cut(self, part: Part) -> bool:
        """Unpack the next part."""
        size = self.cutting.block_bytes
        end = len(self.rest)
        if len(part.text) < end + PACKED_BLOCKS * size:
            part.text = bytearray(end + (PACKED_BLOCKS + 1) * size)
        part.text[:end] = self.rest
        view = memoryview(part.text)
        try:
            while end + size <= len(view) and (count := self.stream.readinto(view[end : end + size])):
                end += count
        except TraceError:
            pass  # the reader comes to the same error
        part.reached, part.stop = 0, self.cutting.find_stop(part.text, end)
        self.rest = bytes(view[part.stop : end])
        return part.stop > 0

    def scan(self, part: Part) -> None:
        """Scan all of the part or, if something is refused, nothing."""
        if part.scanner.scan(part.text, 0, part.stop, self.cutting.prefix):
            part.reached = part.stop

    def give_back(self, unused: Sequence[Part]) -> None:
        """Let the stream give the text that is not in the table a second time."""
        self.stream.again = b"".join(part.text[part.reached : part.stop] for part in unused) + self.rest


Parts = PlainParts | PackedParts
"""The parts of one file: `cut` takes the next one (in one thread), `scan` scans it, and `give_back` lets the stream
continue where the unused parts begin, or after the last part without any."""


@dataclass(frozen=True)
class ScanParts:
    """Scans the parts of a file in several threads."""

    parts: Parts
    threads: int

    def scan_all(self, use: Callable[[ScannedPiece], None]) -> None:
        """Call `use` in this thread with the columns of each part, in the order of the file, while others scan.

        Afterwards the stream gives the text that was not used.
        """
        from concurrent.futures import ThreadPoolExecutor

        free: list[Part] = []
        begun: deque[tuple[Part, Future[None]]] = deque()
        is_last = False
        with ThreadPoolExecutor(self.threads) as pool:
            try:
                while begun or not is_last:
                    while not is_last and len(begun) <= self.threads:
                        part = free.pop() if free else Part(self.parts.cutting)
                        is_last = not self.parts.cut(part)
                        if not is_last:
                            begun.append((part, pool.submit(self.parts.scan, part)))
                    if begun:
                        part, scanning = begun[0]
                        scanning.result()
                        if piece := part.scanner.take():
                            use(piece)
                        if part.reached < part.stop:
                            break
                        free.append(begun.popleft()[0])
            finally:
                self.parts.cutting.cancel.value = 1
        self.parts.give_back([part for part, _ in begun])
