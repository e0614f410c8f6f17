"""Make untrusted text safe to print, shorten it, write numbers, counts and tables for people."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_PREFIXES = {
    "s": (("", 1.0), ("m", 1e-3), ("u", 1e-6)),
    **dict.fromkeys(("B", "B/step", "B/s"), (("G", 1e9), ("M", 1e6), ("k", 1e3))),
}
"""Unit -> its prefixes and their factors, the largest first."""
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")


def plain(text: str) -> str:
    """The text without terminal escapes, control characters (tab and newline stay) and bidirectional overrides.

    Bytes of a file's name that are not UTF-8 become question marks: Python holds them as half surrogate pairs.
    """
    text = text.encode(errors="replace").decode()
    return _CONTROL.sub("", _ESCAPE.sub("", text))


def count_of(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`, `2 searches`."""
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number} {noun}{ending * (number != 1)}"


def one_line(text: str, limit: int = 200) -> str:
    """The text as one safe line of at most `limit` characters; an ellipsis marks a cut."""
    line = " ".join(plain(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def guess_name(name: str, known: Iterable[str]) -> str:
    """Return the suffix of an error about an unknown name: ` (did you mean 'wl2'?)`; empty if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def show_number(value: float, digits: int = 3) -> str:
    """The number with about three significant digits: `0.0123`, `1.23`, `123`, `12,300`, `1.2e+09`."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def format_value(value: float | None, unit: str) -> str:
    """A value to four digits with a readable unit: `1.5 ms`, `2.5 GB`, `45.31 %`; `-` for None."""
    if value is None:
        return "-"
    if unit == "fraction":
        return f"{100 * value:.2f} %"
    if unit == "rank":
        return f"rank {value:.0f}"
    if unit == "s" and 0 < abs(value) < 1e-6:
        return f"{value * 1e9:.4g} ns"
    for prefix, size in _PREFIXES.get(unit, ()):
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def format_table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], *, right: Collection[int] = (), indent: str = ""
) -> str:
    """Columns as wide as their widest cell, left-aligned except those in `right`; without heads if they are empty."""
    lines = [[str(cell) for cell in row] for row in ([heads, *rows] if heads else rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def align(place: int, cell: str) -> str:
        return cell.rjust(widths[place]) if place in right else cell.ljust(widths[place])

    return "\n".join(f"{indent}{'  '.join(align(n, cell) for n, cell in enumerate(line))}".rstrip() for line in lines)
