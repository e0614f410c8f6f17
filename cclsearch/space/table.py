"""The enumerated search space as columns; proposers and predictions work on its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Config, Value
from cclsearch.space.inert import InertKnob, InertWhen, find_idle, list_inert, mask_inert
from cclsearch.space.knobs import canonical_name, meaning_of, rank_degrees

MAX_CHOICES = int(np.iinfo(np.int16).max)
"""Maximum number of choices of a knob: their positions are kept as 16-bit numbers."""

RECORDED_RULES = ("recorded",)
"""The rules of a space that has the rows of a recording, and no other combination of their values."""


def count_ranks(config: Mapping[str, Value]) -> int:
    """Return the number of ranks of a configuration, which is its number of accelerators."""
    return math.prod(int(config.get(degree, 1)) for degree in rank_degrees())


@dataclass(frozen=True)
class Knob:
    """A knob and its choices. A name in `knobs.yaml` means the same everywhere."""

    name: str
    choices: tuple[Value, ...]
    description: str = ""
    neutral: Value | None = None
    """Value of configurations without the knob, if a growth added it; None: each configuration must have it."""
    is_lever: bool = False
    """Whether a growth opened it as a lever: configurations do not state its neutral value."""
    inert_when: tuple[InertWhen, ...] = ()
    """The framework's conditions under which it changes nothing, beside those of `knobs.yaml`."""

    @property
    def column(self) -> NDArray[np.generic]:
        """(choices,) as int64, float64 or bool if all are of one such type, else as objects."""
        kinds = {type(choice) for choice in self.choices}
        return np.array(self.choices, dtype=None if kinds in ({int}, {float}, {bool}) else object)

    @property
    def is_numeric(self) -> bool:
        """Whether the choices are numbers with an order (booleans and text are not)."""
        return all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in self.choices)

    @property
    def ordered_choices(self) -> tuple[Value, ...] | None:
        """The choices in ascending order: numbers, and text that `knobs.yaml` orders; None if they have no order."""
        order = meaning_of(canonical_name(self.name)).order
        if self.is_numeric:
            return tuple(sorted(self.choices))
        return tuple(text for text in order if text in self.choices) if set(self.choices) <= set(order) else None


class RowSet(Set[int]):
    """A set of rows, kept as (N,) booleans: a million of them take a megabyte."""

    def __init__(self, mask_N: NDArray[np.bool_]) -> None:
        self.mask_N = mask_N
        self._size = int(np.count_nonzero(mask_N))

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and 0 <= row < len(self.mask_N) and bool(self.mask_N[row])

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.mask_N).tolist())

    def __len__(self) -> int:
        return self._size


@dataclass(frozen=True, eq=False)
class Space:
    """N configurations over K knobs that satisfy the rules, enumerated once, in a fixed order.

    `codes_NK[n, k]` is the position of configuration n's value in `knobs[k].choices`.
    """

    knobs: tuple[Knob, ...]
    codes_NK: NDArray[np.int16]
    num_raw: int
    """Number of combinations before the rules (for a recording, rows of its table)."""
    rules: tuple[str, ...] = ()
    """Names of the applied rules."""
    loads: tuple[tuple[float, ...], ...] = ()
    """Loads of each row, for a recording whose rows have several: a trial's conditions, known before it runs."""

    def __len__(self) -> int:
        return len(self.codes_NK)

    def config(self, row: int) -> Config:
        """The configuration in that row."""
        return self._read_codes(self.codes_NK[row])

    def _read_codes(self, codes_K: NDArray[np.int16]) -> Config:
        values = ((knob, knob.choices[code]) for knob, code in zip(self.knobs, codes_K, strict=True))
        return Config({knob.name: value for knob, value in values if not knob.is_lever or value != knob.neutral})

    def row(self, config: Mapping[str, Value]) -> int | None:
        """Row of this configuration; None if it is not in the space (unknown knob or value, or a violated rule).

        A configuration from before a knob was added has the neutral value of that knob. One that is not in the space,
        but differs only in knobs without effect from one that is, has the row of that one.
        """
        if len(config) != len(self.knobs) and any(name not in self._code_of for name in config):
            return None
        codes = []
        for knob in self.knobs:
            value = config.get(knob.name, knob.neutral)
            if value is None:
                return None
            code = self._code_of[knob.name].get(_key(value))
            if code is None:
                return None
            codes.append(code)
        codes_1K = np.array([codes], dtype=np.int16)
        row = int(self.find_rows(codes_1K)[0])
        if row < 0 and self.inert:
            keys_N, rows_N = self._sorted_masked
            row = int(_look_up(keys_N, rows_N, _pack(mask_inert(codes_1K, self.inert)))[0])
        return None if row < 0 else row

    def find_rows(self, codes_MK: NDArray[np.int16]) -> NDArray[np.int64]:
        """(M,) row of each configuration, given as positions of choices; -1 for one that is not in the space."""
        return _look_up(*self._sorted_keys, _pack(codes_MK))

    def matching(self, values: Mapping[str, Value]) -> NDArray[np.bool_]:
        """(N,) whether each configuration has these values; knobs that the space does not have are ignored."""
        match_N = np.ones(len(self), dtype=bool)
        for k, knob in enumerate(self.knobs):
            if knob.name in values:
                match_N &= self.codes_NK[:, k] == self._code_of[knob.name].get(_key(values[knob.name]), -1)
        return match_N

    def column(self, knob: str, default: Value = 1) -> NDArray[np.generic]:
        """(N,) values of one knob: int64, float64, bool or object; all `default` if there is no such knob."""
        for k, candidate in enumerate(self.knobs):
            if candidate.name == knob:
                return candidate.column[self.codes_NK[:, k]]
        return np.full(len(self), default)

    def find(self, name: str) -> Knob | None:
        """The knob of that name, else the first whose name is an alias of it; None if there is none."""
        exact = [knob for knob in self.knobs if knob.name == name]
        return next(iter(exact or (knob for knob in self.knobs if canonical_name(knob.name) == name)), None)

    def has(self, knob: str) -> bool:
        """Whether the space has a knob of that name."""
        return any(candidate.name == knob for candidate in self.knobs)

    @cached_property
    def num_accelerators_N(self) -> NDArray[np.int64]:
        """(N,) accelerators that each configuration uses: the product of its degrees of parallelism."""
        degrees = (self.column(degree).astype(np.int64) for degree in rank_degrees())
        return math.prod(degrees, start=np.ones(len(self), dtype=np.int64))

    @cached_property
    def _code_of(self) -> dict[str, dict[tuple[bool, Value], int]]:
        return {knob.name: {_key(choice): i for i, choice in enumerate(knob.choices)} for knob in self.knobs}

    @cached_property
    def _sorted_keys(self) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """The packed codes of every row in ascending order, and their rows: a dictionary takes 50 times as much."""
        return _sort(_pack(self.codes_NK))

    @cached_property
    def inert(self) -> tuple[InertKnob, ...]:
        """Return every condition under which a knob changes nothing."""
        choices = {knob.name: knob.choices for knob in self.knobs}
        return list_inert(choices, {knob.name: knob.inert_when for knob in self.knobs})

    @cached_property
    def masked_NK(self) -> NDArray[np.int16]:
        """(N, K) `codes_NK` with one value for each knob without effect: equal rows are the same run. Read-only."""
        return mask_inert(self.codes_NK, self.inert)

    def masked_config(self, row: int) -> Config:
        """The configuration in that row with one value for each knob without effect: equal runs have equal ones."""
        return self._read_codes(self.masked_NK[row])

    def is_idle_N(self, column: int) -> NDArray[np.bool_]:
        """(N,) whether the knob of that column changes nothing in each row, at any value."""
        return find_idle(self.masked_NK, self.inert, column)

    @cached_property
    def _sorted_masked(self) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """As `_sorted_keys`, of the masked codes."""
        return _sort(_pack(self.masked_NK))


def space_from_rows(
    knobs: Sequence[Knob], configs: Sequence[Mapping[str, Value]], loads: Sequence[Sequence[float]] = ()
) -> Space:
    """A space of exactly these configurations (the rows of a recording), with the loads of each if they are given."""
    code_of = [{_key(choice): i for i, choice in enumerate(knob.choices)} for knob in knobs]
    codes = [[codes[_key(config[knob.name])] for knob, codes in zip(knobs, code_of, strict=True)] for config in configs]
    codes_NK = np.array(codes, dtype=np.int16).reshape(len(configs), len(knobs))
    return Space(tuple(knobs), codes_NK, num_raw=len(configs), rules=RECORDED_RULES, loads=tuple(map(tuple, loads)))


def _key(value: Value) -> tuple[bool, Value]:
    """Key under which true and 1 are different choices."""
    return (isinstance(value, bool), value)


def _sort(keys_N: NDArray[np.void]) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    order_N = np.argsort(keys_N, kind="stable")
    return keys_N[order_N], order_N


def _look_up(keys_N: NDArray[np.void], rows_N: NDArray[np.int64], keys_M: NDArray[np.void]) -> NDArray[np.int64]:
    """(M,) the row of each key; -1 for one that is not among the sorted keys."""
    at_M = np.minimum(np.searchsorted(keys_N, keys_M), len(keys_N) - 1)
    return np.where(keys_N[at_M] == keys_M, rows_N[at_M], -1)


def _pack(codes_MK: NDArray[np.int16]) -> NDArray[np.void]:
    """(M,) the codes of each row as bytes that compare like the codes."""
    wide = np.ascontiguousarray(codes_MK, dtype=">i2")
    return wide.view(np.dtype((np.void, wide.shape[1] * wide.itemsize))).ravel()


def mask_rows(rows: Set[int], size: int) -> NDArray[np.bool_]:
    """(N,) whether each row of a space of this size is in the set. Read-only if the set is a `RowSet`."""
    if isinstance(rows, RowSet):
        return rows.mask_N
    mask_N = np.zeros(size, dtype=bool)
    mask_N[list(rows)] = True
    return mask_N
