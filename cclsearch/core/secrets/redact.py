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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus, unquote

import yaml

from cclsearch.core.secrets.names import (
    NOT_SECRET_NAME,
    SECRET_NAME,
    declare_secret,
    is_code,
    is_plain_value,
    is_plain_word,
    is_secret_field,
    is_secret_name,
    is_secret_value,
    is_word_of_text,
)
from cclsearch.core.secrets.private_keys import KeyMasker

# The pass has a fixed cost: below this, one search per string is faster.
_SHORT = 4096
"""Length of a text in bytes below which each string is searched on its own."""
# The low five bits are the same for both cases of a letter.
_BITS = 31
"""Bits of a byte that the pass compares."""


class Trigrams:
    """The trigrams of a text, folded to 5 bits a byte: the same for its spelling in lower case."""

    def __init__(self, text: bytes) -> None:
        self._seen = _see_trigrams(text) if len(text) >= _SHORT else None

    def find_contained(self, strings: Iterable[bytes], text: bytes) -> list[bytes]:
        """Return the strings that occur in the text, in their order; one without their trigrams is skipped."""
        seen = self._seen
        if seen is not None:
            strings = [string for string in strings if all(seen[code] for code in _codes(string))]
        return [string for string in strings if string in text]


def _see_trigrams(text: bytes) -> bytes:
    """Return whether each trigram occurs in the text, by its code of 15 bits."""
    import numpy as np

    folded: Any = (np.frombuffer(text, np.uint8) & _BITS).astype(np.uint16)
    seen = np.zeros(1 << 15, np.uint8)
    seen[(folded[:-2] << 10) | (folded[1:-1] << 5) | folded[2:]] = 1
    return seen.tobytes()


@functools.lru_cache(maxsize=4096)
def _codes(string: bytes) -> tuple[int, ...]:
    """Return the codes of a string's first trigrams; none if it is shorter than three bytes."""
    folded = [byte & _BITS for byte in string[:12]]
    return tuple(a << 10 | b << 5 | c for a, b, c in zip(folded, folded[1:], folded[2:], strict=False))


__all__ = ["NOT_SECRET_NAME", "SECRET_NAME", "declare_secret", "is_secret_name"]

MASK = "[secret]"
_MASK = MASK.encode()
_FORMATS_FILE = Path(__file__).with_name("secret_formats.yaml")
_STARTS = (
    rb"(?<![A-Za-z0-9]%s)",
    rb"(?<=\\[nrtb]%s)",
    rb"(?<=%%[0-9A-Fa-f]{2}%s)",
    rb"(?<=\[\dm%s)",
    rb"(?<=\[\d\dm%s)",
)
"""Text that may precede a secret: no letter of a word, but `\\n`, `%3D` or a colour."""
_REST_OF_WORD = re.compile(rb"[\w.\-]*+")

_NAME_CHARS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
_MAX_NAME, _JUDGED = 80, 256
_COLOUR = rb"(?:(?:\x1b|\\{1,2}(?:u001b|x1b|033))\[[\d;]{0,9}m)?"
_SIGN = (
    *(rb"[\w.\-]{0,80}+(", _COLOUR, rb"\\{0,3}[\"']?)"),
    *(rb"(\s{0,8}+(?:=>|:=|={1,3}+|:)", _COLOUR, rb"\s{0,8}+|\s{1,4}+)(\\{0,3}[\"'])?+(?![\d.]{1,20}+(?:[\s,;%}]|$))"),
)
"""The end of a name, the sign after it, and the quote before the value; only an option has its value after a space."""
_FIELDS = tuple(
    (word, re.compile(b"".join((word, *_SIGN))))
    for word in b"token secret pass pwd key credential auth jwt webhook bearer cookie".split()
    + b"dsn conn pat sas _ur signature".split()
)
"""Words of names of secrets, in lower case, each with the expression for the field around it."""
_END_OF_COLOUR = re.compile(rb"^\d{1,3}m")
_VALUE = rb"[^\s\"'\\,;&<>{}()\[\]]"
_BRACKETED = rb"[(){}\[\]]{0,8}" + _VALUE
"""A character of a value without quotes, after brackets if they are inside the value."""
_STRUCTURE = rb"(?![,:}\])])"
"""After a quote: it was the end of a JSON string, not the beginning of a value."""
_VALUES = {
    quote: (re.compile(start + char + rb"{4,%d}+" % _JUDGED), re.compile(char + rb"*+"))
    for quote, start, char in (
        (b"", b"(?=" + _VALUE + b")", b"(?:" + _BRACKETED + b")"),
        (b'"', _STRUCTURE, rb"[^\"\\\r\n]"),
        (b"'", _STRUCTURE, rb"(?:[^'\"\\\r\n]|\"(?![\s,:}\]]))"),
    )
}
"""Quote -> pattern of a value's beginning, by which it is judged, and of its rest."""
_TEMPLATE = (b"<", b"[", b"{", b"$", b"%(")
"""A value that begins with one of these is a placeholder (`$NAME`, `{name}`) or was masked before."""

_PASSWORD = re.compile(r"://[^/\s:@]{0,200}+:([^/\s]{1,300})@")
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
    (b"sig=", re.compile(rb"sig=(?<=[?&;]sig=)([a-z0-9%+/=_\-]{8,}+)")),
    (b"x-amz-", re.compile(rb"x-amz-(?:signature|credential|security-token)=([^\s&\"'\\]{8,}+)")),
    (b"key=", re.compile(rb"key=(?<=[?&]key=)([a-z0-9%+/=_.\-]{8,}+)")),
    (b"://", re.compile(rb"://[^/\s:@\"'\\]{0,200}+:([^/\s\"'\\]{1,300})@")),
    (b"://", _USERINFO),
    (b"-u", re.compile(rb"-u(?<!\S-u)\s{0,4}[\"']?([^\s:\"'/]{1,100}+):([^\s\"'/:\\]{4,200}+)")),
    (b"--user", re.compile(rb"--user(?<!\S--user)[\s=]{1,4}[\"']?([^\s:\"'/]{1,100}+):([^\s\"'/:\\]{4,200}+)")),
)
"""Lower-case words with the pattern that follows each; the last group is the secret."""
_WORDS = tuple(dict.fromkeys(word for word, _ in (*_SCHEMES, *_FIELDS)))


class _Format(NamedTuple):
    find: bytes
    pattern: re.Pattern[bytes]
    """The last group is the secret."""
    is_word: bool
    """Whether the secret is the beginning of a word."""


class Masker:
    """Masks the secrets of a text that comes in pieces; whole lines, unless a line is too long."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._values = _spellings(tuple(secret_values(environment)))
        self._mask_keys = KeyMasker(_MASK)

    def mask(self, text: bytes) -> bytes:
        """Return the next piece of the text with every known secret, and everything that looks like one, masked."""
        trigrams, given = Trigrams(text), text
        for value in trigrams.find_contained(self._values, text):
            text = text.replace(value, _MASK)
        text = self._mask_keys(text)
        if text is not given:
            trigrams = Trigrams(text)
        spans = sorted([*_find_formats(text, trigrams), *_find_schemes_and_fields(text, trigrams)])
        return _cover(text, spans) if spans else text


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment's secrets, longest first; short values and plain words are left out."""
    source = os.environ if environment is None else environment
    values = {value.strip() for name, value in source.items() if is_secret_name(name)}
    passwords = [found for value in source.values() if "://" in value for found in _PASSWORD.findall(value)]
    values |= {*passwords, *map(unquote, passwords)}  # of addresses such as `HTTPS_PROXY`'s, as written and unquoted
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
def _formats() -> tuple[_Format, ...]:
    """The rules of `secret_formats.yaml`; loaded when first needed."""
    return tuple(_read_format(rule) for rule in yaml.safe_load(_FORMATS_FILE.read_text("utf-8")))


def _read_format(rule: dict[str, str]) -> _Format:
    secret = rule["secret"].encode()
    if "find" in rule:
        pattern = rule.get("keep", "").encode() + b"(" + secret + b")"
        return _Format(find=rule["find"].encode(), pattern=re.compile(pattern), is_word=False)
    begin = re.match(rb"(?:[\w\-]|\\\.)+", secret)
    assert begin, f"{rule}: the secret begins with no literal text"
    # The literal text is first, so that `re` searches for it; what must be before it is checked after it.
    start = b"|".join(start % begin.group() for start in _STARTS)
    pattern = begin.group() + b"(?:" + start + b")" + secret[begin.end() :]
    return _Format(find=begin.group().replace(b"\\", b""), pattern=re.compile(b"(" + pattern + b")"), is_word=True)


# The shortest bound of an expression: a match that fills it may have been cut.
_LONG = 100
"""Length in bytes from which a match may be the beginning of a longer secret."""


def _find_formats(text: bytes, trigrams: Trigrams) -> Iterator[tuple[int, int]]:
    contained = trigrams.find_contained([format.find for format in _formats()], text)
    for format in _formats():
        if format.find in contained:
            yield from (_span(text, match, format) for match in format.pattern.finditer(text))


def _span(text: bytes, match: re.Match[bytes], format: _Format) -> tuple[int, int]:
    start, end = match.span(1)
    if format.is_word and end - start >= _LONG:  # the expressions are bounded, the secret may go on
        rest = _REST_OF_WORD.match(text, end)
        end = rest.end() if rest else end
    return start, end


def _find_schemes_and_fields(text: bytes, trigrams: Trigrams) -> Iterator[tuple[int, int]]:
    lower = text.lower()
    contained = trigrams.find_contained(_WORDS, lower)
    for word, pattern in _SCHEMES:
        if word in contained:
            found = pattern.finditer(lower)
            yield from (match.span(match.re.groups) for match in found if _is_secret_of_scheme(match, text))
    for word, pattern in _FIELDS:
        if word in contained:
            yield from filter(None, (_find_value(text, match) for match in pattern.finditer(lower)))


def _is_secret_of_scheme(match: re.Match[bytes], text: bytes) -> bool:
    """Whether the last group is a secret: not a mask, number or word, and no name that is both user and password."""
    secret = match.group(match.re.groups)
    if secret.startswith(_TEMPLATE) or (match.re.groups == 2 and match.group(1) == secret):
        return False
    if match.group().startswith((b"bearer", b"x-api-key", b"authorization")):
        start, end = match.span(match.re.groups)
        is_alone = match.group().startswith(b"bearer")  # `bearer credential`: no header, but a sentence
        return not is_word_of_text(text[start:end].decode("latin-1"), is_sentence=is_alone)
    if match.group().startswith((b"-u", b"--user")):
        return not is_plain_value(secret.decode("latin-1"))
    return match.re.pattern != _USERINFO.pattern or any(48 <= c <= 57 for c in secret)


def _find_value(text: bytes, field: re.Match[bytes]) -> tuple[int, int] | None:
    """Return where the secret of a field with a word of `_FIELDS` in its name is; None if it has none."""
    at, sign, mark = field.start(), field.group(2), field.group(3) or b""
    head = text[max(0, at - _MAX_NAME) : at]
    is_option = sign.isspace()
    if is_option and b"--" not in head:
        return None
    whole = head[len(head.rstrip(_NAME_CHARS)) :]
    before = head[: len(head) - len(whole)]
    if before.endswith(b"\\"):
        whole = whole[1:]  # the n of `\\n` in JSON
    elif before.endswith((b"[", b";")):
        whole = _END_OF_COLOUR.sub(b"", whole)
    if is_option and not whole.startswith(b"--"):
        return None
    name = (whole.lstrip(b".-") + text[at : field.start(1)]).decode()
    if not is_secret_field(name):
        return None
    first, rest = _VALUES[mark if len(mark) == 1 else b""]
    value = first.match(text, field.end())
    if value is None or value.group().startswith(_TEMPLATE):
        return None
    is_bare = not mark and b"=" not in sign and sign[-1:].isspace()
    is_setting = not mark and name.isupper() and not any(space in sign for space in b" \t")  # `NAME=value`, no code
    if not is_secret_value(name, value.group().decode("latin-1"), is_bare=is_bare, is_setting=is_setting):
        return None
    if not mark and not is_setting and is_code(name, text[value.start() : value.start() + _JUDGED].decode("latin-1")):
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
