"""Bytes of a trace file, plain or gzip, in blocks and within limits: nothing is ever unpacked whole."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cclsearch.trace.events import Reason

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class ReadLimits:
    """What a trace file may cost; a file beyond them is `too_large`, never a full memory."""

    raw_bytes: int = 64 << 30
    """Unpacked size."""
    ratio: int = 300
    """Unpacked to packed, looked at once `ratio_from_bytes` are out; real traces reach 10 to 60."""
    ratio_from_bytes: int = 256 << 20
    event_bytes: int = 64 << 20
    """One event, or what stands before the first one."""
    rows: int = 400_000_000
    bad_events: int = 2000
    """So many broken events in one piece, and the file is given up."""


class TraceError(Exception):
    """A trace that cannot be read: the reason from the closed list and one line for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class ByteStream:
    """Reads a file block by block; `cut` tells afterwards that a gzip file ended before its end."""

    def __init__(self, path: Path, limits: ReadLimits) -> None:
        self.cut = False
        self.damage = ""
        self._limits = limits
        self._file: IO[bytes] = path.open("rb", buffering=0)
        self._packed_size = path.stat().st_size
        magic = self._file.read(2)
        self._file.seek(0)
        self._gzip = GzipBlocks(self._file) if magic == GZIP_MAGIC else None
        self._raw = 0

    def __enter__(self) -> ByteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def readinto(self, block: memoryview) -> int:
        """Fills the block from its start; how many bytes came, 0 at the end. Raises TraceError beyond the limits."""
        if self._gzip is None:
            count = self._file.readinto(block) or 0  # type: ignore[attr-defined]
        else:
            count = self._unzip(block)
        self._raw += count
        self._check()
        return count

    def _unzip(self, block: memoryview) -> int:
        assert self._gzip is not None
        try:
            return self._gzip.readinto(block)
        except GzipDamage as damage:
            self.cut = True
            self.damage = str(damage)
            return 0

    def _check(self) -> None:
        if self._raw > self._limits.raw_bytes:
            raise TraceError(Reason.TOO_LARGE, f"more than {self._limits.raw_bytes >> 20} MiB unpacked")
        if (
            self._gzip is not None
            and self._raw > self._limits.ratio_from_bytes
            and self._raw > self._limits.ratio * self._packed_size
        ):
            raise TraceError(Reason.TOO_LARGE, f"unpacks to more than {self._limits.ratio} times its size")


class GzipDamage(Exception):
    """The gzip data stop being valid here, or end before their end."""


class GzipBlocks:
    """Unpacks gzip members one after another, never more at once than the caller's block holds."""

    PACKED_BYTES = 256 << 10

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._zlib, self._error = _fastest_zlib()
        self._inflate = self._zlib.decompressobj(31)
        self._packed = b""
        self._started = False
        self._damage = ""

    def readinto(self, block: memoryview) -> int:
        """Fills the block as far as the data go; raises GzipDamage with nothing filled."""
        filled = 0
        while filled < len(block):
            try:
                piece = self._next(len(block) - filled)
            except GzipDamage:
                if filled:
                    return filled  # the damage is met again by the next call
                raise
            if piece is None:
                break
            block[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled

    def _next(self, limit: int) -> bytes | None:
        if self._damage:
            raise GzipDamage(self._damage)
        if not self._packed:
            self._packed = self._file.read(self.PACKED_BYTES) or b""
        if not self._packed:
            if self._started and not self._inflate.eof:
                raise GzipDamage("the gzip file ends before its end")
            return None
        if self._inflate.eof:
            if not self._packed.startswith(GZIP_MAGIC[: len(self._packed)]):
                return None  # padding behind the last member, as tape blocks leave it
            self._inflate = self._zlib.decompressobj(31)
        try:
            piece: bytes = self._inflate.decompress(self._packed, limit)
        except self._error as error:
            self._damage = f"the gzip data are damaged ({error})"
            raise GzipDamage(self._damage) from None
        self._started = True
        self._packed = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
        return piece


def _fastest_zlib() -> tuple[Any, Any]:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib, zlib.error
    return isal_zlib, isal_zlib.error
