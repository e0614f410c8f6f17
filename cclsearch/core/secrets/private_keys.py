"""Private keys in a stream of text: on one line, over many, behind a prefix on every line, or cut off."""

from __future__ import annotations

import re

_BEGIN = re.compile(
    rb"-----?[ ]?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?[ ]?-----?|PuTTY-User-Key-File-\d: |Private-Lines: \d"
)
_END = re.compile(rb"-----?[ ]?END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?[ ]?-----?|Private-MAC: [0-9a-f]{0,80}")
_LONG = re.compile(rb"(?<!\\)(?![0-9]{24,200}+(?![A-Za-z+/]))[A-Za-z0-9+/]{24,}+={0,2}")
"""A piece of a key, which follows `\\n` in JSON; not a number."""
_LAST = re.compile(rb"(?<![^\s>|\"'\]:])[A-Za-z0-9+/]{1,100}+={0,2}(?=[\"',\\]{0,4}\s*$)")
"""The last word of a line, if it may be a piece of a key."""
_QUOTE = re.compile(rb"[\"']")
_WORDS = rb"PRIVATE KEY", rb"PuTTY-User-Key-File", rb"Private-"
_MAX_LINES = 2000
# Ranks of one job write into the same log, so that their lines mix.
_LINES_BETWEEN = 16
"""Largest number of other ranks' lines between two lines of a key."""


class KeyMasker:
    """Masks private keys in consecutive pieces of a text; a key may go on in the next piece."""

    def __init__(self, mask: bytes) -> None:
        self._mask = mask
        self._left = self._between = 0
        """Lines that the key may still have; lines without a part of it that may still come."""
        self._has_part = False

    def __call__(self, text: bytes) -> bytes:
        """Return the text, whole lines, without the parts of private keys."""
        if not self._left and not any(word in text for word in _WORDS):
            return text
        lines = text.splitlines(keepends=True)
        self._mask_headless(lines)
        return b"".join(self._mask_line(line) for line in lines)

    def _mask_headless(self, lines: list[bytes]) -> None:
        """Mask the lines before an END whose BEGIN was cut off, as in the tail of a log."""
        if self._left:
            return
        for number, line in enumerate(lines):
            if _BEGIN.search(line):
                return
            if _END.search(line):
                self._mask_backwards(lines, number)
                return

    def _mask_backwards(self, lines: list[bytes], end: int) -> None:
        between = _LINES_BETWEEN
        for number in range(end - 1, -1, -1):
            masked, has_part = self._mask_part(lines[number])
            between = _LINES_BETWEEN if has_part else between - 1
            if not between:
                return
            lines[number] = masked

    def _mask_line(self, line: bytes) -> bytes:
        begin = _BEGIN.search(line)
        if begin:
            return self._begin(line, begin)
        if not self._left:
            return _END.sub(self._mask, line)
        self._left -= 1
        end = _END.search(line)
        if end:
            self._left = 0
            return self._mask_part(line[: end.start()])[0] + self._mask + line[end.end() :]
        masked, has_part = self._mask_part(line, is_short_part=self._has_part)
        self._has_part |= has_part
        self._between = _LINES_BETWEEN if has_part else self._between - 1
        self._left *= self._between > 0
        return masked

    def _begin(self, line: bytes, begin: re.Match[bytes] | None) -> bytes:
        """Mask every key of a line, from its BEGIN to its END or, without one, to the next quote or the line's end."""
        parts: list[bytes] = []
        done, found = 0, begin
        while found:
            parts.append(line[done : found.start()])
            end = _END.search(line, found.end())
            stop = end.start() if end else len(line.rstrip(b"\r\n"))
            parts.append(self._mask_body(line[found.end() : stop]))
            done = end.end() if end else stop
            if not end:
                self._left, self._between, self._has_part = _MAX_LINES, _LINES_BETWEEN, False
                break
            self._left = 0
            found = _BEGIN.search(line, done)
        return b"".join([*parts, line[done:]])

    def _mask_body(self, body: bytes) -> bytes:
        """Mask what is between BEGIN and END on one line; if it has quotes, such as a list of lines, only the parts."""
        quote = _QUOTE.search(body)
        return self._mask if quote is None else self._mask + _LONG.sub(self._mask, body[quote.start() :])

    def _mask_part(self, line: bytes, *, is_short_part: bool = True) -> tuple[bytes, bool]:
        """Mask the parts of a key in a line, and whether it has one; a short one comes after longer ones."""
        masked, count = _LONG.subn(self._mask, line)
        last = _LAST.search(masked) if is_short_part else None
        if last and (last.group().endswith(b"=") or _is_alone(masked, last)):
            return masked[: last.start()] + self._mask + masked[last.end() :], True
        return masked, count > 0


def _is_alone(line: bytes, word: re.Match[bytes]) -> bool:
    """Whether nothing but a prefix is before the word, such as `[rank0]: `."""
    before = line[: word.start()].strip()
    return not before or before.endswith((b"]:", b"]", b"|", b">", b'"', b"'"))
