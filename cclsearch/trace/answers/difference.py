"""The difference of two traces by kernel family and by operator: where the second spends more or less device time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.answers.operators import seconds_by_operator
from cclsearch.trace.events import Kind
from cclsearch.trace.names.kernels import kernel_family
from cclsearch.trace.view import TraceView

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
        table = view.table
        rows = view.in_windows(view.device_rows)
        scale = 1.0 / max(len(view.windows.spans_W2), 1) / len(trace.ranks)
        ns = np.bincount(table.name_id[rows], weights=table.dur_ns[rows].astype(float), minlength=len(table.names))
        count = np.bincount(table.name_id[rows], minlength=len(table.names))
        for name_id in np.flatnonzero(count).tolist():
            family = comparable_family(table.names[name_id])
            seconds, calls = found.get(family, (0.0, 0.0))
            found[family] = (seconds + float(ns[name_id]) * 1e-9 * scale, calls + float(count[name_id]) * scale)
    return found


def compare_figures(first: Figures, second: Figures) -> tuple[NamedChange, ...]:
    """Return the changes of all names in either, the largest first."""
    names = sorted({*first, *second})  # sums of floats depend on the order
    none = (0.0, 0.0)
    whole = sum(abs(second.get(name, none)[0] - first.get(name, none)[0]) for name in names)
    changes = [
        NamedChange(
            name,
            first.get(name, none)[0],
            second.get(name, none)[0],
            first.get(name, none)[1],
            second.get(name, none)[1],
            (second.get(name, none)[0] - first.get(name, none)[0]) / whole if whole else 0.0,
        )
        for name in names
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
        rows = view.in_windows(view.rows(Kind.COMPUTE))
        scale = 1.0 / max(len(view.windows.spans_W2), 1) / len(trace.ranks)
        ns = np.bincount(table.name_id[rows], weights=table.dur_ns[rows].astype(float), minlength=len(table.names))
        total += float(ns.sum()) * 1e-9 * scale
        count = np.bincount(table.name_id[rows], minlength=len(table.names))
        for name_id in np.flatnonzero((count > 0) & (table.name_class == 0)).tolist():
            seconds, calls = found.get(table.names[name_id], (0.0, 0.0))
            more = (float(ns[name_id]) * 1e-9 * scale, float(count[name_id]) * scale)
            found[table.names[name_id]] = (seconds + more[0], calls + more[1])
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(UnknownKernel(name, s, s / total if total else 0.0, calls) for name, (s, calls) in ordered)
