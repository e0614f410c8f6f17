"""The Gaussian process kernel over configurations, for the residual of the closed form; works for any knobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Value
from cclsearch.space.knobs import KNOBS, canonical_name
from cclsearch.space.table import Knob, Space
from cclsearch.stats.columns import take_rows

Array = NDArray[np.float64]
Codes = NDArray[np.int16]

MAX_COORDINATE_SPAN = 3.0
"""Span, in units of one doubling, of a numeric knob with values of 0 or below or with a very wide range."""


@dataclass(frozen=True, eq=False)
class Features:
    """N configurations as D numeric coordinates (one unit is about one doubling) and C categories."""

    numbers_ND: Array
    categories_NC: NDArray[np.int16]
    """Code of each categorical knob or switch; the kernel uses only whether two codes are equal."""
    unknown_NU: NDArray[np.int16]
    """Code of each knob without an entry in `knobs.yaml`, which no closed form covers."""
    jobs_NJ: Array | None = None
    """Loadings of each row's job on the part common to all jobs, and on each job's own. None: one job."""

    def __len__(self) -> int:
        return len(self.numbers_ND)

    def take(self, rows: NDArray[np.int64]) -> Features:
        """Return the features of these rows."""
        return take_rows(self, rows)

    def with_number(self, number_N: Array) -> Features:
        """Return the features with one more numeric coordinate."""
        return replace(self, numbers_ND=np.column_stack([self.numbers_ND, number_N]))


def read_features(space: Space) -> Features:
    """Return the features of a space: numbers on a centered log scale; knobs with one choice are left out."""
    numbers, categories, unknown = [], [], []
    for k, knob in enumerate(space.knobs):
        codes = space.masked_NK[:, k]
        if len(knob.choices) < 2:
            continue
        if canonical_name(knob.name) not in KNOBS:
            unknown.append(codes)
        if knob.is_numeric and len(knob.choices) > 2:
            numbers.append(_coordinates(knob, knob.choices)[codes])
        else:
            categories.append(codes)
    return _stack(numbers, categories, unknown, len(space))


def place_configs(space: Space, configs: Sequence[Mapping[str, Value]]) -> Features:
    """Return the features of these configurations in the coordinates of a space.

    A choice of a category that the space lacks has a separate code. Every configuration must have the knobs of the
    space; differences in a knob with one choice are invisible.
    """
    numbers, categories = [], []
    for knob in space.knobs:
        values = [config[knob.name] for config in configs]
        if len(knob.choices) < 2:
            continue
        if knob.is_numeric and len(knob.choices) > 2:
            numbers.append(_coordinates(knob, values))
        else:
            known = list(dict.fromkeys((isinstance(value, bool), value) for value in (*knob.choices, *values)))
            categories.append(np.array([known.index((isinstance(value, bool), value)) for value in values], np.int16))
    return _stack(numbers, categories, [], len(configs))


def _stack(numbers: list[Array], categories: list[Codes], unknown: list[Codes], size: int) -> Features:
    """Return the features with these columns, of so many configurations."""
    numbers_ND = np.column_stack([np.zeros((size, 0)), *numbers])
    codes = (np.column_stack([np.zeros((size, 0), dtype=np.int16), *columns]) for columns in (categories, unknown))
    return Features(numbers_ND, *codes)


def _coordinates(knob: Knob, values: Sequence[Value]) -> Array:
    """(n,) coordinates of these values of a knob, whose choices set scale and center."""
    choices, at = (np.array([float(value) for value in each]) for each in (knob.choices, values))
    is_log = bool(np.all(choices > 0))
    scaled = np.log2(choices) if is_log else choices
    span = float(np.ptp(scaled)) or 1.0
    unit = span / MAX_COORDINATE_SPAN if not is_log or span > 3 * MAX_COORDINATE_SPAN else 1.0
    found = np.log2(np.maximum(at, choices.min() / 2)) if is_log else at
    return np.asarray((found - scaled.mean()) / unit)


def kernel(left: Features, right: Features, shape: KernelShape) -> Array:
    """(n, m) prior covariance of the residual between two sets of configurations."""
    gap = left.numbers_ND[:, None, :] - right.numbers_ND[None, :, :]
    near = np.exp(-0.5 * np.sum(gap * gap, axis=-1) / shape.length_scale_log2**2)
    differ = left.categories_NC[:, None, :] != right.categories_NC[None, :, :]
    same = shape.category_correlation ** differ.sum(axis=-1)
    slopes = left.numbers_ND @ right.numbers_ND.T
    effects = (~differ).sum(axis=-1)
    found = shape.amplitude**2 * near * same + shape.slope**2 * slopes + shape.category_sd**2 * effects
    if left.jobs_NJ is not None and right.jobs_NJ is not None:
        found *= left.jobs_NJ @ right.jobs_NJ.T  # intrinsic coregionalization (Bonilla et al. 2007, equation 1)
    return np.asarray(found)


def kernel_diagonal(features: Features, shape: KernelShape) -> Array:
    """(n,) prior variance of the residual."""
    slopes = np.sum(features.numbers_ND**2, axis=1)
    found = shape.amplitude**2 + shape.slope**2 * slopes + shape.category_sd**2 * features.categories_NC.shape[1]
    return np.asarray(found if features.jobs_NJ is None else found * np.sum(features.jobs_NJ**2, axis=1))


@dataclass(frozen=True)
class KernelShape:
    """Hyperparameters of the kernel: how far the closed form may be off, in log seconds (or log GiB)."""

    amplitude: float
    """Standard deviation of the local (squared-exponential) term."""
    length_scale_log2: float
    """Length scale of that term, in doublings of a knob."""
    slope: float
    """Standard deviation of a linear trend, per doubling of a knob."""
    category_sd: float
    """Standard deviation of the effect of a category or switch."""
    category_correlation: float = 0.7
    """Correlation of the local term between two configurations that differ in one category."""

    def scaled(self, factor: float) -> KernelShape:
        """Return the shape with every standard deviation times `factor`, at the same length scale."""
        return replace(
            self, amplitude=self.amplitude * factor, slope=self.slope * factor, category_sd=self.category_sd * factor
        )
