"""Texts that match a regular expression, chosen at random: an example of every format of a secret."""

from __future__ import annotations

import re._constants as codes
import re._parser as parser
from random import Random
from typing import Any

_EXTRA = 24
"""Repetitions of a repeated part at most, unless it needs more."""


def make_example(pattern: str, random: Random) -> str:
    """Return a text that the expression matches; assertions are not looked at."""
    return _write(parser.parse(pattern), random)


def list_branches(pattern: str) -> list[str]:
    """Return the alternatives of an expression of the form `(a|b|c)`, also if it begins with flags."""
    body, depth, parts = pattern.removeprefix("(?i)")[1:-1], 0, [""]
    for character in body:
        depth += (character in "([") - (character in ")]")
        parts = [*parts, ""] if character == "|" and depth == 0 else [*parts[:-1], parts[-1] + character]
    return parts


def _write(parsed: Any, random: Random) -> str:
    return "".join(_write_part(code, argument, random) for code, argument in parsed)


def _write_part(code: Any, argument: Any, random: Random) -> str:
    if code is codes.LITERAL:
        return chr(argument)
    if code is codes.IN:
        return random.choice([character for item in argument for character in _characters(*item)])
    if code in (codes.MAX_REPEAT, codes.POSSESSIVE_REPEAT):
        low, high, part = argument
        count = min(int(high), max(low, _EXTRA)) if low else random.randint(0, min(int(high), 2))
        return "".join(_write(part, random) for _ in range(count))
    if code is codes.SUBPATTERN:
        return _write(argument[3], random)
    if code is codes.BRANCH:
        return _write(random.choice(argument[1]), random)
    assert code in (codes.AT, codes.ASSERT, codes.ASSERT_NOT), code
    return ""


def _characters(code: Any, argument: Any) -> list[str]:
    if code is codes.RANGE:
        return [chr(number) for number in range(argument[0], argument[1] + 1)]
    if code is codes.CATEGORY:
        assert argument is codes.CATEGORY_DIGIT
        return list("0123456789")
    assert code is codes.LITERAL, code
    return [chr(argument)]
