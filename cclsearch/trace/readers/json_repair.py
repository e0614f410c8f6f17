"""Reads a JSON object in which single values are broken: such a value is lost, and all others are kept.

Profilers print text without escaping it, numbers such as `-nan`, and nothing at all for an empty text (kineto#1213,
pytorch#113001, pytorch#98432, pytorch#33961).
"""

from __future__ import annotations

import re
from json import JSONDecodeError, JSONDecoder
from typing import Any

MAX_DEPTH = 60
MAX_CHARS = 1 << 20
# Every text of an object may be searched for its end, so that the limit keeps the time linear.
MAX_TEXT_CHARS = 1 << 12
"""Characters of a text that is not escaped."""

_KEY_TEXT = r"""(?:"(?P<key>[^"\\]{1,100})"|"?(?P<bare>[A-Za-z_][\w .]{0,99})"?)\s*:"""
_ANY_KEY = re.sub(r"\?P<\w+>", "?:", _KEY_TEXT)
_KEY = re.compile(_KEY_TEXT)
_BETWEEN = re.compile(r"[\s,]*")
_SPACE = re.compile(r"\s*")
_AFTER_MEMBER = re.compile(rf"\s*(,\s*({_ANY_KEY}|[,}}]|$)|\}}|{_ANY_KEY}|$)")
_AFTER_ITEM = re.compile(r"\s*[,\]]")
_NEXT_MEMBER = re.compile(rf",\s*(?={_ANY_KEY})|(?=\}})")
_BARE = re.compile(r'[^,{}\[\]"\n]*')
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$")
_HEX = re.compile(r"[+-]?0[xX][\da-fA-F]{1,16}$")
_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[\da-fA-F]{4})')
_STRINGS = JSONDecoder(strict=False)
_WORDS = {"true": True, "false": False, "null": None}
_LOST: Any = object()


class Broken(ValueError):
    """The text is not an object, or is nested too deeply."""


def repair_object(text: str, start: int = 0) -> tuple[dict[str, Any], int, bool]:
    """Return the object that begins at `start`, its end, and whether it is closed there; raises Broken.

    A broken value is None in the object itself, and absent in objects inside it.
    """
    if text[start : start + 1] != "{" or len(text) - start > MAX_CHARS:
        raise Broken("not an object, or a large one")
    found, end = _read_object(text, start + 1, 0)
    return {key: None if value is _LOST else value for key, value in found.items()}, end, end <= len(text)


def _read_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    """Return the members and the position behind the closing brace, which is beyond the text without one."""
    found: dict[str, Any] = {}
    while True:
        at = _skip(_BETWEEN, text, at)
        if at >= len(text) or text[at] == "}":
            return found, at + 1
        key = _KEY.match(text, at)
        if key is None:
            at = _skip_member(text, at + 1)
            continue
        value, at = _read_value(text, _skip(_SPACE, text, key.end()), _AFTER_MEMBER, depth + 1)
        if at < len(text) and not _AFTER_MEMBER.match(text, at):
            value, at = _LOST, _skip_member(text, at)  # such as `1,234.5`: not the number that it begins with
        name = key["key"] or key["bare"]
        found[name] = value
        if value is _LOST and depth:
            del found[name]


def _read_value(text: str, at: int, after: re.Pattern[str], depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise Broken("nested too deeply")
    opening = text[at : at + 1]
    if opening == "{":
        return _read_object(text, at + 1, depth)
    if opening == "[":
        return _read_list(text, at + 1, depth)
    if opening == '"':
        return _read_string(text, at + 1, after)
    bare = _BARE.match(text, at)
    word = bare[0].strip() if bare else ""
    end = at + len(bare[0]) if bare else at
    if word in _WORDS:
        return _WORDS[word], end
    if _NUMBER.match(word):
        return (float(word) if set(word) & set(".eE") or len(word) > 40 else int(word)), end
    return (int(word, 16) if _HEX.match(word) else _LOST), end


def _read_list(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Read the items up to the closing bracket; an item that is broken is None, so that the others keep their place."""
    items: list[Any] = []
    is_empty = True
    while True:
        at = _skip(_SPACE, text, at)
        if at >= len(text) or text[at] in "]}":
            closed = text[at : at + 1] == "]"
            return (items if closed else _LOST), at + closed
        if text[at] == ",":
            items += [None] * is_empty
            at, is_empty = at + 1, True
            continue
        value, at = _read_value(text, at, _AFTER_ITEM, depth + 1)
        items.append(None if value is _LOST else value)
        is_empty = False
        if at < len(text) and not _AFTER_ITEM.match(text, at):
            return _LOST, at


def _read_string(text: str, at: int, after: re.Pattern[str]) -> tuple[Any, int]:
    """Read a text from behind its opening quote; one that is not escaped ends at a quote that a member can follow."""
    try:
        value, end = _STRINGS.raw_decode(text, at - 1)
        if after.match(text, end):
            return value, end
    except JSONDecodeError:
        pass
    end = at
    while (end := text.find('"', end, at + MAX_TEXT_CHARS) + 1) > 0:
        if after.match(text, end):
            raw = _ESCAPE.sub(r"\\\\", text[at : end - 1]).replace('\\"', '"').replace('"', '\\"')
            try:
                return _STRINGS.decode(f'"{raw}"'), end
            except JSONDecodeError:
                return text[at : end - 1], end
    return _LOST, at


def _skip_member(text: str, at: int) -> int:
    found = _NEXT_MEMBER.search(text, at)
    return found.end() if found else len(text)


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
