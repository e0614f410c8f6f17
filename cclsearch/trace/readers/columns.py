"""Columns that grow piece by piece, and names that become numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

INT32_MAX = 2**31 - 1


class Interner(dict[Any, int]):
    """Distinct things in the order of their first use: `interner[thing]` is its number."""

    def __init__(self, known: Mapping[Any, int] | None = None) -> None:
        super().__init__(known or {})

    def __missing__(self, thing: Any) -> int:
        number = len(self)
        self[thing] = number
        return number

    def numbers_of(self, things: Iterable[Any], count: int) -> NDArray[np.int32]:
        """The numbers of all these, shape (count,)."""
        return np.fromiter(map(self.__getitem__, things), np.int32, count)


class Column:
    """One column under construction."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self._pieces: list[NDArray[Any]] = []
        self.length = 0

    def append(self, piece: NDArray[Any]) -> None:
        """Adds the values, converted (not checked) to the column's type."""
        self._pieces.append(piece.astype(self.dtype, copy=False))
        self.length += len(piece)

    def finish(self) -> NDArray[Any]:
        """The whole column; the pieces are let go."""
        whole = np.empty(self.length, self.dtype)
        start = 0
        self._pieces.reverse()
        while self._pieces:
            piece = self._pieces.pop()
            whole[start : start + len(piece)] = piece
            start += len(piece)
        return whole


class SparseColumn:
    """A column that few rows have, under construction: row numbers and values."""

    def __init__(self, dtype: str) -> None:
        self._rows = Column("<i4")
        self._values = Column(dtype)

    def append(self, rows: NDArray[Any], values: NDArray[Any]) -> None:
        """Adds values for these rows of the table."""
        self._rows.append(rows)
        self._values.append(values)

    def finish(self) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """Row numbers and values."""
        return self._rows.finish(), self._values.finish()


def to_int32(numbers: Iterable[int], count: int) -> NDArray[np.int32]:
    """Whole numbers as int32; ids beyond 31 bits wrap (equal ids stay equal), -1 stays."""
    try:
        return np.fromiter(numbers, np.int32, count)
    except OverflowError:
        wide = [number if number == -1 else number & INT32_MAX for number in numbers]
        return np.fromiter(wide, np.int64, count).astype(np.int32)


def to_int64(numbers: Iterable[int], count: int) -> NDArray[np.int64]:
    """Whole numbers as int64; what does not fit becomes -1 (missing)."""
    try:
        return np.fromiter(numbers, np.int64, count)
    except OverflowError:
        return np.fromiter((n if -1 <= n < 2**63 else -1 for n in numbers), np.int64, count)


def to_ns(time_us: NDArray[np.float64], base_us: int) -> NDArray[np.int64]:
    """Microseconds as whole nanoseconds after `base_us`; exact where float64 holds the microseconds to 0.5 ns."""
    whole = np.floor(time_us)
    fraction = np.rint((time_us - whole) * 1000.0)
    return (whole.astype(np.int64) - base_us) * 1000 + fraction.astype(np.int64)


def is_time(time_us: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of the numbers can be times: finite, and nanoseconds of them fit in 63 bits."""
    return np.isfinite(time_us) & (np.abs(time_us) < 4.5e15)
