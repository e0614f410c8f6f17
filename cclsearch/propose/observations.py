"""A finished trial as a proposer sees it, and a compact store for ten thousand of them."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Config, Failure
from cclsearch.space.table import Space

NUMBERS = ("loss", "spread")
"""Fields of an observation that are a number or None."""
MAX_CACHED = 256
"""Observations that a store keeps as objects; a search with fewer trials builds each one once."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished trial of one configuration, as a proposer sees it."""

    trial: int
    config: Config
    row: int | None
    """Row of the space; None for a configuration outside it (of an earlier run, or a baseline)."""
    loss: float | None
    """Finite value that the objective minimizes; None if it failed, was not admitted or violates a constraint."""
    failure: Failure | None = None
    """None if the trial has a loss. Infrastructure failures are never shown to a proposer."""
    spread: float | None = None
    """Relative spread of the primary metric inside the run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metric -> measured value; of a failed trial at most `peak_memory_gib`."""
    is_confirmation: bool = False
    violation: float = 0.0
    """By how much the trial violates the objective's constraints (`Objective.violation`); 0 if it satisfies all."""

    @property
    def is_valid(self) -> bool:
        """Whether the trial was admitted, apart from the objective's constraints: its metrics can be learned from."""
        return self.loss is not None or self.violation > 0

    def value(self, metric: str) -> float | None:
        """The metric's value if the trial is valid and measured it, else None."""
        return self.metrics.get(metric) if self.is_valid else None


class _Schema(NamedTuple):
    """The fields that many observations have in common, stored once."""

    numbers: tuple[str, ...]
    """Which of `NUMBERS` are not None."""
    metrics: tuple[str, ...]
    """Names of the metrics, in their order."""
    failure: Failure | None
    is_confirmation: bool
    violation: float


class ObservationStore:
    """Stores observations in columns (some hundred bytes each) and builds the objects on request.

    A built observation equals the one that was added. A configuration that equals its row of the space is not stored.
    """

    def __init__(self, space: Space | None = None) -> None:
        self._space = space
        self._trials = array("i")
        self._rows = array("i")
        """-1 for an observation without a row."""
        self._schema_ids = array("i")
        self._starts = array("i")
        self._numbers = array("d")
        """For each observation, from its start: the numbers that are not None, then its metrics."""
        self._id_of_schema: dict[_Schema, int] = {}
        self._schemas: list[_Schema] = []
        self._configs: dict[int, Config] = {}
        """Index -> configuration that differs from its row of the space."""
        self._order = array("i")
        """Indices sorted by trial number."""
        self._cache: dict[int, Observation] = {}

    def add(self, observation: Observation) -> None:
        """Store one more observation."""
        o, index = observation, len(self._trials)
        numbers = {name: number for name in NUMBERS if (number := getattr(o, name)) is not None}
        schema = _Schema(tuple(numbers), tuple(o.metrics), o.failure, o.is_confirmation, o.violation)
        if schema not in self._id_of_schema:
            self._id_of_schema[schema] = len(self._schemas)
            self._schemas.append(schema)
        if o.row is None or self._space is None or not _is_same(o.config, self._space.config(o.row)):
            self._configs[index] = o.config
        self._trials.append(o.trial)
        self._rows.append(-1 if o.row is None else o.row)
        self._schema_ids.append(self._id_of_schema[schema])
        self._starts.append(len(self._numbers))
        self._numbers.extend(numbers.values())
        self._numbers.extend(o.metrics.values())
        insort(self._order, index, key=self._trials.__getitem__)

    def snapshot(self) -> Observations:
        """Return the observations so far, sorted by trial number; later ones do not change the result."""
        return Observations(self, self._order[:])

    def get(self, index: int) -> Observation:
        """Return the observation with this index, in order of addition (0 is the first)."""
        observation = self._cache.get(index)
        if observation is None:
            observation = self._build(index)
            if len(self._cache) < MAX_CACHED:
                self._cache[index] = observation
        return observation

    def rows(self, count: int) -> NDArray[np.int64]:
        """Return the rows of the first `count` observations, in order of addition; -1 for one without a row."""
        return np.array(self._rows[:count], dtype=np.int64)

    def _build(self, index: int) -> Observation:
        schema, start, row = self._schemas[self._schema_ids[index]], self._starts[index], self._rows[index]
        middle = start + len(schema.numbers)
        metrics = self._numbers[middle : middle + len(schema.metrics)]
        numbers = dict.fromkeys(NUMBERS) | dict(zip(schema.numbers, self._numbers[start:middle], strict=True))
        config = self._configs.get(index)
        if config is None:
            assert self._space is not None, "a configuration is left out only if it equals its row of the space"
            config = self._space.config(row)
        return Observation(
            trial=self._trials[index],
            config=config,
            row=None if row < 0 else row,
            failure=schema.failure,
            metrics=dict(zip(schema.metrics, metrics, strict=True)),
            is_confirmation=schema.is_confirmation,
            violation=schema.violation,
            **numbers,
        )


class Observations(Sequence[Observation]):
    """The observations of a store at one moment, sorted by trial number; reads like a tuple of observations."""

    def __init__(self, store: ObservationStore, indices: Sequence[int]) -> None:
        self._store = store
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Observation]:
        return map(self._store.get, self._indices)

    @overload
    def __getitem__(self, index: int) -> Observation: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Observation, ...]: ...
    def __getitem__(self, index: int | slice) -> Observation | tuple[Observation, ...]:
        if isinstance(index, slice):
            return tuple(map(self._store.get, self._indices[index]))
        return self._store.get(self._indices[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Observations | tuple) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # like a tuple of observations, which contain mappings

    def __add__(self, more: Sequence[Observation]) -> tuple[Observation, ...]:
        return (*self, *more)

    @property
    def rows(self) -> NDArray[np.int64]:
        """The observed rows of the space, in no order; builds no observation."""
        rows = self._store.rows(len(self))
        return rows[rows >= 0]


def observed_rows(observations: Sequence[Observation]) -> NDArray[np.int64]:
    """Return the observed rows of the space, in no order."""
    if isinstance(observations, Observations):
        return observations.rows
    return np.array([o.row for o in observations if o.row is not None], dtype=np.int64)


def _is_same(config: Config, other: Config) -> bool:
    """Return whether they are equal in values, types and order of the knobs, so that a prompt prints them alike."""
    return [(k, v, type(v)) for k, v in config.items()] == [(k, v, type(v)) for k, v in other.items()]
