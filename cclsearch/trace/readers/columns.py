"""Columns that grow piece by piece, and the numbering of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_INT32 = 2**31 - 1


class Interner(dict[Any, int]):
    """Numbers distinct values in the order of first use: `interner[value]` is its number."""

    def __init__(self, known: Mapping[Any, int] | None = None) -> None:
        super().__init__(known or {})

    def __missing__(self, value: Any) -> int:
        number = len(self)
        self[value] = number
        return number

    def numbers_of(self, values: Iterable[Any], count: int) -> NDArray[np.int32]:
        """Return the numbers of these values, shape (count,)."""
        return np.fromiter(map(self.__getitem__, values), np.int32, count)


class Column:
    """One column under construction."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self._room = np.empty(0, dtype)
        self.length = 0
        # Without it, values are copied again and again as the column grows.
        self.expected = 0
        """Number of values to reserve room for at once."""

    def append(self, piece: NDArray[Any]) -> None:
        """Copy the values, converted (not checked) to the column's type."""
        self.extend(len(piece))[:] = piece

    def extend(self, count: int) -> NDArray[Any]:
        """Append values, and return their place for the caller to fill."""
        start, stop = self.length, self.length + count
        if stop > len(self._room):
            room = max(2 * len(self._room), stop, self.expected)  # pages that nothing writes take no memory
            grown = np.empty(room, self.dtype)
            grown[: self.length] = self._room[: self.length]
            self._room = grown
        self.length = stop
        return self._room[start:stop]

    def finish(self) -> NDArray[Any]:
        """Return the whole column; the builder gives it up."""
        whole, self._room = self._room[: self.length], np.empty(0, self.dtype)
        self.length = 0
        return whole


class SparseColumn:
    """A column that few rows have, under construction: row numbers and values."""

    def __init__(self, dtype: str) -> None:
        self._rows = Column("<i4")
        self._values = Column(dtype)

    def append(self, rows: NDArray[Any], values: NDArray[Any]) -> None:
        """Add values for these rows of the table."""
        self._rows.append(rows)
        self._values.append(values)

    def finish(self) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """Return row numbers and values."""
        return self._rows.finish(), self._values.finish()


def positive_int(value: Any, limit: int = 2**62) -> int | None:
    """Return a whole number above 0 and under the limit; None for other values (and for True)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < limit else None


def to_int32(numbers: Iterable[int], count: int) -> NDArray[np.int32]:
    """Return whole numbers as int32; ids beyond 31 bits wrap (equal ids stay equal), -1 and beyond 64 bits is -1."""
    try:
        return np.fromiter(numbers, np.int32, count)
    except OverflowError:
        wide = [n & MAX_INT32 if n != -1 and -(2**63) <= n < 2**64 else -1 for n in numbers]
        return np.fromiter(wide, np.int64, count).astype(np.int32)


def to_int64(numbers: Iterable[int], count: int) -> NDArray[np.int64]:
    """Return whole numbers as int64; numbers that do not fit become -1 (missing)."""
    try:
        return np.fromiter(numbers, np.int64, count)
    except OverflowError:
        return np.fromiter((n if -1 <= n < 2**63 else -1 for n in numbers), np.int64, count)


def to_ns(time_us: NDArray[np.float64], base_us: int) -> NDArray[np.int64]:
    """Return whole nanoseconds after `base_us`; exact as long as float64 resolves the microseconds to 0.5 ns."""
    whole = np.floor(time_us)
    fraction = np.rint((time_us - whole) * 1000.0)
    return (whole.astype(np.int64) - base_us) * 1000 + fraction.astype(np.int64)


def is_time(time_us: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the mask of valid times: finite, and small enough that nanoseconds fit in 63 bits."""
    return np.isfinite(time_us) & (np.abs(time_us) < 4.5e15)
