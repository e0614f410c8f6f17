"""The trials of a ledger: frequently needed fields in columns, the trials themselves read on demand."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.record.event import Event
from cclsearch.record.line import decode_line
from cclsearch.record.trial import Trial, fold_trial

MAX_CACHED = 256
"""Maximum number of trials in memory after they were read."""

_IS_SEARCH, _COSTS_BUDGET, _IS_FINISHED = 1, 2, 4


class Trials(Mapping[int, Trial]):
    """Trial number -> trial, in the order of the proposals; about fifty bytes of memory per trial.

    Every method raises KeyError for a trial that was never proposed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
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

    @property
    def last_number(self) -> int:
        """The highest number; 0 if there are no trials."""
        return max(self._numbers, default=0)

    def propose(self, number: int, config: bytes, *, is_search: bool) -> None:
        """Add a trial without lines; a trial with the same number is reset."""
        flags = (_IS_SEARCH | _COSTS_BUDGET) if is_search else 0
        key = int.from_bytes(hashlib.blake2b(config, digest_size=8).digest(), signed=True)
        index = self._find(number)
        if index is None:
            index = len(self._numbers)
            self._numbers.append(number)
            for column in (self._flags, self._losses, self._keys, self._last_extents):
                column.append(0)
            if number != index + 1:
                self._index_of[number] = index
        self._flags[index], self._losses[index], self._keys[index] = flags, math.nan, key
        self._last_extents[index] = -1

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
        """Mark the trial as finished; `loss` is None if it is not ranked."""
        index = self._index(number)
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
        with self._path.open("rb") as file:
            for extent in reversed(extents):
                file.seek(self._offsets[extent])
                events += [self._parse(file.readline().rstrip(b"\n")) for _ in range(self._num_lines[extent])]
        return fold_trial(events)

    def _parse(self, line: bytes) -> Event:
        try:
            return decode_line(line)
        except ValueError:
            raise UserError(
                f"{str(self._path)!r} is damaged or was replaced: a line changed since it was first read"
            ) from None
