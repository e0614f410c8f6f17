"""What serving and inference predict: throughput, latencies and the least memory of a whole space in closed form.

The priors are our choice, not fitted: trials calibrate the multipliers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.metrics import MetricInfo
from cclsearch.space.table import Space
from cclsearch.stats.calibration import Prior, RowModel
from cclsearch.stats.closed_form import ClosedForm, Derived, Predictor, Rows
from cclsearch.stats.kernel import KernelShape, read_features
from cclsearch.tasks.serving.disaggregation import compute_parts, read_deployment
from cclsearch.tasks.serving.kernel_tables import make_kernel_prior
from cclsearch.tasks.serving.measurements import LOAD_METRICS, THROUGHPUT
from cclsearch.tasks.serving.memory import make_memory_form
from cclsearch.tasks.serving.steps import (
    MULTIPLIERS,
    SHARES,
    Array,
    LoadParts,
    Served,
    serve,
)
from cclsearch.tasks.serving.workload import read_limits

PRIOR = Prior(
    mean_P=np.zeros(len(MULTIPLIERS)),
    sd_P=np.array([0.4, 0.4, 0.5, 0.5, 0.8, 0.8]),
    shape=KernelShape(0.15, 1.5, 0.1, 0.15),
    noise=0.03,
    dof=4.0,
)
"""Our choice: published predictions without any trial err by 13 % (TPOT) to 46 % (TTFT) in the median, ours by more."""
TPOT, TTFT = "tpot_mean_s", "ttft_mean_s"
FEWEST, GROWTH = 1, 2.0
"""Concurrencies that are predicted if a trial searches for the largest: from this one, each so many times the last."""
HINT_PARTS = {name: {name: 1.0} for name in MULTIPLIERS if name != "scale"}


def make_predictor(card: Card, space: Space, concurrency: float | None) -> Predictor | None:
    """Return the predictor of a closed loop or a batch; None if the card states no concurrency, or no lengths."""
    work = card.work
    most = float(work["max_concurrency"]) if "max_concurrency" in work else concurrency
    if most is None or not {"input_len", "output_len"} <= set(work) or card.model is None:
        return None
    at = read_deployment(card, space)
    lengths = float(work["input_len"]), float(work["output_len"])
    clients = _list_loads(most, "max_concurrency" in work)
    kernels, rows_N = make_kernel_prior(card, space, at.whole, lengths), np.arange(len(space))
    parts = [compute_parts(card, at, number, *lengths) for number in clients]
    if kernels is not None:
        parts = [kernels.lean(each, rows_N, number) for each, number in zip(parts, clients, strict=True)]
    loads = _stack(parts)
    limits = {name: most for name, (_, most) in read_limits(card.work).items() if name in (TPOT, TTFT) and most}
    metrics = {metric.name: metric for metric in LOAD_METRICS}

    def form(metric: MetricInfo, read: Callable[[Served], Array]) -> ClosedForm:
        def log_cost(rows: Rows) -> RowModel:
            chosen = _take(loads, rows)
            return lambda theta: np.log(_best(chosen, theta, limits, read))

        def slack(rows: Rows) -> RowModel:
            chosen = _take(loads, rows)
            return lambda theta: np.log(_best(chosen, theta, limits, read) / _least(chosen, theta, read))

        chooses = metric.name in (TPOT, TTFT) and len(clients) > 1
        return ClosedForm(
            metric, MULTIPLIERS, PRIOR, log_cost, heading=metric.unit or "", slack=slack if chooses else None
        )

    throughput = form(metrics[THROUGHPUT], lambda served: served.cost)
    whole = ClosedForm(
        throughput.metric, MULTIPLIERS, PRIOR, throughput.log_cost,
        split=lambda theta: {
            name: _best(loads, theta, limits, lambda served, name=name: served.parts[name])  # type: ignore[misc]
            for name in SHARES
        },
        parts_key="accelerator_s_per_token", heading="tokens/s",
    )  # fmt: skip
    return Predictor(
        features=read_features(space),
        forms={
            THROUGHPUT: whole,
            TPOT: form(metrics[TPOT], lambda served: served.tpot_s),
            TTFT: form(metrics[TTFT], lambda served: served.ttft_s),
        },
        memory=make_memory_form(card, at, sum(lengths)),
        hint_parts=HINT_PARTS,
        derived=_derive_all(at.accelerators),
    )


def _list_loads(most: float, is_searched: bool) -> list[float]:
    if not is_searched:
        return [most]
    loads = [float(FEWEST)]
    while loads[-1] * GROWTH < most:
        loads.append(loads[-1] * GROWTH)
    return [*loads, most] if most > loads[-1] else loads


def _stack(loads: list[LoadParts]) -> LoadParts:
    """Return the loads as one, (L, N) each."""
    return LoadParts(
        **{name: np.stack([getattr(each, name) for each in loads]) for name in LoadParts.__dataclass_fields__}
    )


def _take(parts: LoadParts, rows: Rows) -> LoadParts:
    return LoadParts(**{name: getattr(parts, name)[:, rows] for name in parts.__dataclass_fields__})


def _best(loads: LoadParts, theta: Array, limits: dict[str, float], read: Callable[[Served], Array]) -> Array:
    """Return what a trial measures: of its only load, or of the cheapest that keeps the limits, else the nearest."""
    found = serve(loads, np.asarray(theta)[..., None, :])
    values = read(found)
    if values.shape[-2] == 1:
        return np.asarray(values[..., 0, :])
    over = np.zeros_like(found.cost)
    for name, most in limits.items():
        over += np.maximum(np.log((found.tpot_s if name == TPOT else found.ttft_s) / most), 0.0)
    # a load that breaks a limit counts as much dearer, so that the nearest to the limits comes first among those
    chosen = np.argmin(np.log(found.cost) + 1e3 * over, axis=-2)[..., None, :]
    return np.asarray(np.take_along_axis(values, chosen, axis=-2)[..., 0, :])


def _least(loads: LoadParts, theta: Array, read: Callable[[Served], Array]) -> Array:
    """Return the least value over the loads, any of which a trial may choose."""
    return np.asarray(read(serve(loads, np.asarray(theta)[..., None, :])).min(axis=-2))


def _derive_all(accelerators_N: Array) -> dict[str, Derived]:
    """Return the metrics that follow from throughput per accelerator."""
    return {
        "output_tokens_per_s": Derived(THROUGHPUT, lambda value, rows: value * accelerators_N[rows]),
        "accelerator_seconds_per_mtoken": Derived(THROUGHPUT, lambda value, rows: 1e6 / value),
    }
