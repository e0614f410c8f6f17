"""Knobs that change nothing: configurations that differ only in such knobs are one configuration.

A knob declares when it has no effect: by the degrees of parallelism that it needs (`needs` in knobs.yaml: nothing is
sharded over one rank), by values of other knobs (`inert_when` in knobs.yaml), or in a framework file by a rule
`implies` with `same: true`. The run is then the same for every value of the knob, so the search proposes, lists and
learns it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Value, same_value
from cclsearch.space.knobs import canonical_name, meaning_of

When = tuple[tuple[str, tuple[Value, ...]], ...]
"""Knob and values of it, for each of several knobs; it holds if every one of them has one of its values."""


@dataclass(frozen=True)
class InertWhen:
    """Values of other knobs with which a knob changes nothing."""

    when: When
    keep: Value
    """Value of the knob that represents all of its values then."""


@dataclass(frozen=True)
class InertKnob:
    """A knob of a space with one condition under which it changes nothing, as positions."""

    column: int
    keep: int
    """Position of the value that represents all."""
    when: tuple[tuple[int, tuple[int, ...]], ...]
    """Column and positions of values, for each knob of the condition."""


def read_inert(name: str, choices: Mapping[str, Sequence[Value]]) -> tuple[InertWhen, ...]:
    """Return the conditions in knobs.yaml under which a knob with these choices changes nothing."""
    values, meaning = choices[name], meaning_of(canonical_name(name))
    kept = next((value for value in values if same_value(value, meaning.neutral)), values[0])
    present = {canonical_name(other): other for other in choices}
    degrees = [present[need] for need in meaning.needs if need in present]
    found = [InertWhen(tuple((degree, (1,)) for degree in degrees), kept)] if degrees else []
    if meaning.inert_when and all(other in present for other in meaning.inert_when):
        when = tuple((present[other], tuple(listed)) for other, listed in meaning.inert_when.items())
        found.append(InertWhen(when, kept))
    return tuple(found)


def list_inert(
    choices: Mapping[str, Sequence[Value]], declared: Mapping[str, Iterable[InertWhen]]
) -> tuple[InertKnob, ...]:
    """Return every condition under which a knob with several choices changes nothing; a framework gives `declared`."""
    columns = {name: column for column, name in enumerate(choices)}
    found = []
    for name, values in choices.items():
        if len(values) < 2:
            continue
        for inert in (*read_inert(name, choices), *declared.get(name, ())):
            keep = _positions(values, (inert.keep,))
            if keep and all(other in columns for other, _ in inert.when):
                when = tuple((columns[other], _positions(choices[other], listed)) for other, listed in inert.when)
                found.append(InertKnob(columns[name], keep[0], when))
    return tuple(found)


def mask_inert(codes_NK: NDArray[np.int16], inert: Sequence[InertKnob]) -> NDArray[np.int16]:
    """(N, K) the positions of choices; a knob without effect has the position of the value that represents all.

    Two configurations are the same run if their masked positions are equal.
    """
    masked_NK = codes_NK.copy() if inert else codes_NK
    for _ in inert:  # a replaced value may leave another knob without effect
        is_changed = False
        for one in inert:
            idle_N = masked_NK[:, one.column] != one.keep
            for column, positions in one.when:
                idle_N &= np.isin(masked_NK[:, column], positions)
            masked_NK[idle_N, one.column] = one.keep
            is_changed |= bool(idle_N.any())
        if not is_changed:
            break
    return masked_NK


def find_idle(masked_NK: NDArray[np.int16], inert: Sequence[InertKnob], column: int) -> NDArray[np.bool_]:
    """(N,) whether the knob of that column changes nothing in each configuration, given its masked positions."""
    idle_N = np.zeros(len(masked_NK), dtype=bool)
    for one in inert:
        if one.column == column:
            conditions = [np.isin(masked_NK[:, other], positions) for other, positions in one.when]
            idle_N |= np.logical_and.reduce(conditions)
    return idle_N


def _positions(values: Sequence[Value], wanted: Iterable[Value]) -> tuple[int, ...]:
    return tuple(n for n, value in enumerate(values) if any(same_value(value, one) for one in wanted))
