"""The Gaussian process kernel over configurations, for the residual of the closed form; works for any knobs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.space.knobs import KNOBS, canonical_name
from cclsearch.space.table import Knob, Space

Array = NDArray[np.float64]

MAX_COORDINATE_SPAN = 3.0
"""Span, in units of one doubling, of a numeric knob with values of 0 or below or with a very wide range."""


@dataclass(frozen=True, eq=False)
class Features:
    """N configurations as D numeric coordinates (one unit is about one doubling) and C categories."""

    numbers_ND: Array
    categories_NC: NDArray[np.int16]
    """Code of each categorical knob or switch; the kernel uses only whether two codes are equal."""
    unknown_NU: NDArray[np.int16]
    """Code of each knob without an entry in `knobs.yaml`: no closed form knows what its values do."""

    def __len__(self) -> int:
        return len(self.numbers_ND)

    def take(self, rows: NDArray[np.int64]) -> Features:
        """Return the features of these rows."""
        return Features(self.numbers_ND[rows], self.categories_NC[rows], self.unknown_NU[rows])

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
            numbers.append(_coordinates(knob)[codes])
        else:
            categories.append(codes)
    size = len(space)
    numbers_ND = np.column_stack(numbers) if numbers else np.zeros((size, 0))
    return Features(numbers_ND, _stack_codes(categories, size), _stack_codes(unknown, size))


def _stack_codes(codes: list[NDArray[np.int16]], size: int) -> NDArray[np.int16]:
    return np.column_stack(codes).astype(np.int16) if codes else np.zeros((size, 0), dtype=np.int16)


def _coordinates(knob: Knob) -> Array:
    values = np.array([float(choice) for choice in knob.choices])
    scaled = np.log2(values) if np.all(values > 0) else values
    span = float(np.ptp(scaled)) or 1.0
    if np.any(values <= 0) or span > 3 * MAX_COORDINATE_SPAN:
        scaled = scaled / span * MAX_COORDINATE_SPAN
    return np.asarray(scaled - scaled.mean())


def kernel(left: Features, right: Features, shape: KernelShape) -> Array:
    """(n, m) prior covariance of the residual between two sets of configurations."""
    gap = left.numbers_ND[:, None, :] - right.numbers_ND[None, :, :]
    near = np.exp(-0.5 * np.sum(gap * gap, axis=-1) / shape.length_scale_log2**2)
    differ = left.categories_NC[:, None, :] != right.categories_NC[None, :, :]
    same = shape.category_correlation ** differ.sum(axis=-1)
    slopes = left.numbers_ND @ right.numbers_ND.T
    effects = (~differ).sum(axis=-1)
    return np.asarray(shape.amplitude**2 * near * same + shape.slope**2 * slopes + shape.category_sd**2 * effects)


def kernel_diagonal(features: Features, shape: KernelShape) -> Array:
    """(n,) prior variance of the residual."""
    slopes = np.sum(features.numbers_ND**2, axis=1)
    return np.asarray(
        shape.amplitude**2 + shape.slope**2 * slopes + shape.category_sd**2 * features.categories_NC.shape[1]
    )


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
