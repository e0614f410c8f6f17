"""The trials of a ledger: what a search asks for all the time in columns, the trials themselves read when wanted."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from cclsearch.core.errors import UserError
from cclsearch.record.event import EVENT, Event
from cclsearch.record.trial import Trial, fold_trial

NUM_KEPT = 256
"""Finished trials that stay in memory after somebody wanted them."""

_IS_SEARCH, _COSTS_BUDGET, _IS_FINISHED = 1, 2, 4


class Trials(Mapping[int, Trial]):
    """Trial number -> trial, in the order of the proposals; some fifty bytes of memory a trial.

    Every question about a trial that was never proposed raises KeyError.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._numbers = array("i")
        self._flags = array("B")
        self._losses = array("d")
        """NaN where it does not rank."""
        self._keys = array("q")
        """Of the configuration, as it was proposed: 64 bits of a hash tell those of any search apart."""
        self._last_pieces = array("i")
        self._spots = array("q")
        """Offset in the ledger of each piece: lines of one trial that follow each other."""
        self._counts = array("i")
        """Lines of each piece."""
        self._pieces_before = array("i")
        """Piece of the same trial that came before; -1 for its first."""
        self._end = -1
        """Where the last line of any trial ends."""
        self._odd_places: dict[int, int] = {}
        """Number -> place of the trials that are not numbered 1, 2, 3, ... as they came."""
        self._kept: OrderedDict[int, Trial] = OrderedDict()

    def __getitem__(self, number: int) -> Trial:
        kept = self._kept.get(number)
        if kept is None:
            kept = self._read(self._place(number))
            self._kept[number] = kept
            while len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return kept

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self._find(number) is not None

    @property
    def last_number(self) -> int:
        """The highest number; 0 where there is no trial."""
        return max(self._numbers, default=0)

    def propose(self, number: int, config: bytes, *, is_search: bool) -> None:
        """Enter a trial, whose first line is to be added; one that was there already begins anew."""
        flags = (_IS_SEARCH | _COSTS_BUDGET) if is_search else 0
        key = int.from_bytes(hashlib.blake2b(config, digest_size=8).digest(), signed=True)
        place = self._find(number)
        if place is None:
            place = len(self._numbers)
            self._numbers.append(number)
            for column in (self._flags, self._losses, self._keys, self._last_pieces):
                column.append(0)
            if number != place + 1:
                self._odd_places[number] = place
        self._flags[place], self._losses[place], self._keys[place] = flags, math.nan, key
        self._last_pieces[place] = -1

    def add_line(self, number: int, spot: int, end: int) -> None:
        """One more line of that trial stands there."""
        place, last = self._place(number), len(self._spots) - 1
        if spot == self._end and self._last_pieces[place] == last >= 0:
            self._counts[last] += 1
        else:
            self._spots.append(spot)
            self._counts.append(1)
            self._pieces_before.append(self._last_pieces[place])
            self._last_pieces[place] = last + 1
        self._end = end
        self._kept.pop(number, None)

    def finish(self, number: int, *, costs_budget: bool, loss: float | None) -> None:
        """The trial has ended; `loss` is None where it does not rank."""
        place = self._place(number)
        is_search = self._flags[place] & _IS_SEARCH
        self._flags[place] = is_search | _IS_FINISHED | (_COSTS_BUDGET if costs_budget else 0)
        if loss is not None:
            self._losses[place] = loss

    def is_search(self, number: int) -> bool:
        """Whether it was proposed by the search itself (a confirmation was not)."""
        return bool(self._flags[self._place(number)] & _IS_SEARCH)

    def costs_budget(self, number: int) -> bool:
        return bool(self._flags[self._place(number)] & _COSTS_BUDGET)

    def is_finished(self, number: int) -> bool:
        return bool(self._flags[self._place(number)] & _IS_FINISHED)

    def loss(self, number: int) -> float | None:
        """The loss by which it ranks; None where it does not, or not yet."""
        loss = self._losses[self._place(number)]
        return None if math.isnan(loss) else loss

    def config_key(self, number: int) -> int:
        """The same for every trial of one configuration."""
        return self._keys[self._place(number)]

    def _find(self, number: int) -> int | None:
        place = number - 1
        if 0 <= place < len(self._numbers) and self._numbers[place] == number:
            return place
        return self._odd_places.get(number)

    def _place(self, number: int) -> int:
        place = self._find(number)
        if place is None:
            raise KeyError(number)
        return place

    def _read(self, place: int) -> Trial:
        assert self._path is not None, "trials come from a ledger"
        pieces, piece = [], self._last_pieces[place]
        while piece >= 0:
            pieces.append(piece)
            piece = self._pieces_before[piece]
        events = []
        with self._path.open("rb") as file:
            for piece in reversed(pieces):
                file.seek(self._spots[piece])
                events += [self._parse(file.readline()) for _ in range(self._counts[piece])]
        return fold_trial(events)

    def _parse(self, line: bytes) -> Event:
        try:
            return EVENT.validate_json(line)
        except ValidationError:
            raise UserError(
                f"{str(self._path)!r} is damaged, or another file took its place: a line is not what it was"
            ) from None
