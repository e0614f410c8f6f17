"""Does two things at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

One = TypeVar("One")
Other = TypeVar("Other")


def call_both(threads: int, one: Callable[[], One], other: Callable[[], Other]) -> tuple[One, Other]:
    """Return what both return; with several threads they run at the same time (numpy mostly releases the GIL)."""
    if threads < 2:
        return one(), other()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(other)
        return one(), found.result()
