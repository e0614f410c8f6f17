"""Mask secrets in logs, prompts, job environments, evidence packages and error messages.

All of it is linear: a text is searched for literal words, and what is around each of them is matched by expressions of
bounded length. Texts are bytes inside, so that lower case keeps its length.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, quote_plus

import yaml

from cclsearch.core.private_keys import KeyMasker
from cclsearch.core.secret_names import (
    NOT_SECRET_NAME,
    SECRET_NAME,
    declare_secret,
    is_plain_value,
    is_plain_word,
    is_secret_field,
    is_secret_name,
    is_secret_value,
)

__all__ = ["NOT_SECRET_NAME", "SECRET_NAME", "declare_secret", "is_secret_name"]

MASK = "[secret]"
_MASK = MASK.encode()
_FORMATS_FILE = Path(__file__).with_name("secret_formats.yaml")
_START = rb"(?:(?<![A-Za-z0-9])|(?<=\\[nrtb])|(?<=%[0-9A-Fa-f]{2})|(?<=\[\dm)|(?<=\[\d\dm))"
"""Where a secret may begin: not within a word, but after `\\n`, `%3D` or a colour."""

_NAME_CHARS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
_MAX_NAME, _JUDGED = 80, 256
_SIGN = (
    rb"[\w.\-]{0,80}+((?:\x1b\[[\d;]{0,9}m)?\\{0,3}[\"']?)(\s{0,8}+(?:=>|:=|[=:])\s{0,8}+|\s{1,4}+)(\\{0,3}[\"'])?+"
    rb"(?![\d.]{1,20}+(?:[\s,;%}]|$))"
)
"""The end of a name, the sign after it, and the quote before the value; only an option has its value after a space."""
_FIELDS = tuple(
    (word, re.compile(word + _SIGN))
    for word in (
        *(
            b"token",
            b"secret",
            b"pass",
            b"pwd",
            b"key",
            b"credential",
            b"auth",
            b"jwt",
            b"webhook",
            b"bearer",
            b"cookie",
        ),
        *(b"dsn", b"conn", b"pat", b"sas", b"_ur", b"signature"),
    )
)
"""Words of names of secrets, in lower case, each with the expression for the field around it."""
_VALUE = rb"[^\s\"'\\,;&<>{}()\[\]]"
_VALUES = {
    quote: (re.compile(char + rb"{4,%d}+" % _JUDGED), re.compile(char + rb"*+"))
    for quote, char in ((b"", _VALUE), (b'"', rb"[^\"\\\r\n]"), (b"'", rb"[^'\\\r\n]"))
}
"""Quote -> the beginning of a value, by which it is judged, and the rest of it."""
_TEMPLATE = (b"<", b"[", b"{", b"$", b"%(")
"""A value that begins with one of these is a placeholder (`$NAME`, `{name}`) or was masked before."""

_USERINFO = re.compile(rb"://([a-z0-9_\-]{16,300}+)@")
_SCHEMES = (
    (b"bearer", re.compile(rb"bearer\s{1,8}([A-Za-z0-9._\-+/=~]{8,}+)")),
    (b"x-api-key", re.compile(rb"x-api-key\\{0,3}[\"']?\s{0,8}[:=]\s{0,8}\\{0,3}[\"']?([a-z0-9._\-+/=~]{8,}+)")),
    (
        b"authorization",
        re.compile(
            rb"authorization\\{0,3}[\"']?\s{0,8}[:=]\s{0,8}\\{0,3}[\"']?"
            rb"(?:(?:basic|bearer|digest|negotiate|token|apikey)\s{1,8})?([a-z0-9._\-+/=~]{8,}+)"
        ),
    ),
    (b"cookie:", re.compile(rb"cookie:\s{0,8}([^\r\n\"'\\]{4,4096}+)")),
    (b"sig=", re.compile(rb"(?<=[?&;])sig=([a-z0-9%+/=_\-]{8,}+)")),
    (b"x-amz-", re.compile(rb"x-amz-(?:signature|credential|security-token)=([^\s&\"'\\]{8,}+)")),
    (b"://", re.compile(rb"://[^/\s:@\"'\\]{0,200}+:([^/\s@\"'\\]{1,500}+)@")),
    (b"://", _USERINFO),
    (b"-u", re.compile(rb"(?<!\S)-u\s{0,4}[\"']?([^\s:\"'/]{1,100}+):([^\s\"'/:\\]{4,200}+)")),
    (b"--user", re.compile(rb"(?<!\S)--user[\s=]{1,4}[\"']?([^\s:\"'/]{1,100}+):([^\s\"'/:\\]{4,200}+)")),
)
"""Words in lower case with what follows them there; the last group is the secret."""


_WORD = b"a" * 16
_TO_WORDS = bytes(
    97 if chr(code).isascii() and (chr(code).isalnum() or chr(code) in "_-.") else 32 for code in range(256)
)
"""Translates a text so that a word of at least 16 characters contains `_WORD`."""


class _Formats(NamedTuple):
    words: re.Pattern[bytes]
    found: tuple[tuple[bytes, re.Pattern[bytes]], ...]


class Masker:
    """Masks the secrets of a text that comes in pieces: whole lines, as far as lines are not too long."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._values = _spellings(tuple(secret_values(environment)))
        self._mask_keys = KeyMasker(_MASK)

    def mask(self, text: bytes) -> bytes:
        """Return the next piece of the text with every known secret, and everything that looks like one, masked."""
        for value in self._values:
            if value in text:
                text = text.replace(value, _MASK)
        text = self._mask_keys(text)
        spans = sorted([*_find_formats(text), *_find_schemes_and_fields(text)])
        return _cover(text, spans) if spans else text


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment's secrets, longest first; short values and plain words are left out."""
    source = os.environ if environment is None else environment
    values = {value.strip() for name, value in source.items() if is_secret_name(name)}
    kept = (value for value in values if len(value) >= 6 and not is_plain_word(value))
    return sorted(kept, key=len, reverse=True)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with every known secret, and everything that looks like one, masked."""
    data = text.encode("utf-8", "surrogatepass")
    masked = Masker(environment).mask(data)
    return text if masked == data else masked.decode("utf-8", "surrogatepass")


def public_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without its secrets, for jobs and tools to inherit."""
    source = os.environ if environment is None else environment
    return {name: value for name, value in source.items() if not is_secret_name(name)}


@functools.lru_cache(maxsize=8)
def _spellings(values: tuple[str, ...]) -> tuple[bytes, ...]:
    """Every spelling of these values, longest first: as they are, by line, and as URLs, JSON and base64 write them."""
    found: set[bytes] = set()
    for value in values:
        data = value.encode("utf-8", "surrogateescape")
        found |= {data, *(line.strip() for line in data.splitlines() if len(line.strip()) >= 12)}
        found |= {json.dumps(value)[1:-1].encode(), repr(value)[1:-1].encode("utf-8", "surrogateescape")}
        found |= {quote(data, safe=safe).encode() for safe in ("", "/")} | {quote_plus(data).encode()}
        if len(data) >= 8:
            found |= {part for shift in range(3) for part in _base64_of(data, shift)}
    return tuple(sorted(found, key=len, reverse=True))


def _base64_of(data: bytes, shift: int) -> Iterator[bytes]:
    """The characters of base64 that depend on this data alone, if it begins `shift` bytes into a group of three."""
    whole = b"\0" * shift + data
    first = 4 if shift else 0
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        encoded = encode(whole[: len(whole) // 3 * 3])
        if len(encoded) - first >= 8:
            yield encoded[first:]


@functools.cache
def _formats() -> _Formats:
    """The rules of `secret_formats.yaml`; loaded when first needed."""
    rules: list[dict[str, str]] = yaml.safe_load(_FORMATS_FILE.read_text("utf-8"))
    words = "|".join(rule["secret"] for rule in rules if "find" not in rule)
    found = (
        (rule["find"].encode(), re.compile(f"{rule.get('keep', '')}({rule['secret']})".encode()))
        for rule in rules
        if "find" in rule
    )
    return _Formats(re.compile(_START + b"(?:" + words.encode() + b")"), tuple(found))


_LONG = 100
"""Length in bytes from which a match may be the beginning of a longer secret: the shortest bound of an expression."""


def _find_formats(text: bytes) -> Iterator[tuple[int, int]]:
    formats = _formats()
    for find, pattern in formats.found:
        if find in text:
            yield from (match.span(1) for match in pattern.finditer(text))
    words = text.translate(_TO_WORDS)
    at = words.find(_WORD)
    while at >= 0:
        start, end = words.rfind(b" ", 0, at) + 1, words.find(b" ", at)
        end = len(text) if end < 0 else end
        for match in formats.words.finditer(text, start, end):
            if match.end() - match.start() >= _LONG:  # the expressions are bounded, the secret may go on
                yield match.start(), end
                break
            yield match.span()
        at = words.find(_WORD, end)


def _find_schemes_and_fields(text: bytes) -> Iterator[tuple[int, int]]:
    lower = text.lower()
    for word, pattern in _SCHEMES:
        if word in lower:
            yield from (match.span(match.re.groups) for match in pattern.finditer(lower) if _is_secret_of_scheme(match))
    for word, pattern in _FIELDS:
        if word in lower:
            yield from filter(None, (_find_value(text, match) for match in pattern.finditer(lower)))


def _is_secret_of_scheme(match: re.Match[bytes]) -> bool:
    """Whether the last group is a secret: not a mask, not a number, and no name as both user and password."""
    secret = match.group(match.re.groups)
    if secret.startswith(_TEMPLATE) or (match.re.groups == 2 and match.group(1) == secret):
        return False
    if match.group().startswith((b"-u", b"--user")):
        return not is_plain_value(secret.decode("latin-1"))
    return match.re.pattern != _USERINFO.pattern or any(48 <= c <= 57 for c in secret)


def _find_value(text: bytes, field: re.Match[bytes]) -> tuple[int, int] | None:
    """Return where the secret is that the field has, whose name contains a word of `_FIELDS`; None if it has none."""
    at, sign, mark = field.start(), field.group(2), field.group(3) or b""
    head = text[max(0, at - _MAX_NAME) : at]
    whole = head[len(head.rstrip(_NAME_CHARS)) :]
    if sign.isspace() and not whole.startswith(b"--"):
        return None
    name = (whole.lstrip(b".-") + text[at : field.start(1)]).decode()
    first, rest = _VALUES[mark if len(mark) == 1 else b""]
    value = first.match(text, field.end())
    if value is None or value.group().startswith(_TEMPLATE) or not is_secret_field(name):
        return None
    is_bare = not mark and b"=" not in sign and sign[-1:].isspace()
    if not is_secret_value(name, value.group().decode("latin-1"), is_bare=is_bare):
        return None
    end = rest.match(text, value.end())
    return value.start(), end.end() if end else value.end()


def _cover(text: bytes, spans: list[tuple[int, int]]) -> bytes:
    """The text with these spans, in order, replaced by the mask; overlapping ones by one mask."""
    parts: list[bytes] = []
    done = 0
    for start, end in spans:
        if start >= done:
            parts += [text[done:start], _MASK]
        done = max(done, end)
    return b"".join([*parts, text[done:]])
