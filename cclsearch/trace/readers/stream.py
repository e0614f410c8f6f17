"""Reads a trace file, plain or gzip, in blocks and within limits; it is never unpacked as a whole."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclsearch.trace.events import Reason

GZIP_MAGIC = b"\x1f\x8b"
PACKED_BYTES = 256 << 10
ROWS_PER_ENTRY = 20
"""An object of a record takes about this many times the memory of a row in columns."""
HEAD_BYTES = 1 << 20
"""Number of first bytes that show a file's format."""


@dataclass(frozen=True)
class ReadLimits:
    """Limits of reading a trace file; a file beyond a limit of size is `too_large` and cannot exhaust memory."""

    raw_bytes: int = 64 << 30
    """Unpacked size."""
    ratio: int = 300
    """Unpacked to packed size, checked after `ratio_from_bytes` unpacked; real traces reach 10 to 60."""
    ratio_from_bytes: int = 256 << 20
    event_bytes: int = 64 << 20
    """Size of one event, or of the text before the first one."""
    rows: int = 400_000_000
    threads: int = 1
    """Threads that may scan one file; the result does not depend on it."""
    bad_events: int = 2000
    """After more broken events than this, the rest of the file is skipped."""

    def check_entries(self, count: int, what: str) -> None:
        """Raise TraceError if these records, which become objects instead of columns, are too many."""
        if count > self.rows // ROWS_PER_ENTRY:
            raise TraceError(Reason.TOO_LARGE, f"more than {self.rows // ROWS_PER_ENTRY} {what}")


class TraceError(Exception):
    """A trace cannot be read: a reason from the closed list, and one line for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def list_faults(*, is_complete: bool, num_bad: int = 0) -> tuple[Reason, ...]:
    """Return the reasons why a file was read only in part: broken records, or a missing end."""
    faults = {Reason.UNREADABLE: num_bad > 0, Reason.TRACE_TRUNCATED: not is_complete}
    return tuple(reason for reason, found in faults.items() if found)


class ByteStream:
    """Reads a file block by block; `is_truncated` is set if gzip data end early or are damaged."""

    def __init__(self, path: Path, limits: ReadLimits) -> None:
        self.is_truncated = False
        self._limits = limits
        self._file = path.open("rb", buffering=0)
        self._packed_size = path.stat().st_size
        magic = self._file.read(2)
        self._file.seek(0)
        self._is_gzip = magic == GZIP_MAGIC
        self._zlib = _fastest_zlib()
        self._inflate = self._zlib.decompressobj(31)
        self._packed = b""
        self.fileno = self._file.fileno()
        """Number of the open file; other threads read parts of it by position."""
        self.position = 0
        """Number of bytes read."""
        self.again = b""
        """Text that `readinto` gives a second time before it continues."""

    def __enter__(self) -> ByteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def readinto(self, block: memoryview) -> int:
        """Fill the block from its start and return the number of bytes, 0 at the end; TraceError over the limits."""
        if self.again:
            count = min(len(self.again), len(block))
            block[:count], self.again = self.again[:count], self.again[count:]
            return count
        count = self._unpack(block) if self._is_gzip else self._file.readinto(block) or 0
        self.position += count
        self._check()
        return count

    def _unpack(self, block: memoryview) -> int:
        """Fill the block from the gzip members, one after another; damage ends the file."""
        filled = 0
        while filled < len(block) and not self.is_truncated:
            self._packed = self._packed or self._file.read(PACKED_BYTES)
            if not self._packed:
                self.is_truncated = not self._inflate.eof
                break
            if self._inflate.eof:
                if not self._packed.startswith(GZIP_MAGIC[: len(self._packed)]):
                    break  # padding after the last member, as on tape
                self._inflate = self._zlib.decompressobj(31)
            try:
                piece: bytes = self._inflate.decompress(self._packed, len(block) - filled)
            except self._zlib.error:
                self.is_truncated = True
                break
            self._packed = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            block[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled

    @property
    def plain_bytes(self) -> int:
        """Size of the file, or of the part within the limits, if `read_at` can read it; 0 if it is packed."""
        return 0 if self._is_gzip else min(os.fstat(self.fileno).st_size, self._limits.raw_bytes)

    def read_at(self, position: int, block: memoryview) -> int:
        """Fill the block from that position of a plain file, in any thread; return the number of bytes."""
        return os.preadv(self.fileno, [block], position)

    def continue_at(self, position: int) -> None:
        """Let `readinto` continue at that position of a plain file."""
        self.position = self._file.seek(position)

    def _check(self) -> None:
        if self.position > self._limits.raw_bytes:
            raise TraceError(Reason.TOO_LARGE, f"unpacks to more than {self._limits.raw_bytes >> 20} MiB")
        if (
            self._is_gzip
            and self.position > self._limits.ratio_from_bytes
            and self.position > self._limits.ratio * self._packed_size
        ):
            raise TraceError(Reason.TOO_LARGE, f"unpacks to more than {self._limits.ratio} times its size")


def read_head(path: Path) -> bytes:
    """Return the first bytes of the file, unpacked; none if it cannot be read."""
    try:
        with ByteStream(path, ReadLimits()) as stream:
            block = bytearray(HEAD_BYTES)
            return bytes(block[: stream.readinto(memoryview(block))])
    except OSError:
        return b""


def _fastest_zlib() -> Any:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib
