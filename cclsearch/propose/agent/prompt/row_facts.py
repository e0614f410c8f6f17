"""Facts about a configuration's row before any trial: figures of the task, and the closed form with its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cclsearch.propose.base import SearchView
from cclsearch.stats.closed_form import Prediction, predict_space
from cclsearch.stats.kernel import Array

NUM_PARTS = 4
"""Largest parts that a list of parts names; the others are one sum."""
MIN_DIFFERENCE = 0.01
"""Share of the largest difference below which a part is not named."""
MAX_DIFFERENCES = 8
"""Number of parts whose difference `compare` names, the largest first."""


@dataclass(frozen=True, eq=False)
class RowFacts:
    """Figures of every row that need no trial."""

    view: SearchView
    columns: Mapping[str, Sequence[float]]
    """Column -> (N,) a figure that follows from the configuration alone."""
    prediction: Prediction | None
    """By the priors alone; None if the task has no closed form."""

    def column_names(self) -> list[str]:
        """Headings of `figures`: the task's metrics that follow from the primary one, then its columns."""
        return [*self._derived(), *self.columns]

    def figures(self, row: int, value: float | None) -> list[str]:
        """Return the figures of a row with this value of the primary metric."""
        derived = self.view.predictor.derived
        found = [
            float(derived[name].value(np.array([value]), np.array([row]))[0]) if value else None
            for name in self._derived()
        ]
        return [_short(number) for number in (*found, *(float(column[row]) for column in self.columns.values()))]

    def predicted(self, row: int) -> str:
        """The closed form's value of the primary metric; `-` without one."""
        return "-" if self.prediction is None else f"{self.prediction.value_N[row]:.4g}"

    def memory(self, row: int) -> str:
        """Memory and P(fits) by the closed form, in words; empty without one."""
        found = self.prediction
        if found is None or not np.isfinite(found.memory_gib_N[row]):
            return ""
        return f"closed form: {found.memory_gib_N[row]:.3g} GiB, P(fits) {found.fits_N[row]:.2f}"

    def parts(self, row: int) -> str:
        """The largest parts of the closed form, in words; empty without one."""
        return name_largest(self.prediction.parts, row) if self.prediction else ""

    def memory_parts(self, row: int) -> str:
        """The largest parts of the memory by the closed form, in words; empty without one."""
        return name_largest(self.prediction.memory_parts_gib, row, " GiB") if self.prediction else ""

    def differences(self, row: int, other: int) -> str:
        """Return the parts of the closed form of a row less another row's, in words; empty without a closed form."""
        return "" if self.prediction is None else compare_parts(self.prediction, row, other, MAX_DIFFERENCES)

    def _derived(self) -> list[str]:
        predictor, primary = self.view.predictor, self.view.primary.name
        names = self.view.task.agent_metrics
        return [name for name in names if name in predictor.derived and predictor.derived[name].base == primary]


def compare_parts(prediction: Prediction, row: int, other: int, count: int) -> str:
    """The parts of the closed form that differ most between two rows, a row's less the other's, in words."""
    differences = {name: float(part_N[row] - part_N[other]) for name, part_N in (prediction.parts or {}).items()}
    largest = sorted(differences, key=lambda name: -abs(differences[name]))[:count]
    least = MIN_DIFFERENCE * max(map(abs, differences.values()), default=0.0)
    return ", ".join(f"{name} {differences[name]:+.3g}" for name in largest if abs(differences[name]) > least)


def name_largest(parts: Mapping[str, Array] | None, row: int, unit: str = "") -> str:
    """The largest parts of a row and the sum of the others, in words; empty without parts."""
    if not parts:
        return ""
    sizes = sorted(((float(part[row]), name) for name, part in parts.items()), reverse=True)
    named = [f"{name} {size:.3g}" for size, name in sizes[:NUM_PARTS] if size > 0]
    rest = sum(size for size, _ in sizes[NUM_PARTS:])
    return ", ".join([*named, *([f"others {rest:.3g}"] if rest > 0 else [])]) + unit


def read_row_facts(view: SearchView) -> RowFacts:
    """The facts of every row of the view's space."""
    return RowFacts(
        view, view.task.agent_columns(view.card, view.space), predict_space(view.card, view.space, view.predictor)
    )


def _short(number: float | None) -> str:
    return "-" if number is None or not np.isfinite(number) else f"{number:.3g}"
