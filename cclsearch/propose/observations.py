"""One finished run as a proposer sees it, and ten thousand of them kept small."""

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

NUMBERS = ("loss", "step_time_s", "peak_memory_gib", "spread")
"""Fields of an observation that are a number or None."""
MAX_CACHED = 256
"""Observations of a shelf that stay built; a search of fewer trials builds each once."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished run of one configuration, as a proposer sees it."""

    trial: int
    config: Config
    row: int | None
    """Row of the space; None for a run outside it (an earlier run's, a baseline)."""
    loss: float | None
    """What the objective minimises (finite, positive for `step_time`); None where it failed or was not admitted."""
    step_time_s: float | None = None
    peak_memory_gib: float | None = None
    """Largest over the ranks."""
    failure: Failure | None = None
    """None where the trial is scored. Infrastructure failures are never shown to a proposer."""
    spread: float | None = None
    """Relative spread of the step times inside the run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics by name (for an objective over several)."""
    is_confirmation: bool = False


class _Form(NamedTuple):
    """What many observations share."""

    numbers: tuple[str, ...]
    """Which of `NUMBERS` there are."""
    metrics: tuple[str, ...]
    """Names, in their order."""
    failure: Failure | None
    is_confirmation: bool


class ObservationStore:
    """Observations that come one after another, kept in columns: some hundred bytes each, and built when wanted.

    Each comes back equal to what was put there. A configuration that is the space's own is not kept at all.
    """

    def __init__(self, space: Space | None = None) -> None:
        self._space = space
        self._trials = array("i")
        self._rows = array("i")
        """-1 where there is none."""
        self._forms = array("i")
        self._starts = array("i")
        self._numbers = array("d")
        """Of each, from its start on: the numbers that it has, then its metrics."""
        self._form_of: dict[_Form, int] = {}
        self._known_forms: list[_Form] = []
        self._configs: dict[int, Config] = {}
        """Place -> configuration that is not the space's own."""
        self._order = array("i")
        """Places in order of the trials' numbers."""
        self._built: dict[int, Observation] = {}

    def add(self, observation: Observation) -> None:
        """Keep one more."""
        o, place = observation, len(self._trials)
        numbers = {name: number for name in NUMBERS if (number := getattr(o, name)) is not None}
        form = _Form(tuple(numbers), tuple(o.metrics), o.failure, o.is_confirmation)
        if form not in self._form_of:
            self._form_of[form] = len(self._known_forms)
            self._known_forms.append(form)
        if o.row is None or self._space is None or not _is_same(o.config, self._space.config(o.row)):
            self._configs[place] = o.config
        self._trials.append(o.trial)
        self._rows.append(-1 if o.row is None else o.row)
        self._forms.append(self._form_of[form])
        self._starts.append(len(self._numbers))
        self._numbers.extend(numbers.values())
        self._numbers.extend(o.metrics.values())
        insort(self._order, place, key=self._trials.__getitem__)

    def snapshot(self) -> Observations:
        """All that are here now, in order of their trials' numbers; later ones do not change it."""
        return Observations(self, self._order[:])

    def build(self, place: int) -> Observation:
        """The observation that came at that place (0 for the first)."""
        built = self._built.get(place)
        if built is None:
            built = self._read(place)
            if len(self._built) < MAX_CACHED:
                self._built[place] = built
        return built

    def rows(self, count: int) -> NDArray[np.int64]:
        """Rows of the space among the first so many, -1 for none, as they came."""
        return np.array(self._rows[:count], dtype=np.int64)

    def _read(self, place: int) -> Observation:
        form, start, row = self._known_forms[self._forms[place]], self._starts[place], self._rows[place]
        middle = start + len(form.numbers)
        metrics = self._numbers[middle : middle + len(form.metrics)]
        numbers = dict.fromkeys(NUMBERS) | dict(zip(form.numbers, self._numbers[start:middle], strict=True))
        config = self._configs.get(place)
        if config is None:
            assert self._space is not None, "only a space's own configuration is left out"
            config = self._space.config(row)
        return Observation(
            trial=self._trials[place],
            config=config,
            row=None if row < 0 else row,
            failure=form.failure,
            metrics=dict(zip(form.metrics, metrics, strict=True)),
            is_confirmation=form.is_confirmation,
            **numbers,
        )


class Observations(Sequence[Observation]):
    """What a shelf held at one moment, in order of the trials' numbers; read it as a tuple of observations."""

    def __init__(self, store: ObservationStore, places: Sequence[int]) -> None:
        self._store = store
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Observation]:
        return map(self._store.build, self._places)

    @overload
    def __getitem__(self, index: int) -> Observation: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Observation, ...]: ...
    def __getitem__(self, index: int | slice) -> Observation | tuple[Observation, ...]:
        if isinstance(index, slice):
            return tuple(map(self._store.build, self._places[index]))
        return self._store.build(self._places[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Observations | tuple) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as of a tuple of observations, which hold mappings

    def __add__(self, more: Sequence[Observation]) -> tuple[Observation, ...]:
        return (*self, *more)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of the space that were observed, in no order; nothing is built for it."""
        rows = self._store.rows(len(self))
        return rows[rows >= 0]


def observed_rows(observations: Sequence[Observation]) -> NDArray[np.int64]:
    """Rows of the space that were observed, in no order."""
    if isinstance(observations, Observations):
        return observations.rows
    return np.array([o.row for o in observations if o.row is not None], dtype=np.int64)


def _is_same(config: Config, own: Config) -> bool:
    """Equal, and with its knobs in the same order and of the same types: it reads the same in a prompt."""
    return [(k, v, type(v)) for k, v in config.items()] == [(k, v, type(v)) for k, v in own.items()]
