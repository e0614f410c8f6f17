"""Options of frameworks, listed from their documentation; rendered options are checked against these lists."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def read_options(name: str) -> frozenset[str]:
    """Return the options of `NAME.options.txt` next to this file; lines that begin with `#` name source and version."""
    lines = (Path(__file__).parent / f"{name}.options.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def check_options(used: Iterable[str], name: str) -> None:
    """Raise ValueError with the options that are not in the list."""
    unknown = sorted(set(used) - read_options(name))
    if unknown:
        raise ValueError(f"options that {name} does not document (see {name}.options.txt): {', '.join(unknown)}")
