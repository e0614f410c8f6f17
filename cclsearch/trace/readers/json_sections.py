"""Walks a JSON document list by list, in bounded memory: for profilers that write several lists of records.

A list is cut between two records and decoded in pieces as typed structs; a piece that does not decode is read record by
record. Only the objects that the caller names are entered, so the depth of the document does not matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cclsearch.trace.events import Reason
from cclsearch.trace.readers.json_structs import repair_text
from cclsearch.trace.readers.stream import ByteStream, ReadLimits, TraceError

BLOCK_BYTES = 1 << 19
_FIRST_WINDOW = 1 << 12
_NEAR_END = 16
_SPACE = re.compile(rb"[ \t\r\n]*")
_NEXT_RECORD = re.compile(rb'\}\s*,\s*\{\s*"[^"\\]{1,100}"\s*:')
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


class Skipped(msgspec.Struct, gc=False):
    """A record of a list that is not read."""


class EndOfText(Exception):
    """The text ends inside a value."""


class SectionReader:
    """Yields (path, decoded records) for every value; afterwards see `complete` and `num_bad`.

    `entered`: paths of the objects, and lists of objects, that are entered ("" is the document). `types`: the struct of
    the records of a list, or of a single value; other values are skipped. A path joins keys with "/".
    """

    def __init__(
        self, stream: ByteStream, limits: ReadLimits, *, entered: frozenset[str], types: Mapping[str, type[Any]]
    ) -> None:
        self._stream = stream
        self._limits = limits
        self._entered = entered
        self._types = types
        self._text = b""
        self._at = 0
        self._dropped = 0
        """Number of bytes before `_text`."""
        self._at_end = False
        self._json = json.JSONDecoder(strict=False)
        self.complete = False
        self.num_bad = 0
        """Number of values that could not be decoded and are left out."""

    def __iter__(self) -> Iterator[tuple[str, list[Any]]]:
        try:
            yield from self._walk("")
        except EndOfText:
            return
        self.complete = not self._stream.is_truncated

    def _walk(self, path: str) -> Iterator[tuple[str, list[Any]]]:
        opening = self._peek()
        if path in self._entered and opening in (b"{", b"["):
            self._at += 1
            yield from self._enter_object(path) if opening == b"{" else self._enter_list(path)
        elif opening == b"[" and (path in self._types or self._begins_with_record()):
            self._at += 1
            yield from self._records(path)
        else:
            value = self._decode(self._next_value(), path)
            if value is not None and path in self._types:
                yield path, [value]

    def _enter_object(self, path: str) -> Iterator[tuple[str, list[Any]]]:
        while (found := self._peek()) != b"}":
            if found == b",":
                self._at += 1
                continue
            key = self._parse(self._next_value())
            if not isinstance(key, str) or self._peek() != b":":
                raise TraceError(Reason.UNREADABLE, "not valid JSON")
            self._at += 1
            if self._peek() not in b",}":  # else the value is missing
                yield from self._walk(f"{path}/{key}" if path else key)
        self._at += 1

    def _enter_list(self, path: str) -> Iterator[tuple[str, list[Any]]]:
        while (found := self._peek()) != b"]":
            if found == b",":
                self._at += 1
            elif found != b"{":
                self._next_value()
            else:
                self._at += 1
                yield path, []
                yield from self._enter_object(path)
        self._at += 1

    def _records(self, path: str) -> Iterator[tuple[str, list[Any]]]:
        """Yield the records of the list whose bracket was read, in batches."""
        wanted = self._types.get(path, Skipped)
        decoder: Any = msgspec.json.Decoder(list[wanted])  # type: ignore[valid-type]
        separator, slow_until = b"", -1
        while (found := self._peek()) != b"]":
            if found == b",":
                self._at += 1
                continue
            if len(self._text) - self._at < BLOCK_BYTES // 2:
                self._fill()
            is_fast = bool(separator) and self._dropped + self._at > slow_until
            cut = self._text.rfind(separator, self._at) if is_fast else -1
            batch = self._decode_piece(decoder, cut) if cut > self._at else None
            if batch is None:
                slow_until = max(slow_until, self._dropped + cut)
                record = self._decode(self._next_value(), path)
                batch = [] if record is None else [record]
                if not separator:
                    separator = self._find_separator()
            if batch and wanted is not Skipped:
                yield path, batch
        self._at += 1

    def _decode_piece(self, decoder: Any, cut: int) -> list[Any] | None:
        """Return the records up to the closing brace at `cut`; None if they do not decode (the list ends before)."""
        try:
            batch: list[Any] = decoder.decode(b"[" + self._text[self._at : cut + 1] + b"]")
        except _DECODE_ERRORS:
            return None
        self._at = cut + 1
        return batch

    def _find_separator(self) -> bytes:
        found = _NEXT_RECORD.match(self._text, self._at - 1)
        return found[0] if found else b""

    def _decode(self, text: bytes, path: str) -> Any:
        """Return the value as the struct of its path; None, counted as bad, if it does not fit."""
        wanted = self._types.get(path)
        if wanted is None:
            return None
        try:
            return msgspec.json.decode(text, type=wanted)
        except _DECODE_ERRORS:
            self.num_bad += 1
            if self.num_bad > self._limits.bad_events:
                raise EndOfText from None
            return None

    def _parse(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None

    def _next_value(self) -> bytes:
        """Return the text of the value at this position, and move behind it."""
        window = _FIRST_WINDOW
        while True:
            text = self._text[self._at : self._at + window].decode("latin-1")  # one character per byte
            is_whole = self._at + window >= len(self._text)
            try:
                _, length = self._json.raw_decode(text)
                if length < len(text):  # else the number may continue
                    break
            except RecursionError:
                raise TraceError(Reason.UNREADABLE, "JSON nested too deeply") from None
            except json.JSONDecodeError as error:
                is_cut = error.pos > len(text) - _NEAR_END or error.msg.startswith("Unterminated")
                value, length, closed = repair_text(text) if text.startswith("{") and not is_cut else ({}, 0, False)
                if closed:
                    self._at += length
                    return json.dumps(value, ensure_ascii=False).encode("latin-1")
            except ValueError:
                pass
            if is_whole and not self._fill():
                raise EndOfText
            window *= 4
        start = self._at
        self._at += length
        return self._text[start : self._at]

    def _begins_with_record(self) -> bool:
        while True:
            found = _SPACE.match(self._text, self._at + 1)
            position = found.end() if found else self._at + 1
            if position < len(self._text):
                return self._text[position : position + 1] == b"{"
            if not self._fill():
                raise EndOfText

    def _peek(self) -> bytes:
        """Return the next byte that is not white space."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at : self._at + 1]
            if not self._fill():
                raise EndOfText

    def _fill(self) -> bool:
        """Drop what was read, and append one more block, at least as large as the rest; False at the end."""
        if self._at_end:
            return False
        rest = self._text[self._at :]
        if len(rest) > self._limits.event_bytes:
            raise TraceError(Reason.TOO_LARGE, f"one value takes more than {self._limits.event_bytes >> 20} MiB")
        block = bytearray(max(BLOCK_BYTES, len(rest)))
        count = self._stream.readinto(memoryview(block))
        self._dropped += self._at
        self._text, self._at, self._at_end = rest + bytes(block[:count]), 0, count == 0
        return count > 0
