"""Damages the text of a trace at random, and compares two tables completely."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np

from cclsearch.trace.events import COLUMNS, EventTable, TableFacts

ODD_VALUES = (
    *("null", "true", "NaN", "-Infinity", "[]", "{}", '""', '"12"', '"-3"', '"0x1f"', '"1e3"', '"\\u0041"', '"a\\"b"'),
    *("1e3", "-0", "-7", "0.5", "12.", "01", "1E-2", "4294967296", "-2147483649", "12345678901234567890", "9" * 400),
    *("1712195495519703.772", "9007199254740993", "0.1234567890123456789", "4.5e15", "4600000000000000", "-1.5"),
    *('"\\ud800"', '"\\ud83d\\ude00"', '"\ufeff\u00e9"', "[[[1, 2], []], {}]", "[" * 70 + "]" * 70, "'x'", "nul"),
    *('{"ts": 1712195495519703.772}', '"x" * 3', "{", "[", '"', "\\", "", " \t\r\n 5 \n", '"' + "y" * 5000 + '"'),
    *("nan", "-nan", "-nan(ind)", "inf", "+inf", "-inf", "Infinity", "nan x", "info", "1,234.5", '"a"b"', "default_pg"),
)
ODD_MEMBERS = (
    *('"ts": 5,', '"ph": "X",', '"ph": "i",', '"cat": "kernel",', '"name": "[memory]",', '"dur": -1,', '"tid": "7",'),
    *('"args": {},', '"args": null,', '"args": {"correlation": 4, "correlation": 5},', '"n\\u0061me": "z",', ","),
    *('"args": {"Total Allocated": "9", "Device Type": 1, "Device Id": 0, "Total Reserved": 12},', '"id": [{}],'),
    *('"Process Group Description": ,', '"x": -nan,', '"args": {"correlation": 4, "correlation": nan}, "y": 1,'),
    *('"cat": "mtia_ccp_events",', '"ph": "Q",', '"bp": "e",', '"dtype": {"a": 1},', '"dur": 3e0,', '"pid": 1.5,'),
)
_VALUE = re.compile(r'(?<=": )("[^"]*"|-?[\d.]+|\[[^\]]*\])')
_BRACE = re.compile(r"\{")


def mutate(text: str, draw: random.Random) -> bytes:
    """Return the text with one to six random changes: odd values, members, bytes, cuts and copies."""
    for _ in range(draw.randint(1, 4)):
        kind = draw.randrange(8)
        if kind < 4:
            text = _replace(text, _VALUE, draw.choice(ODD_VALUES), draw)
        elif kind < 6:
            text = _replace(text, _BRACE, "{" + draw.choice(ODD_MEMBERS), draw)
        elif kind == 6:
            start = draw.randrange(len(text) + 1)
            text = text[:start] + text[start + draw.randint(0, 9) :]
        else:
            start = draw.randrange(len(text) + 1)
            text = text[:start] + text[start : start + draw.randint(0, 400)] + text[start:]
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if draw.random() < 0.3 and data:
        at = draw.randrange(len(data))
        data[at : at + draw.randint(0, 2)] = bytes(draw.randrange(256) for _ in range(draw.randint(0, 3)))
    if draw.random() < 0.1:
        del data[draw.randrange(len(data) + 1) :]
    return bytes(data)


def _replace(text: str, pattern: re.Pattern[str], new: str, draw: random.Random) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return text
    place = draw.choice(found)
    return text[: place.start()] + new + text[place.end() :]


def difference(one: EventTable, other: EventTable) -> str:
    """Return the name of the first column or fact in which two tables differ; "" if they are equal."""
    pairs: list[tuple[str, Any, Any]] = [(name, getattr(one, name), getattr(other, name)) for name in COLUMNS]
    pairs.append(("name_class", one.name_class, other.name_class))
    pairs += [
        (f"memory {n}", getattr(one.memory, n), getattr(other.memory, n)) for n in one.memory.__dataclass_fields__
    ]
    if set(one.sparse) != set(other.sparse):
        return "sparse"
    for name in one.sparse:
        pairs += [(name, a, b) for a, b in zip(one.sparse[name], other.sparse[name], strict=True)]
    for name, a, b in pairs:
        if a.dtype != b.dtype or not np.array_equal(a, b):
            return name
    facts = TableFacts.__dataclass_fields__
    return next((name for name in facts if repr(getattr(one, name)) != repr(getattr(other, name))), "")
