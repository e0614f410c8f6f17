"""Options of frameworks as their documentation lists them: what is rendered is held against these kept lists."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def read_options(name: str) -> frozenset[str]:
    """The options of `NAME.options.txt` beside this file; lines that begin with `#` say source and version."""
    lines = (Path(__file__).parent / f"{name}.options.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def check_options(used: Iterable[str], name: str) -> None:
    """ValueError that names the options which the kept list does not know."""
    unknown = sorted(set(used) - read_options(name))
    if unknown:
        raise ValueError(f"{name} documents no option {', '.join(unknown)} (kept list: {name}.options.txt)")
