"""Pareto fronts: the non-dominated trials, their hypervolume, their knee, and the best point for each weight.

Every metric is minimized: `Objective.values` gives them that sign. Arrays: N points, M metrics (1 to 3), F points on
the Pareto front.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.errors import UserError

Floats = NDArray[np.float64]


def find_pareto_front(values_NM: Floats) -> NDArray[np.bool_]:
    """(N,) whether a point is on the Pareto front: no other is at least as good in all metrics and better in one."""
    mask = np.ones(len(values_NM), dtype=bool)
    for n, point in enumerate(values_NM):
        no_worse = np.all(values_NM <= point, axis=1)
        better = np.any(values_NM < point, axis=1)
        mask[n] = not np.any(no_worse & better)
    return mask


def measure_hypervolume(values_NM: Floats, reference_M: Floats) -> float:
    """Return the exact volume that the points dominate up to the reference point (M of 1 to 3), 0 if none does."""
    inside = values_NM[np.all(values_NM < reference_M, axis=1)]
    if not len(inside):
        return 0.0
    if values_NM.shape[1] == 1:
        return float(reference_M[0] - inside.min())
    if values_NM.shape[1] == 2:
        return _area(inside, reference_M)
    if values_NM.shape[1] == 3:
        return _volume(inside, reference_M)
    raise ValueError(f"a Pareto front has 1 to 3 metrics; got {values_NM.shape[1]}")


def _area(points_N2: Floats, reference_2: Floats) -> float:
    order = np.lexsort((points_N2[:, 1], points_N2[:, 0]))
    lowest = np.minimum.accumulate(points_N2[order, 1])
    widths = np.diff(np.append(points_N2[order, 0], reference_2[0]))
    return float(np.sum(widths * (reference_2[1] - lowest)))


def _volume(points_N3: Floats, reference_3: Floats) -> float:
    points = points_N3[np.argsort(points_N3[:, 2])]
    heights = np.diff(np.append(points[:, 2], reference_3[2]))
    return float(sum(h * _area(points[: n + 1, :2], reference_3[:2]) for n, h in enumerate(heights) if h > 0))


def log_axes(values_NM: Floats) -> Floats:
    """Return the points with the logarithm of every metric that is always above 0."""
    positive = np.all(values_NM > 0, axis=0)
    return np.where(positive, np.log(np.where(positive, values_NM, 1.0)), values_NM)


def choose_reference_point(values_NM: Floats, margin: float = 0.1) -> Floats:
    """(M,) reference point: the worst value of each metric plus `margin` times its range.

    Given the Pareto front alone, it is the nadir plus a margin, so that the ends of the front count (Ishibuchi et al.
    2018).
    """
    worst, best = values_NM.max(axis=0), values_NM.min(axis=0)
    return np.asarray(worst + np.where(worst > best, margin * (worst - best), margin))


def cumulative_hypervolume(values_NM: Floats, reference_M: Floats) -> Floats:
    """(N,) hypervolume of the first 1, 2, ... N points; made monotonic against rounding."""
    volumes_N = [measure_hypervolume(values_NM[: n + 1], reference_M) for n in range(len(values_NM))]
    return np.maximum.accumulate(np.array(volumes_N))


def find_knee(values_FM: Floats) -> int | None:
    """Return the row of the knee: the point furthest below the line (plane) through the ends of the Pareto front.

    Axes are scaled to the range of the front (Das 1999, boundary line). None with fewer than three points or no bend.
    """
    if len(values_FM) < 3:
        return None
    spread = log_axes(values_FM)
    low, high = spread.min(axis=0), spread.max(axis=0)
    scaled = (spread - low) / np.where(high > low, high - low, 1.0)
    depth = 1.0 - scaled.sum(axis=1) if spread.shape[1] == 2 else -np.linalg.norm(scaled, axis=1)
    best = int(np.argmax(depth))
    return best if spread.shape[1] > 2 or depth[best] > 1e-9 else None


@dataclass(frozen=True)
class WeightRange:
    """A point that is the best over a range of weights."""

    point: int
    from_weight: float
    to_weight: float


def choose_by_weight(score_at_0_N: Floats, score_at_1_N: Floats) -> list[WeightRange]:
    """Return the point of the highest score for each range of weights from 0 to 1; scores are linear in the weight.

    The borders between ranges are exact, not from a grid. Of equal points the first is chosen.
    """
    if not len(score_at_0_N):
        return []
    ranges: list[WeightRange] = []
    weight, slope_N = 0.0, score_at_1_N - score_at_0_N
    at_N = score_at_0_N
    point = int(max(np.flatnonzero(at_N == at_N.max()), key=lambda n: (slope_N[n], -n)))
    while True:
        rising = np.flatnonzero(slope_N > slope_N[point])
        gaps = score_at_0_N[point] - score_at_0_N[rising]
        flips = gaps / (slope_N[rising] - slope_N[point])
        ahead = [(max(float(w), weight), int(n)) for w, n in zip(flips, rising, strict=True) if w < 1]
        if not ahead:
            return [*ranges, WeightRange(point, weight, 1.0)]
        flip = min(w for w, _ in ahead)
        successor = max((n for w, n in ahead if w <= flip + 1e-12), key=lambda n: (slope_N[n], -n))
        if flip > weight or not ranges:
            ranges.append(WeightRange(point, weight, flip))
        weight, point = flip, successor


def parse_weights(text: str) -> tuple[float, ...]:
    """Return the weights in `0:1:0.1` (from:to:step, both ends included) or `0,0.25,1`; raises UserError otherwise."""
    with suppress(ValueError, OverflowError):
        if ":" in text:
            low, high, step = (float(part) for part in text.split(":"))
            if 0 <= low <= high <= 1 and step >= 1e-4:
                count = int(np.floor((high - low) / step + 1e-9)) + 1
                return tuple(round(low + n * step, 10) for n in range(count))
        else:
            weights = tuple(sorted({float(part) for part in text.split(",")}))
            if all(0 <= weight <= 1 for weight in weights):
                return weights
    raise UserError(f"weights must be from:to:step (`0:1:0.1`) or a list (`0,0.5,1`), each from 0 to 1, not {text!r}")


def hypervolume_contributions(values_NM: Sequence[Sequence[float]], reference_M: Floats) -> Floats:
    """(N,) exclusive contribution of each point: the hypervolume that is lost without it."""
    values = np.asarray(values_NM, dtype=float)
    total = measure_hypervolume(values, reference_M)
    without = [measure_hypervolume(np.delete(values, n, axis=0), reference_M) for n in range(len(values))]
    return total - np.array(without)
