"""The surrogate of trials that measure several loads and report the one that counts.

Each load of each trial teaches its latencies; draws of all loads of a candidate then show which would count, whether it
keeps the limits, and its cost. So a trial teaches more than the load that won, and limits and cost stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from cclsearch.core.metrics import MetricInfo
from cclsearch.propose.bayes.ensemble import DOUBTED_NOISE, OTHER_RUN_NOISE
from cclsearch.propose.bayes.excess import log_excess
from cclsearch.propose.bayes.mixture import shift_loads
from cclsearch.propose.bayes.models import Drawn, Draws, MetricModels
from cclsearch.stats.calibration import CalibrationData, Posterior, calibrate
from cclsearch.stats.closed_form import Cells, Loads
from cclsearch.stats.kernel import Array

UNLIKE = float(np.log(4.0))
"""Log odds against a server that is unlike the servers of the prior."""
# Servers unlike those that the prior was fitted to have larger errors.
HYPOTHESES = (
    *((1.0, noise, residual, 0.0) for noise in (1.0, 3.0) for residual in (0.5, 1.0, 2.0)),
    *((4.0, 1.0, residual, UNLIKE) for residual in (1.0, 2.0)),
)
"""Scales of the multipliers' standard deviations, of noise and of residual, relative to the prior's, and the log odds
against each.
"""
NUM_DRAWS = 128
"""Draws of the multipliers, over all hypotheses."""
MAX_REPEATS, MAX_VALUES = 4, 4_000_000
"""Draws of the residual for each of these, fewer in a large space: values that are computed at once."""
# Inverting their covariance costs the cube of their number.
MAX_MEASURED = 160
"""Largest number of loads, of all trials, to which the models are fitted."""


class MeasuredLoads(NamedTuple):
    """n measured loads."""

    rows_n: NDArray[np.int64]
    loads_n: Array
    noise_n: Array
    """Relative noise in addition to a run's."""
    metrics: Sequence[Mapping[str, float]]


def collect_loads(loads: Loads, models: MetricModels) -> MeasuredLoads:
    """Return every load that valid trials of the space measured, in this search the latest first, then earlier."""
    own = [(o, DOUBTED_NOISE * (o.trial in models.doubted)) for o in reversed(models.view.observations)]
    found = [
        (o.row, load[loads.metric], noise, load)
        for o, noise in [*own, *((o, OTHER_RUN_NOISE) for o in models.earlier)]
        if o.is_valid and o.row is not None
        for load in (o.loads or (o.metrics,))
        if load.get(loads.metric, 0.0) > 0
    ][:MAX_MEASURED]
    rows, clients, noise, metrics = zip(*found, strict=True) if found else ((), (), (), ())
    return MeasuredLoads(np.array(rows, dtype=np.int64), np.array(clients, dtype=float), np.array(noise), metrics)


@dataclass(frozen=True, eq=False)
class LoadDraws:
    """k equally likely draws of the reports of m rows."""

    log_cost_km: Array
    """Cost of the load that counts; if it breaks a limit, its cost in other draws in which it keeps them."""
    satisfies_km: NDArray[np.bool_]
    """Whether it keeps every limit."""
    excess_km: Array
    """Log of 1 + the excess over the limits."""
    limited: Set[str]
    """Metrics with these limits."""
    noise_k: Array
    """Relative noise of a measurement: of the noisiest metric that the cost follows from."""


def preset_counted(draws: Draws, rng: np.random.Generator) -> LoadDraws:
    """Return draws of the load that counts, and preset its primary metric in `draws`."""
    view, loads = draws.models.view, draws.models.predictor.loads
    assert loads is not None
    counted = _mix_loads(loads, draws.models, draws.rows, rng)
    count = len(counted.noise_k)
    sd_km = np.broadcast_to(counted.noise_k[:, None], counted.log_cost_km.shape)
    draws.preset(view.primary.name, Drawn(view.primary.sign * counted.log_cost_km, sd_km, np.full(count, 1 / count)))
    return counted


def _mix_loads(loads: Loads, models: MetricModels, rows: NDArray[np.int64], rng: np.random.Generator) -> LoadDraws:
    """Return draws of the models without corrections, and of those with the LLM's, each by its weight."""
    shares = models.primary.shares
    if len(shares) == 1:
        return _draw_loads(loads, models, rows, rng)
    found = [
        _draw_loads(shift_loads(loads, variant.shift_N) if variant else loads, models, rows, rng)
        for variant, _ in shares
    ]
    ends = np.round(np.cumsum([0.0, *(share for _, share in shares)]) * len(found[0].noise_k)).astype(int)
    pieces = [(each, slice(*ends[n : n + 2])) for n, each in enumerate(found)]

    def join(read: Callable[[LoadDraws], NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([read(each)[part] for each, part in pieces])

    return LoadDraws(
        join(lambda each: each.log_cost_km),
        join(lambda each: each.satisfies_km),
        join(lambda each: each.excess_km),
        found[0].limited,
        join(lambda each: each.noise_k),
    )


def _draw_loads(loads: Loads, models: MetricModels, rows: NDArray[np.int64], rng: np.random.Generator) -> LoadDraws:
    """Return draws at these rows, each over the whole grid of loads."""
    view, measured = models.view, collect_loads(loads, models)
    size, width = len(rows), len(loads.grid)
    cells = loads.build(
        np.concatenate([measured.rows_n, np.repeat(rows, width)]),
        np.concatenate([measured.loads_n, np.tile(loads.grid, size)]),
    )
    at = np.arange(len(measured.rows_n), len(cells.features))
    repeats = int(np.clip(MAX_VALUES // (NUM_DRAWS * size * width), 1, MAX_REPEATS))
    logs, noise_k = {}, np.zeros(1)
    for metric in cells.models:
        logs[metric], own_noise_k = _draw(_fit(cells, metric, loads, measured), at, width, repeats, rng)
        noise_k = np.maximum(noise_k, own_noise_k)
    cost_kml = (cells.combine(logs, at) + find_offset(cells, view.primary, measured)).reshape(-1, size, width)
    if loads.measured_NL is not None:
        cost_kml = np.where(loads.measured_NL[rows], cost_kml, np.inf)
    excess_kml = np.zeros_like(cost_kml)
    limits = [constraint for constraint in view.objective.constraints if constraint.metric in logs]
    for constraint in limits:
        excess_kml += log_excess(constraint, np.exp(logs[constraint.metric])).reshape(cost_kml.shape)
    # a load that breaks a limit counts as much dearer, so that the nearest to the limits comes first among those
    chosen = np.argmin(cost_kml + 1e3 * excess_kml, axis=-1)[..., None]
    excess_km = np.take_along_axis(excess_kml, chosen, axis=-1)[..., 0]
    cost_km = np.take_along_axis(cost_kml, chosen, axis=-1)[..., 0]
    limited = frozenset(constraint.metric for constraint in limits)
    return LoadDraws(_fill(cost_km, excess_km <= 0), excess_km <= 0, excess_km, limited, noise_k)


def _fit(cells: Cells, metric: str, loads: Loads, measured: MeasuredLoads) -> list[tuple[Posterior, float]]:
    """Return the hypotheses about a metric, each with its weight."""
    seen = np.array([n for n, load in enumerate(measured.metrics) if load.get(metric, 0.0) > 0], dtype=np.int64)
    values = np.log(np.array([measured.metrics[n][metric] for n in seen], dtype=np.float64))
    fits, scores = [], []
    for widen, noise, residual, surprise in HYPOTHESES:
        base = loads.priors[metric]
        prior = replace(base, sd_P=base.sd_P * widen, shape=base.shape.scaled(residual), noise=base.noise * noise)
        data = CalibrationData.measured(seen, values, noise_n=np.hypot(prior.noise, measured.noise_n[seen]))
        fits.append(calibrate(cells.models[metric], cells.features, prior, data))
        scores.append(fits[-1].log_evidence - 0.5 * np.log(residual) ** 2 - surprise)
    return list(zip(fits, softmax(scores).tolist(), strict=True))


def _draw(
    fits: Sequence[tuple[Posterior, float]],
    at: NDArray[np.int64],
    width: int,
    repeats: int,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """(k, cells) draws of the log of the metric, and (k,) noise of each draw, in random order.

    The residuals of all loads of a row rise and fall together.
    """
    ends = np.round(np.cumsum([weight for _, weight in fits]) * NUM_DRAWS).astype(int)
    draws, noises = [], []
    for (fit, _), count in zip(fits, np.diff(ends, prepend=0).tolist(), strict=True):
        if not count:
            continue
        mean, variance = fit.ensemble(at, rng.standard_normal((count, len(fit.theta_P))))
        mean = np.repeat(mean, repeats, axis=0)
        common = np.repeat(rng.standard_normal((len(mean), len(at) // width)), width, axis=1)
        own = rng.standard_normal(mean.shape)
        draws.append(mean + common * np.sqrt(variance) + own * fit.prior.noise)
        noises.append(np.full(len(mean), fit.prior.noise))
    order = rng.permutation(NUM_DRAWS * repeats)
    return np.concatenate(draws)[order], np.concatenate(noises)[order]


def find_offset(cells: Cells, primary: MetricInfo, measured: MeasuredLoads) -> float:
    """Return the median excess of the measured cost over the cost that follows from the other metrics; 0 if unknown."""
    # At the beginning and at the end of a load fewer requests run.
    names = (primary.name, *cells.models)
    known = np.array([n for n, load in enumerate(measured.metrics) if all(load.get(name, 0) > 0 for name in names)])
    if not len(known):
        return 0.0
    value = {name: np.log(np.array([measured.metrics[n][name] for n in known])) for name in names}
    combined = cells.combine({name: value[name] for name in cells.models}, known)
    return float(np.median(primary.sign * value[primary.name] - combined))


def _fill(cost_km: Array, kept_km: NDArray[np.bool_]) -> Array:
    """Return the costs, with those that do not count replaced by others of the same row that do, if there are any."""
    filled = cost_km.copy()
    for m in np.flatnonzero(kept_km.any(axis=0) & ~kept_km.all(axis=0)):
        kept = kept_km[:, m]
        filled[~kept, m] = np.resize(cost_km[kept, m], int((~kept).sum()))
    return filled
