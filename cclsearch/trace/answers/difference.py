"""The difference of two traces by kernel family and by operator: where the second spends more or less device time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.answers.operators import seconds_by_operator
from cclsearch.trace.events import Kind
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.names.kernels import ComputeClass, kernel_family
from cclsearch.trace.view import RankView, TraceView

Figures = Mapping[str, tuple[float, float]]
"""Name -> (summed device seconds, device rows) per step, mean over ranks."""


@dataclass(frozen=True)
class NamedChange:
    """One kernel family or operator in both traces; seconds and counts are per step, mean over ranks."""

    name: str
    first_s: float
    second_s: float
    first_count: float
    second_count: float
    share: float
    """Its change over the sum of all changes regardless of sign: positive if the second trace spends more."""

    @property
    def change_s(self) -> float:
        """Seconds that the second trace spends more."""
        return self.second_s - self.first_s

    def as_data(self) -> dict[str, JsonValue]:
        """Return plain data."""
        return {
            "name": self.name,
            "a_s": self.first_s,
            "b_s": self.second_s,
            "difference_s": self.change_s,
            "a_count": self.first_count,
            "b_count": self.second_count,
            "share_of_change": self.share,
        }


_TILE = re.compile(r"(?<![A-Za-z0-9])\d+(?:x\d+)+(?![A-Za-z0-9])")
_TENSILE = re.compile(r"(?<=^Cijk_)(.*?)_MT\d.*$")


def comparable_family(kernel: str) -> str:
    """Return the kernel's family without tile sizes."""
    # A library chooses its tile sizes anew for every shape.
    family = kernel_family(kernel)
    return _TENSILE.sub(r"\1", family) if family.startswith("Cijk_") else _TILE.sub("*", family)


def seconds_by_family(trace: TraceView) -> Figures:
    """Return the figures of every kernel family, communication and copies included."""
    found: dict[str, tuple[float, float]] = {}
    for view in trace.ranks.values():
        _add_figures(found, trace, view, view.device_rows, comparable_family)
    return found


def _add_figures(
    found: dict[str, tuple[float, float]], trace: TraceView, view: RankView, rows: Int64s, label: Callable[[str], str]
) -> None:
    """Add a rank's part of the mean over ranks: seconds and number of these rows by label of their names."""
    seconds_N, count_N = view.sum_by_name(rows)
    for number in np.flatnonzero(count_N).tolist():
        name = label(view.table.names[number])
        seconds, count = found.get(name, (0.0, 0.0))
        more_s, more = float(seconds_N[number]) / len(trace.ranks), float(count_N[number]) / len(trace.ranks)
        found[name] = seconds + more_s, count + more


def compare_figures(first: Figures, second: Figures) -> tuple[NamedChange, ...]:
    """Return the changes of all names in either, the largest first."""
    names = sorted({*first, *second})  # sums of floats depend on the order
    pairs = [(name, first.get(name, (0.0, 0.0)), second.get(name, (0.0, 0.0))) for name in names]
    whole = sum(abs(two[0] - one[0]) for _, one, two in pairs)
    changes = [
        NamedChange(name, one[0], two[0], one[1], two[1], (two[0] - one[0]) / whole if whole else 0.0)
        for name, one, two in pairs
    ]
    return tuple(sorted(changes, key=lambda change: (-abs(change.change_s), change.name)))


BY: Mapping[str, Callable[[TraceView], Figures]] = {"families": seconds_by_family, "operators": seconds_by_operator}
"""Ways to compare two traces."""


def compare_traces(first: TraceView, second: TraceView) -> dict[str, tuple[NamedChange, ...]]:
    """Return the changes by kernel family and by operator (empty without launches inside operators)."""
    return {by: compare_figures(figures(first), figures(second)) for by, figures in BY.items()}


@dataclass(frozen=True)
class UnknownKernel:
    """A compute kernel whose name matches no line of the table of classes."""

    name: str
    seconds: float
    """Summed per step, mean over ranks."""
    share: float
    """Share of the summed time of all compute kernels."""
    num_kernels: float
    """Per step, mean over ranks."""


def list_unclassified(trace: TraceView) -> tuple[UnknownKernel, ...]:
    """Return the compute kernels of class `other`, the longest first."""
    found: dict[str, tuple[float, float]] = {}
    total = 0.0
    for view in trace.ranks.values():
        table = view.table
        if table.accelerator == "cpu":
            continue  # operators of the host, which need no class
        rows = view.rows(Kind.COMPUTE)
        total += float(view.sum_by_name(rows)[0].sum()) / len(trace.ranks)
        _add_figures(found, trace, view, rows[table.name_class[table.name_id[rows]] == ComputeClass.OTHER], str)
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(UnknownKernel(name, s, s / total if total else 0.0, calls) for name, (s, calls) in ordered)
