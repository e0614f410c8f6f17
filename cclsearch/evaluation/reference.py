"""Choose good references: configurations unlike the strategy's favorites and unlike the trials that disagree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Config
from cclsearch.propose.base import SearchView
from cclsearch.space.knobs import canonical_name, meaning_of
from cclsearch.space.table import Space

MAX_ROWS = 20_000
"""Number of rows of a search space among which a reference is chosen, evenly spread over a larger one."""
MAX_VOTERS = 100
"""Number of latest trials with which each of these rows is compared."""


def rank_references(view: SearchView, voters: Sequence[Config], *, is_first: bool) -> Iterator[Config]:
    """Yield configurations that no trial had, the best reference first.

    The first reference is the simplest layout: with the most knobs at their neutral value, and the fewest accelerators,
    so that nothing is switched on that a script could skip. The next ones are as unlike all voters as possible, by the
    number of knobs with another value: a script that cheats for some values of some knobs is honest there.
    """
    space = view.space
    rows = np.flatnonzero(~view.taken_N)
    rows = rows[:: max(1, -(-len(rows) // MAX_ROWS))]
    unlike_N = count_differences(space, rows, voters)
    simple_N = count_neutral(space, rows) - np.log(space.num_accelerators_N[rows])
    first, second = (simple_N, unlike_N) if is_first else (unlike_N, simple_N)
    for index in np.lexsort((rows, -second, -first)):
        yield space.config(int(rows[index]))


def count_differences(space: Space, rows: NDArray[np.int64], voters: Sequence[Config]) -> NDArray[np.int64]:
    """(N,) number of knobs in which each row differs from its most similar voter; all, without voters."""
    known = [row for config in voters[-MAX_VOTERS:] if (row := space.row(config)) is not None]
    fewest_N = np.full(len(rows), len(space.knobs))
    for row in known:
        fewest_N = np.minimum(fewest_N, (space.codes_NK[rows] != space.codes_NK[row]).sum(axis=1))
    return fewest_N


def count_neutral(space: Space, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N,) number of knobs of each row with their neutral value."""
    neutral_N = np.zeros(len(rows), dtype=np.int64)
    for k, knob in enumerate(space.knobs):
        neutral = meaning_of(canonical_name(knob.name)).neutral
        codes = [
            code for code, choice in enumerate(knob.choices) if choice == neutral and type(choice) is type(neutral)
        ]
        neutral_N += np.isin(space.codes_NK[rows, k], codes)
    return neutral_N
