"""The knobs of a search space as parameters of an Optuna study, and back.

Numbers are integer or float distributions that contain their choices, so that a study shows real values and samplers
know the order. Text that `knobs.yaml` orders is its position among the choices for a sampler, and itself in a study
that people read. Everything else is categorical.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from cclsearch.core.values import Config, Value
from cclsearch.scoring.objective import Objective
from cclsearch.space.table import Knob, Space


def search_space_distributions(space: Space) -> dict[str, BaseDistribution]:
    """Return the distributions for `study.ask`: every knob, with values that are configurations as they are."""
    return describe_knobs(space.knobs)


def study_directions(objective: Objective) -> list[str]:
    """Return the directions for `optuna.create_study`: of each metric, or of the loss if metrics are weighted."""
    return ["minimize"] if objective.is_weighted else [term.direction.value for term in objective.terms]


def describe_knobs(knobs: Sequence[Knob], *, as_positions: bool = False) -> dict[str, BaseDistribution]:
    """Return knob -> distribution; with `as_positions` text that has an order is its position."""
    return {knob.name: describe_knob(knob, as_positions=as_positions) for knob in knobs}


def describe_knob(knob: Knob, *, as_positions: bool = False) -> BaseDistribution:
    """Return the distribution of one knob, whose values contain its choices."""
    if not knob.is_numeric:
        ordered = knob.ordered_choices
        if ordered is None or not as_positions:
            return CategoricalDistribution(ordered or knob.choices)
        return IntDistribution(0, len(ordered) - 1)
    values = sorted(float(choice) for choice in knob.choices)
    low, high = values[0], values[-1]
    if all(isinstance(choice, int) for choice in knob.choices):
        step = math.gcd(*(int(value - low) for value in values)) or 1
        if len(values) == (high - low) // step + 1:
            return IntDistribution(int(low), int(high), step=step)
        return IntDistribution(int(low), int(high), log=_is_logarithmic(values))
    return FloatDistribution(low, high, log=_is_logarithmic(values))


def _is_logarithmic(values: Sequence[float]) -> bool:
    """Whether the gaps between ascending values are more even on a logarithmic scale; whole numbers need 1 or more."""
    if values[0] <= 0 or len(values) < 3 or (values[0] < 1 and values[0].is_integer()):
        return False
    linear, logarithmic = np.diff(values), np.diff(np.log(values))
    return bool(logarithmic.std() / logarithmic.mean() < linear.std() / linear.mean())


@dataclass(frozen=True, eq=False)
class StudyParameters:
    """The parameters of a study over a space: distributions, conversion, and the nearest configuration to a draw."""

    space: Space
    as_positions: bool = False
    """Whether ordered text becomes its position among the choices."""

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Knob -> distribution."""
        return describe_knobs(self.space.knobs, as_positions=self.as_positions)

    def encode(self, config: Mapping[str, Value]) -> dict[str, Any]:
        """Return the parameters of a configuration of the space; a lever that it does not name has its default."""
        values = {knob.name: config.get(knob.name, knob.neutral) for knob in self.space.knobs}
        return {name: self._positions[name].index(value) if name in self._positions and value is not None else value
                for name, value in values.items()}  # fmt: skip

    def find_row(self, params: Mapping[str, Any]) -> int | None:
        """Return the row with these parameters; None if it is not in the space."""
        try:
            decoded = {name: self._positions[name][v] if name in self._positions else v for name, v in params.items()}
        except (IndexError, TypeError):
            return None
        return self.space.row(Config(decoded))

    def find_nearest(self, params: Mapping[str, Any], free_N: NDArray[np.bool_]) -> int:
        """Return the free row with the fewest steps from a draw; a category that differs counts as one step.

        Raises ValueError if no row is free.
        """
        rows = np.flatnonzero(free_N)
        if not len(rows):
            raise ValueError("no configuration is free")
        steps = np.zeros(len(rows))
        for k, knob in enumerate(self.space.knobs):
            if knob.name in params and len(knob.choices) > 1:
                steps += self._count_steps(knob, params[knob.name])[self.space.codes_NK[rows, k]]
        return int(rows[int(np.argmin(steps))])

    def _count_steps(self, knob: Knob, value: Any) -> NDArray[np.float64]:
        """(choices,) steps from each choice to a value, which may be between two choices."""
        ordered = knob.ordered_choices
        if ordered is None:
            same = [type(choice) is type(value) and choice == value for choice in knob.choices]
            return 1.0 - np.array(same, dtype=np.float64)
        position_of = {choice: n for n, choice in enumerate(ordered)}
        own = np.array([position_of[choice] for choice in knob.choices], dtype=np.float64)
        if not knob.is_numeric:
            return np.abs(own - (value if self.as_positions else position_of[value]))
        grid = np.array(ordered, dtype=np.float64)
        if getattr(self.distributions[knob.name], "log", False):
            grid, value = np.log(grid), math.log(value)
        position = float(np.interp(value, grid, np.arange(len(grid))))
        return np.asarray(np.abs(own - position))

    @cached_property
    def _positions(self) -> dict[str, tuple[Value, ...]]:
        """Knob -> its ordered text, for those that are positions."""
        if not self.as_positions:
            return {}
        return {k.name: k.ordered_choices for k in self.space.knobs if not k.is_numeric and k.ordered_choices}
