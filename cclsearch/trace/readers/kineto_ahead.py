"""Scans a large trace in several threads: the C library runs without Python's lock.

Of a plain file, every thread reads and scans parts that end between two events, and mostly adds to the table what it
scanned itself. Of a packed file, one thread reads the blocks and cuts them into pieces, exactly as `EventReader` does,
and every thread scans groups of pieces. Both are used in the order of the file. If a piece is refused, it and what
follows are given back unread, and the reader reads them in order; the table is the same with any number of threads.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from cclsearch.trace.readers.json_structs import TimePrefix
from cclsearch.trace.readers.kineto_native import FilePiece, PieceScanner, ScannedPiece
from cclsearch.trace.readers.stream import ByteStream, TraceError

GROUP_BLOCKS = 8
"""Blocks of a packed file that a thread scans at once: with 4 MB, Python's part of the work is 5 % of it."""
PART_BLOCKS = 32
"""Blocks in a part of a plain file: a thread reads them one by one, so that each is in its cache when scanned."""
PARTS_LEFT = 2
"""Parts that each thread still has to scan at least: the last parts are smaller, so that all threads end together."""
MIN_PART_BLOCKS = 4
"""Blocks in the last parts: Python's work on a part takes 0.2 to 0.4 ms, the scan of so many about 1.2 ms."""
SWITCH_S = 2e-4
"""Time for which a thread in Python lets another one wait that comes back from the C library."""

END_BYTES = 1 << 16
"""Text in which the last event of a part is sought first."""

Block = bytes | TraceError
"""A block as the stream gave it: b"" at the end, or the error of reading it."""


@dataclass(frozen=True)
class Cutting:
    """How text is cut into pieces: after the last event of each block that another one follows."""

    block_bytes: int
    separator: bytes
    prefix: TimePrefix
    base_us: int
    max_unseparated_bytes: int

    def find_stop(self, text: bytearray, start: int, end: int) -> int:
        """Return the position after the last event in `text[start:end]` that another one follows; 0 without one."""
        cut = text.rfind(self.separator, start, end)
        return cut + self.separator.find(b"}") + 1 if cut > start else 0


class BlockGroup:
    """Some blocks, the text before them that no piece has yet, and the scanner for them."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self._scanner = PieceScanner()
        self._scanner.base_us = cutting.base_us
        self._text = bytearray()
        self._ends: list[int] = []
        """Where the text before the blocks, and each block, ends."""
        self._stops: list[int] = []
        self._error: TraceError | None = None
        self.is_last = False
        """Whether reading in order continues after it."""
        self.future: Future[ScannedPiece | None] = Future()

    def fill(self, rest: bytes, readinto: Callable[[memoryview], int]) -> None:
        """Read the blocks that follow `rest`, and cut them."""
        cutting, size = self._cutting, self._cutting.block_bytes
        needed = len(rest) + GROUP_BLOCKS * size
        if len(self._text) < needed:
            self._text = bytearray(needed + size)
        text, view = self._text, memoryview(self._text)
        text[: len(rest)] = rest
        self._ends, self._stops = [len(rest)], []
        start = 0
        while len(self._ends) <= GROUP_BLOCKS and not self.is_last:
            end = self._ends[-1]
            try:
                end += readinto(view[end : end + size])
            except TraceError as error:
                self._error, self.is_last = error, True
                return
            stop = cutting.find_stop(text, start, end)
            if end == self._ends[-1] or (not stop and end - start >= cutting.max_unseparated_bytes):
                self.is_last = True
            elif stop:
                self._stops.append(stop)
                start = stop
            self._ends.append(end)

    def scan(self) -> ScannedPiece | None:
        """Return the columns of all pieces; None if one is refused, or without a piece."""
        if not self._stops or not self._scanner.scan(self._text, 0, self._stops, self._cutting.prefix):
            return None
        return self._scanner.take()

    @property
    def has_pieces(self) -> bool:
        """Whether an event ends in its blocks."""
        return bool(self._stops)

    @property
    def rest(self) -> bytes:
        """The text after its pieces, without a last block that is to be read again."""
        start = self._stops[-1] if self._stops else 0
        return bytes(self._text[start : self._ends[-2] if self.is_last and not self._error else self._ends[-1]])

    @property
    def start(self) -> bytes:
        """The text before its blocks."""
        return bytes(self._text[: self._ends[0]])

    def blocks(self, first: int = 0) -> list[Block]:
        """Return what the stream gave, from that block."""
        pairs = list(zip(self._ends, self._ends[1:], strict=False))[first:]
        blocks: list[Block] = [bytes(self._text[begin:end]) for begin, end in pairs]
        return [*blocks, self._error] if self._error else blocks

    @property
    def unread(self) -> list[Block]:
        """The block to be read again, and the error, if it is the last group."""
        return self.blocks(len(self._ends) if self._error else len(self._ends) - 2) if self.is_last else []


@dataclass
class ScanAhead:
    """Scans what follows in `threads` threads (the caller's is one of them); see `rest` and `blocks` afterwards."""

    readinto: Callable[[memoryview], int]
    cutting: Cutting
    threads: int
    rest: bytes
    """Text that no piece has yet."""
    blocks: list[Block] = field(default_factory=list)
    """What the stream gave and nothing has read."""

    def __iter__(self) -> Iterator[ScannedPiece]:
        """Yield columns in the order of the file; each is valid until the next one."""
        free = [BlockGroup(self.cutting) for _ in range(self.threads + 1)]
        waiting: deque[BlockGroup] = deque()
        rest: bytes = self.rest
        pool = ThreadPoolExecutor(self.threads - 1)
        try:
            while True:
                while free and not (waiting and waiting[-1].is_last):
                    group = free.pop()
                    group.fill(rest, self.readinto)
                    rest = group.rest
                    group.future = pool.submit(group.scan)
                    waiting.append(group)
                group = waiting[0]
                piece = _result_of_first(waiting)
                if piece is None and group.has_pieces:
                    self.rest, self.blocks = group.start, [block for one in waiting for block in one.blocks()]
                    return
                if piece is not None:
                    yield piece
                if group.is_last:
                    self.rest, self.blocks = group.rest, group.unread
                    return
                free.append(waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


class FilePart:
    """Some bytes of a plain file, and the scanner for them."""

    def __init__(self, cutting: Cutting, stream: ByteStream, cancel: ctypes.c_int) -> None:
        self._cutting = cutting
        self._stream = stream
        self._cancel = cancel
        self._scanner = PieceScanner()
        self._scanner.base_us = cutting.base_us
        self._text = bytearray(2 * cutting.block_bytes)
        self.start = self.stop = self.reached = 0
        self.is_scanned = False

    def find_stop(self, start: int, size: int, threads: int) -> bool:
        """Take the part at `start` that ends between two events; return whether there is one."""
        block_bytes = self._cutting.block_bytes
        blocks = (size - start) // (PARTS_LEFT * threads * block_bytes)
        end = min(start + min(max(blocks, MIN_PART_BLOCKS), PART_BLOCKS) * block_bytes, size)
        for first in (max(end - END_BYTES, start), start):
            text = bytearray(max(end - first, 0))
            count = self._stream.read_at(first, memoryview(text))
            found = self._cutting.find_stop(text, 0, count)
            if found:
                self.start, self.stop, self.is_scanned = start, first + found, False
                return True
        return False

    def scan(self) -> bool:
        """Scan up to the end, or to the first block that is refused; return whether all is accepted."""
        part = FilePiece(self._stream.fileno, self.start, self.stop, self._cutting.separator, self._cancel)
        self.reached = self._scanner.scan_file(part, self._text, self._cutting.prefix)
        return self.reached == self.stop

    def take(self) -> ScannedPiece | None:
        """Return the columns up to `reached`; None if they are empty."""
        return self._scanner.take()


class ScanParts:
    """Scans a plain file from `position` in several threads; `position` is then where the unused text begins."""

    def __init__(self, stream: ByteStream, cutting: Cutting, threads: int, position: int) -> None:
        self._stream = stream
        self._cutting = cutting
        self._threads = threads
        self.position = self._next = position
        self._cancel = ctypes.c_int()
        self._free: list[FilePart] = []
        self._begun: deque[FilePart] = deque()
        """Parts that were not used yet, in the order of the file."""
        self._is_last = self._is_using = False
        self._changed = threading.Condition()

    def scan_all(self, use: Callable[[ScannedPiece], None], between: Callable[[], None]) -> None:
        """Call `use` with columns in the order of the file: in any of the threads, but in one at a time.

        `between` is called between two parts, in any number of threads at a time.
        """
        patience_s = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_S, patience_s))
        try:
            with ThreadPoolExecutor(self._threads - 1) as pool:
                others = [pool.submit(self._scan_parts, use, between) for _ in range(self._threads - 1)]
                self._scan_parts(use, between)
                for other in others:
                    other.result()
        finally:
            sys.setswitchinterval(patience_s)

    def _scan_parts(self, use: Callable[[ScannedPiece], None], between: Callable[[], None]) -> None:
        try:
            while (part := self._begin()) is not None:
                part.scan()
                self._use_scanned(part, use)
                between()
        except BaseException:
            self._stop()
            raise

    def _begin(self) -> FilePart | None:
        """Return the next part; None after the last one."""
        with self._changed:
            while not self._is_last and not self._free and len(self._begun) > self._threads:
                self._changed.wait()
            if self._is_last:
                return None
            part = self._free.pop() if self._free else FilePart(self._cutting, self._stream, self._cancel)
            if not part.find_stop(self._next, self._stream.plain_bytes, self._threads):
                self._is_last = True
                self._changed.notify_all()
                return None
            self._next = part.stop
            self._begun.append(part)
            return part

    def _use_scanned(self, part: FilePart, use: Callable[[ScannedPiece], None]) -> None:
        """Use what comes next, mostly this part, while it is in this core's cache; not if another thread is at it."""
        with self._changed:
            part.is_scanned = True
            if self._is_using:
                return
            self._is_using = True
        while (first := self._first_scanned()) is not None:
            piece = first.take()
            if piece is not None:
                use(piece)
            with self._changed:
                self.position = first.reached
                self._free.append(self._begun.popleft())
                self._changed.notify_all()
            if first.reached < first.stop:
                self._stop()

    def _first_scanned(self) -> FilePart | None:
        with self._changed:
            if not self._cancel.value and self._begun and self._begun[0].is_scanned:
                return self._begun[0]
            self._is_using = False
            return None

    def _stop(self) -> None:
        """Let all threads end: what follows is not needed."""
        with self._changed:
            self._cancel.value, self._is_last = 1, True
            self._changed.notify_all()


def _result_of_first(waiting: Sequence[BlockGroup]) -> ScannedPiece | None:
    """Return the columns of the first; this thread scans those that no other has begun, until they are there."""
    for group in list(waiting):
        if waiting[0].future.done():
            break
        if group.future.cancel():
            group.future = Future()
            try:
                group.future.set_result(group.scan())
            except MemoryError as error:
                group.future.set_exception(error)
    return waiting[0].future.result()
