"""Dataclasses whose fields are arrays over the same rows, and the columns that follow from the choices of a knob."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Value
from cclsearch.space.table import Knob, Space

Columns = TypeVar("Columns")


def map_columns(change: Callable[..., Any], first: Columns, *others: Columns) -> Columns:
    """Return a value whose columns are the function of the same columns of these values."""
    names = first.__dataclass_fields__  # type: ignore[attr-defined]
    return type(first)(**{name: change(*(getattr(each, name) for each in (first, *others))) for name in names})


def take_rows(columns: Columns, rows: NDArray[np.int64] | slice) -> Columns:
    """Return these rows of every column, also of dataclasses inside; other fields stay as they are."""
    taken: dict[str, Any] = {}
    for name in columns.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(columns, name)
        if isinstance(value, np.ndarray):
            taken[name] = value[rows]
        elif is_dataclass(value) and (inside := take_rows(value, rows)) is not value:
            taken[name] = inside
    return replace(columns, **taken) if taken else columns  # type: ignore[type-var]


def read_choices(
    space: Space, knob: Knob | None, read: Callable[[Value], float], default: float = 0.0
) -> NDArray[np.float64]:
    """(N,) a number for each configuration's value of the knob; `default` without a knob."""
    if knob is None:
        return np.full(len(space), default)
    values = np.array([read(choice) for choice in knob.choices], dtype=np.float64)
    return values[space.codes_NK[:, space.knobs.index(knob)]]
