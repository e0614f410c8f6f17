"""The trials of a ledger in columns, and as a proposer sees them; trials and observations are built on request.

A trial takes some hundred bytes of memory: what the fold and the proposers need often is in columns, and the trial
itself is read from the ledger.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.errors import UserError, reading_from
from cclsearch.core.values import Config, Failure
from cclsearch.propose.observations import Observation
from cclsearch.record.event import Event
from cclsearch.record.line import decode_line
from cclsearch.record.trial import Trial, fold_trial
from cclsearch.space.table import Space

MAX_CACHED = 256
"""Maximum number of trials in memory after they were read; the same of observations."""

_IS_SEARCH, _COSTS_BUDGET, _IS_FINISHED = 1, 2, 4


class _Schema(NamedTuple):
    """The fields that many observations have in common, stored once."""

    has_spread: bool
    metrics: tuple[str, ...]
    """Names of the metrics, in their order."""
    failure: Failure | None
    violation: float
    is_pruned: bool
    loads: tuple[tuple[str, ...], ...] = ()
    """Names of the metrics of each load, in their order."""

    @property
    def num_values(self) -> int:
        """Values that an observation has in the columns."""
        return self.has_spread + len(self.metrics) + sum(map(len, self.loads))


class TrialTable(Mapping[int, Trial]):
    """Trial number -> trial, in the order of the proposals.

    Every method raises KeyError for a trial that was never proposed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.finish_order = array("i")
        """Numbers of the finished trials, in order of finishing."""
        self._numbers = array("i")
        self._flags = array("B")
        self._losses = array("d")
        """NaN if the trial is not ranked."""
        self._keys = array("q")
        """64-bit hash of the proposed configuration, which distinguishes the configurations of any search."""
        self._last_extents = array("i")
        self._offsets = array("q")
        """Offset in the ledger of each extent: consecutive lines of one trial."""
        self._num_lines = array("i")
        """Number of lines of each extent."""
        self._previous_extents = array("i")
        """Previous extent of the same trial; -1 for its first."""
        self._end = -1
        """Offset after the last line of any trial."""
        self._index_of: dict[int, int] = {}
        """Number -> index, only for trials whose number is not index + 1."""
        self._cache: OrderedDict[int, Trial] = OrderedDict()
        self._space: Space | None = None
        """The space whose rows the observations have."""
        self._unobserved = array("i")
        """Numbers of finished or revised trials that are not yet observations."""
        self._rows = array("i")
        """Row of the space; -1 for a configuration outside it."""
        self._configs: dict[int, Config] = {}
        """Index -> configuration, only where it differs from its row of the space."""
        self._schema_ids = array("i")
        """-1 if a proposer does not see the trial."""
        self._schemas: dict[_Schema, int] = {}
        self._schema_list: list[_Schema] = []
        self._starts = array("i")
        self._values = array("d")
        """For each observation, from its start: the spread, if it has one, its metrics, and those of its loads."""
        self._order = array("i")
        """Indices of the trials that a proposer sees, sorted by number."""
        self._observations: dict[int, Observation] = {}

    def __getitem__(self, number: int) -> Trial:
        trial = self._cache.get(number)
        if trial is None:
            trial = self._read(self._index(number))
            self._cache[number] = trial
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return trial

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self._find(number) is not None

    def propose(self, number: int, config: Config, *, is_search: bool, is_paid: bool) -> None:
        """Add a trial without lines; its number is new."""
        text = json.dumps(dict(config), sort_keys=True)
        index = len(self._numbers)
        self._numbers.append(number)
        self._flags.append((_IS_SEARCH if is_search else 0) | (_COSTS_BUDGET if is_paid else 0))
        self._losses.append(math.nan)
        self._keys.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True))
        self._last_extents.append(-1)
        self._rows.append(0)
        self._starts.append(0)
        self._schema_ids.append(-1)
        if number != index + 1:
            self._index_of[number] = index

    def add_line(self, number: int, offset: int, end: int) -> None:
        """Add a line of that trial, from `offset` to `end` in the ledger."""
        index, last = self._index(number), len(self._offsets) - 1
        if offset == self._end and self._last_extents[index] == last >= 0:
            self._num_lines[last] += 1
        else:
            self._offsets.append(offset)
            self._num_lines.append(1)
            self._previous_extents.append(self._last_extents[index])
            self._last_extents[index] = last + 1
        self._end = end
        self._cache.pop(number, None)

    def finish(self, number: int, *, costs_budget: bool, loss: float | None) -> None:
        """Take over the outcome of a trial that finished or was revised; `loss` is None if it is not ranked."""
        index = self._index(number)
        if not self._flags[index] & _IS_FINISHED:
            self.finish_order.append(number)
        self._unobserved.append(number)
        is_search = self._flags[index] & _IS_SEARCH
        self._flags[index] = is_search | _IS_FINISHED | (_COSTS_BUDGET if costs_budget else 0)
        self._losses[index] = math.nan if loss is None else loss

    def is_search(self, number: int) -> bool:
        """Whether the search proposed the trial (not a confirmation)."""
        return bool(self._flags[self._index(number)] & _IS_SEARCH)

    def costs_budget(self, number: int) -> bool:
        return bool(self._flags[self._index(number)] & _COSTS_BUDGET)

    def is_finished(self, number: int) -> bool:
        return bool(self._flags[self._index(number)] & _IS_FINISHED)

    def loss(self, number: int) -> float | None:
        """The loss used for ranking; None if it is not ranked (yet)."""
        loss = self._losses[self._index(number)]
        return None if math.isnan(loss) else loss

    def config_key(self, number: int) -> int:
        """Key that is equal for all trials of one configuration."""
        return self._keys[self._index(number)]

    def observe(self, space: Space | None = None) -> Observations:
        """The finished trials as a proposer sees them: sorted by number, without infrastructure failures.

        Their rows are those of the space. Later trials do not change the result.
        """
        if space is not self._space:
            self._space, self._unobserved, self._values = space, self.finish_order[:], array("d")
        for number in self._unobserved:
            self._observe(number)
        self._unobserved = array("i")
        return Observations(self, self._order[:])

    def get_observation(self, index: int) -> Observation:
        """The trial that was proposed as the `index`-th, from 0, as a proposer sees it."""
        found = self._observations.get(index)
        if found is None:
            found = self._build_observation(index)
            if len(self._observations) < MAX_CACHED:
                self._observations[index] = found
        return found

    def get_rows(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """(n,) rows of the space of these trials; -1 for a configuration outside it."""
        return np.array(self._rows, dtype=np.int64)[np.array(indices, dtype=np.int64)]

    def get_numbers(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """(n,) numbers of these trials."""
        return np.array(self._numbers, dtype=np.int64)[np.array(indices, dtype=np.int64)]

    def get_losses(self, indices: Sequence[int]) -> NDArray[np.float64]:
        """(n,) losses of these trials; NaN for one that is not ranked."""
        return np.array(self._losses, dtype=np.float64)[np.array(indices, dtype=np.int64)]

    def get_failures(self, indices: Sequence[int]) -> NDArray[np.bool_]:
        """(n,) whether each of these trials, which a proposer sees, failed."""
        has_failed = np.array([schema.failure is not None for schema in self._schema_list], dtype=bool)
        return has_failed[np.array(self._schema_ids, dtype=np.int64)[np.array(indices, dtype=np.int64)]]

    def _observe(self, number: int) -> None:
        """Write the trial's outcome into the columns of observations."""
        index, trial = self._index(number), self[number]
        was_seen = self._schema_ids[index] >= 0
        self._observations.pop(index, None)
        self._configs.pop(index, None)
        outcome = trial.outcome
        if outcome is None or (outcome.failure and not outcome.failure.kind.counts):
            self._schema_ids[index] = -1
            if was_seen:
                self._order.remove(index)
            return
        row = self._space.row(trial.config) if self._space else None
        if row is None or self._space is None or not _is_same(trial.config, self._space.config(row)):
            self._configs[index] = trial.config
        names = tuple(outcome.metrics)
        loads = tuple(map(tuple, outcome.loads))
        schema = _Schema(
            outcome.spread is not None, names, outcome.failure, outcome.violation, outcome.is_pruned, loads
        )
        self._schema_ids[index] = self._schemas.setdefault(schema, len(self._schemas))
        if len(self._schema_list) < len(self._schemas):
            self._schema_list.append(schema)
        self._rows[index] = -1 if row is None else row
        self._starts[index] = len(self._values)
        self._values.extend([] if outcome.spread is None else [outcome.spread])
        for figures in (outcome.metrics, *outcome.loads):
            self._values.extend(figures.values())
        if not was_seen:
            insort(self._order, index, key=self._numbers.__getitem__)

    def _build_observation(self, index: int) -> Observation:
        number = self._numbers[index]
        schema, start, row = self._schema_list[self._schema_ids[index]], self._starts[index], self._rows[index]
        values = iter(self._values[start + schema.has_spread : start + schema.num_values])
        figures = [{name: next(values) for name in names} for names in (schema.metrics, *schema.loads)]
        config = self._configs.get(index)
        if config is None:
            assert self._space is not None, "a configuration is left out only if it equals its row of the space"
            config = self._space.config(row)
        return Observation(
            trial=number,
            config=config,
            row=None if row < 0 else row,
            loss=self.loss(number),
            failure=schema.failure,
            spread=self._values[start] if schema.has_spread else None,
            metrics=figures[0],
            loads=tuple(figures[1:]),
            is_confirmation=not self.is_search(number),
            violation=schema.violation,
            is_pruned=schema.is_pruned,
        )

    def _find(self, number: int) -> int | None:
        index = number - 1
        if 0 <= index < len(self._numbers) and self._numbers[index] == number:
            return index
        return self._index_of.get(number)

    def _index(self, number: int) -> int:
        index = self._find(number)
        if index is None:
            raise KeyError(number)
        return index

    def _read(self, index: int) -> Trial:
        assert self._path is not None, "trials come from a ledger"
        extents, extent = [], self._last_extents[index]
        while extent >= 0:
            extents.append(extent)
            extent = self._previous_extents[extent]
        events = []
        with reading_from(self._path), self._path.open("rb") as file:
            for extent in reversed(extents):
                file.seek(self._offsets[extent])
                events += [self._parse(file.readline()) for _ in range(self._num_lines[extent])]
        return fold_trial(events)

    def _parse(self, line: bytes) -> Event:
        try:
            return decode_line(line)
        except ValueError:
            raise UserError(
                f"{str(self._path)!r} is damaged or was replaced: a line changed since it was first read"
            ) from None


class Observations(Sequence[Observation]):
    """The observations of a table at one moment, sorted by trial number; reads like a tuple of observations."""

    def __init__(self, table: TrialTable, indices: Sequence[int]) -> None:
        self._table = table
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Observation]:
        return map(self._table.get_observation, self._indices)

    @overload
    def __getitem__(self, index: int) -> Observation: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Observation, ...]: ...
    def __getitem__(self, index: int | slice) -> Observation | tuple[Observation, ...]:
        if isinstance(index, slice):
            return tuple(map(self._table.get_observation, self._indices[index]))
        return self._table.get_observation(self._indices[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Observations | tuple) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # like a tuple of observations, which contain mappings

    def __add__(self, more: Sequence[Observation]) -> tuple[Observation, ...]:
        return (*self, *more)

    @property
    def rows(self) -> NDArray[np.int64]:
        """The observed rows of the space; builds no observation."""
        rows = self._table.get_rows(self._indices)
        return rows[rows >= 0]

    @property
    def trials(self) -> NDArray[np.int64]:
        """(n,) number of each trial; builds no observation."""
        return self._table.get_numbers(self._indices)

    @property
    def losses(self) -> NDArray[np.float64]:
        """(n,) losses, NaN for an observation without; builds no observation."""
        return self._table.get_losses(self._indices)

    @property
    def failures(self) -> NDArray[np.bool_]:
        """(n,) whether each trial failed; builds no observation."""
        return self._table.get_failures(self._indices)


def _is_same(config: Config, other: Config) -> bool:
    """Return whether they are equal in values, types and order of the knobs, so that a prompt prints them alike."""
    return [(k, v, type(v)) for k, v in config.items()] == [(k, v, type(v)) for k, v in other.items()]
