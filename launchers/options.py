"""Options of frameworks, listed from their documentation; rendered options are checked against these lists."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_options(name: str) -> frozenset[str]:
    """Return the options of `NAME.options.txt` next to this file; lines that begin with `#` name source and version."""
    lines = (Path(__file__).parent / f"{name}.options.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def apply_options(config: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """Return the configuration with each `path.to.field=value` set; values are JSON, or text."""
    for word in words:
        path, _, value = word.partition("=")
        *above, name = path.split(".")
        at = config
        for key in above:
            at = at.setdefault(key, {})
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        at[name] = value
    return config


def check_options(used: Iterable[str], name: str) -> None:
    """Raise ValueError with the options that are not in the list."""
    unknown = sorted(set(used) - read_options(name))
    if unknown:
        raise ValueError(f"options that {name} does not document (see {name}.options.txt): {', '.join(unknown)}")
