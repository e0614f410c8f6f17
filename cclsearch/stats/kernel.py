"""Distances between configurations: what the surrogate of the residual knows of a knob, whatever it is called."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.space.table import Knob, Space

Array = NDArray[np.float64]

_IDLE_AT_ONE = {
    "sequence_parallel": "tp",
    "zero_stage": "dp",
    "distributed_optimizer": "dp",
    "virtual_pipeline": "pp",
}
"""Knob -> the degree without which it does nothing."""
MAX_COORDINATE_SPAN = 3.0
"""A numeric knob that is no power of two is stretched to at most this many units."""


@dataclass(frozen=True, eq=False)
class Features:
    """N configurations as coordinates (one unit is about one doubling) and as words."""

    numbers_ND: Array
    categories_NC: NDArray[np.int16]
    """Code of each word or switch; equal or not is all that is known of them."""

    def __len__(self) -> int:
        return len(self.numbers_ND)

    def take(self, rows: NDArray[np.int64]) -> Features:
        """These rows only."""
        return Features(self.numbers_ND[rows], self.categories_NC[rows])


def read_features(space: Space) -> Features:
    """Coordinates of a space: numbers on a log scale, centred; knobs with one value say nothing and are left out."""
    numbers, words = [], []
    for k, knob in enumerate(space.knobs):
        codes = _still(space, knob.name, space.codes_NK[:, k])
        if len(knob.choices) < 2:
            continue
        if knob.is_numeric and len(knob.choices) > 2:
            numbers.append(_coordinates(knob)[codes])
        else:
            words.append(codes)
    size = len(space)
    numbers_ND = np.column_stack(numbers) if numbers else np.zeros((size, 0))
    categories_NC = np.column_stack(words).astype(np.int16) if words else np.zeros((size, 0), dtype=np.int16)
    return Features(numbers_ND, categories_NC)


def _still(space: Space, name: str, codes_N: NDArray[np.int16]) -> NDArray[np.int16]:
    """The codes of a knob, one and the same wherever it does nothing: there two configurations are the same run."""
    degree = _IDLE_AT_ONE.get(name)
    if degree is None or not space.has(degree):
        return codes_N
    place = [knob.name for knob in space.knobs].index(degree)
    idle = np.array([choice == 1 for choice in space.knobs[place].choices])[space.codes_NK[:, place]]
    return np.where(idle, np.int16(0), codes_N)


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
    """How far the closed form may be off, in units of log seconds (or log GiB)."""

    amplitude: float
    """Standard deviation of local deviations."""
    length_scale_log2: float
    """Doublings over which such a deviation reaches."""
    slope: float
    """Standard deviation of a trend, per doubling of a knob."""
    category_sd: float
    """Standard deviation of the effect of a word or switch."""
    category_correlation: float = 0.7
    """What two configurations that differ in one word keep in common."""

    def scaled(self, factor: float) -> KernelShape:
        """The same reach with deviations that many times as large."""
        return replace(
            self, amplitude=self.amplitude * factor, slope=self.slope * factor, category_sd=self.category_sd * factor
        )
