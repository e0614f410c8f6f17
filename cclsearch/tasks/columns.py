"""Dataclasses whose fields are all arrays over the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Columns = TypeVar("Columns")


def map_columns(change: Callable[..., Any], first: Columns, *others: Columns) -> Columns:
    """Return a value whose columns are the function of the same columns of these values."""
    names = first.__dataclass_fields__  # type: ignore[attr-defined]
    return type(first)(**{name: change(*(getattr(each, name) for each in (first, *others))) for name in names})
