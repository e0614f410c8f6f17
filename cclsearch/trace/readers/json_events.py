"""Events of a Chrome-format JSON trace (what Kineto and XLA write), batch by batch in bounded memory.

The stream is cut at the separator of two events, which is taken from the first two (`<indent>},<indent>{`, or `}, {"`
on one line), and each piece is decoded as typed structs. If that fails, the piece is read event by event with Python's
own parser, which also accepts NaN, broken UTF-8 and numbers written as strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Union

import msgspec

from cclsearch.trace.events import Reason
from cclsearch.trace.readers.json_structs import (
    IGNORED_PHASES,
    EventScanner,
    Instant,
    Meta,
    NeedMoreData,
    Span,
    TimePrefix,
)
from cclsearch.trace.readers.kineto.parts import PackedParts, Parts, PlainParts, ScanParts
from cclsearch.trace.readers.kineto.scanner import Cutting, PieceScanner, ScannedPiece
from cclsearch.trace.readers.stream import ByteStream, ReadLimits, TraceError

BLOCK_BYTES = 1 << 19
MIN_AHEAD_BLOCKS = 4
"""Blocks left of a plain file that repay the start of threads."""
SCANS_AHEAD = 4
"""Number of vain scans ahead by threads after which a file is read in order."""

_HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
_BOM = b"\xef\xbb\xbf"
_UNION: Any = Union[Span, Meta, Instant, *IGNORED_PHASES]
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


class EventReader:
    """Iterates over batches of `Span`, `Meta` and `Instant`; afterwards see `metadata`, `complete` and `num_bad`.

    Raises TraceError if the file is not a trace or exceeds the limits.
    """

    def __init__(self, stream: ByteStream, limits: ReadLimits, *, scanner: PieceScanner | None = None) -> None:
        self._stream = stream
        self._limits = limits
        self._decode = msgspec.json.Decoder(list[_UNION]).decode
        self._buffer = bytearray(2 * BLOCK_BYTES)
        self._start = 0
        """Position of the next event, or of the separator before it."""
        self._end = 0
        self._at_end = False
        self._is_open = False
        self._max_unseparated_bytes = 2 * BLOCK_BYTES
        """More text than this without a separator is read event by event."""
        self._head = ""
        self._separator = b""
        self._brace_end = 1
        self._time_prefix = TimePrefix(b"", b"", 0)
        self._slow = EventScanner(limits)
        self.scanner = scanner
        self._scans_ahead = SCANS_AHEAD if limits.threads > 1 and scanner else 0
        self._shortened = 0
        """Times before this position are shortened."""
        self.complete = False
        """Whether the list of events and the document are closed."""
        self.num_bad = 0
        """Number of events that could not be parsed and are left out."""
        self.metadata: dict[str, Any] = {}
        """The document's other fields: those before the events at once, all of them at the end."""

    def __iter__(self) -> Iterator[list[Any] | ScannedPiece | ScanParts]:
        self._find_events()
        while True:
            is_first = self.scanner is not None and self.scanner.base_us is None
            batch, done = self._next_batch()
            if self.scanner and (batch or done or is_first or not self.scanner.has_room(len(self._buffer))):
                scanned = self.scanner.take()
                if scanned:
                    yield scanned
            if batch:
                yield batch
            if done:
                return
            if self._scans_ahead and self._can_scan_ahead():
                yield from self._scan_ahead()

    def expected_in_all(self, count: int) -> int:
        """Return how many events the whole file has if the text read so far has `count`; 0 if it is packed."""
        size, read = self._stream.plain_bytes, self._stream.position - (self._end - self._start)
        return count * size // read if read > 0 else 0

    def _can_scan_ahead(self) -> bool:
        """Whether the first time is known, much text is left, and other threads have not scanned the next block."""
        is_known = self.scanner is not None and self.scanner.base_us is not None
        size = self._stream.plain_bytes
        if size and size - self._stream.position < MIN_AHEAD_BLOCKS * BLOCK_BYTES:
            return False
        return is_known and bool(self._separator) and not self._stream.again and not self._at_end

    def _scan_ahead(self) -> Iterator[ScannedPiece | ScanParts]:
        """Yield the text that follows, up to the end or a piece that is refused, for several threads to scan."""
        scanner, prefix = self.scanner, self._time_prefix
        if scanner is None or scanner.base_us is None:
            return
        self._scans_ahead -= 1
        scanned = scanner.take()
        if scanned:
            yield scanned
        cutting, threads = Cutting(BLOCK_BYTES, self._separator, prefix, scanner.base_us), self._limits.threads
        rest = bytes(self._buffer[self._start : self._end])
        parts: Parts = PackedParts(self._stream, cutting, rest)
        if self._stream.plain_bytes:
            parts = PlainParts(self._stream, cutting, threads, self._stream.position - len(rest))
        self._start = self._end = self._shortened = 0
        yield ScanParts(parts, threads)

    def _next_batch(self) -> tuple[list[Any], bool]:
        if not self._at_end:
            self._fill()
        cut = self._buffer.rfind(self._separator, self._start, self._end) if self._separator else -1
        if cut > self._start:
            return self._decode_to(cut + self._brace_end)
        if not self._at_end and self._end - self._start < self._max_unseparated_bytes:
            return [], False
        return self._scan(self._end)

    def _decode_to(self, stop: int) -> tuple[list[Any], bool]:
        """Decode the events between the comma (or bracket) at `_start` and `stop`, which follows a closing brace."""
        buffer = self._buffer
        while buffer[self._start] in b" \t\r\n":
            self._start += 1
        if self.scanner and self.scanner.scan(buffer, self._start, stop, self._time_prefix):
            self._start = stop
            return [], False
        self._shorten_times()
        before, after = buffer[self._start], buffer[stop]
        batch = None
        if before in b"[,":
            buffer[self._start], buffer[stop] = ord("["), ord("]")
            batch = self._decode_piece(memoryview(buffer)[self._start : stop + 1])
            buffer[self._start], buffer[stop] = before, after
        if batch is not None:
            self._start = stop
            return batch, False
        events, done = self._scan(stop)
        if events or done or not self._at_end:
            return events, done
        return self._scan(self._end)

    def _decode_piece(self, piece: memoryview) -> list[Any] | None:
        try:
            batch: list[Any] = self._decode(piece)
        except _DECODE_ERRORS:
            return None
        return batch

    def _scan(self, stop: int) -> tuple[list[Any], bool]:
        """Read event by event up to `stop`; at the end of the list also read the rest of the document."""
        if self._buffer[self._start] == ord("[") and not self._is_open:
            self._start += 1
        self._is_open = True
        is_last = self._at_end and stop == self._end
        self._shorten_times()
        scan = self._slow.scan(bytes(self._buffer[self._start : stop]), self._separator, is_last=is_last)
        self.num_bad += scan.num_bad
        self._start += scan.used
        if self.num_bad > self._limits.bad_events:
            return scan.events, True  # the rest is noise; keep the events before it
        if scan.closed:
            self._read_tail()
        elif not scan.used and not is_last:
            if self._max_unseparated_bytes >= self._limits.event_bytes:
                raise TraceError(Reason.TOO_LARGE, f"one event takes more than {self._limits.event_bytes >> 20} MiB")
            self._max_unseparated_bytes *= 2
        return scan.events, scan.closed or is_last

    def _fill(self) -> None:
        """Move the unread rest to the front and read one more block; the buffer grows for a very long event."""
        left = self._end - self._start
        if self._start:
            self._buffer[0:left] = self._buffer[self._start : self._end]
            self._shortened = max(self._shortened - self._start, 0)
            self._start, self._end = 0, left
        if len(self._buffer) - left < BLOCK_BYTES and not self._buffer_is_full():
            self._buffer = self._buffer + bytes(len(self._buffer))  # not in place: undecoded `args` still refer to it
        stop = min(self._end + BLOCK_BYTES, len(self._buffer))
        if stop > self._end:
            count = self._stream.readinto(memoryview(self._buffer)[self._end : stop])
            self._end += count
            self._at_end = count == 0

    def _fill_up_to(self, size: int) -> None:
        """Read, at least once, until the buffer has `size` bytes (sizes that double keep repeated searches cheap)."""
        self._fill()
        while not self._at_end and not self._buffer_is_full() and self._end - self._start < size:
            self._fill()

    def _shorten_times(self) -> None:
        """Blank the leading digits that all times share, since float64 would lose the last ones."""
        old, new, _ = self._time_prefix
        if old and self._shortened < self._end:
            start = max(self._shortened - len(old), self._start)
            self._buffer[start : self._end] = self._buffer[start : self._end].replace(old, new)
            self._shortened = self._end

    def _buffer_is_full(self) -> bool:
        return self._end - self._start >= self._limits.event_bytes

    def _find_events(self) -> None:
        """Set `_start` to the bracket that opens the list of events."""
        while True:
            self._fill_up_to(2 * self._end)
            text = bytes(self._buffer[: self._end])
            lead = len(text) - len(text.removeprefix(_BOM).lstrip())
            if text[lead : lead + 1] == b"[":
                self._start = lead
                break
            if text and len(text) >= 4 and text[lead : lead + 1] not in (b"{", b""):
                raise TraceError(Reason.UNREADABLE, "not JSON in UTF-8")
            found = _HEAD.search(text)
            if found:
                self._start = found.end() - 1
                self._head = text[lead : found.end()].decode("utf-8", "replace")
                self.metadata = self._slow.read_object(self._head + "]}") or {}
                break
            if self._at_end or self._buffer_is_full():
                raise TraceError(Reason.UNREADABLE, "contains no list of trace events")
        self._time_prefix = TimePrefix.find(bytes(self._buffer[self._start : self._end]))
        self._find_separator()

    @property
    def time_offset_us(self) -> int:
        """Add this to every `ts` to get the time in the file."""
        return self._time_prefix.offset_us

    def _find_separator(self) -> None:
        """Set the bytes between two events, from the first pair of events."""
        while True:
            text = bytes(self._buffer[self._start : self._end])
            try:
                self._separator = self._slow.find_separator(text)
            except NeedMoreData:
                if self._at_end or self._buffer_is_full():
                    return
                self._fill_up_to(2 * (self._end - self._start))
                continue
            self._brace_end = self._separator.find(b"}") + 1
            return

    def _read_tail(self) -> None:
        """Read the rest of the document after the list; it is complete only if it is closed."""
        while not self._at_end and not self._buffer_is_full():
            self._fill()
        tail = bytes(self._buffer[self._start : self._end]).decode("utf-8", "replace")
        if not self._head:
            self.complete = not self._stream.is_truncated
            return
        whole = self._slow.read_object(self._head + "]" + tail)
        if whole is not None:
            self.metadata = whole
        self.complete = whole is not None and not self._stream.is_truncated
