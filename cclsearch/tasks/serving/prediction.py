"""What serving and inference predict: throughput, latencies and the least memory of a whole space in closed form.

The priors are our choice, not fitted: trials calibrate the multipliers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.metrics import MetricInfo
from cclsearch.space.table import Space
from cclsearch.stats.calibration import ParametricModel, Prior, RowModel
from cclsearch.stats.closed_form import Cells, ClosedForm, Derived, Loads, Predictor, Rows
from cclsearch.stats.kernel import KernelShape, read_features
from cclsearch.tasks.serving.disaggregation import Deployment, compute_parts, read_deployment
from cclsearch.tasks.serving.kernel_tables import make_kernel_prior
from cclsearch.tasks.serving.measurements import LOAD_METRICS, THROUGHPUT
from cclsearch.tasks.serving.memory import make_memory_form
from cclsearch.tasks.serving.open_loop import read_arrivals, serve_open
from cclsearch.tasks.serving.replica import Array
from cclsearch.tasks.serving.steady_state import Served, serve
from cclsearch.tasks.serving.steps import MULTIPLIERS, SHARES, LoadParts
from cclsearch.tasks.serving.workload import count_requests, find_arrival, read_limits

PRIOR = Prior(
    mean_P=np.zeros(len(MULTIPLIERS)),
    sd_P=np.array([0.4, 0.4, 0.5, 0.5, 0.8, 0.8]),
    shape=KernelShape(0.15, 1.5, 0.1, 0.15),
    noise=0.03,
    dof=4.0,
)
"""Our choice: published predictions without any trial err by 13 % (TPOT) to 46 % (TTFT) in the median, ours by more."""
TPOT, TTFT = "tpot_mean_s", "ttft_mean_s"
LOAD_PRIORS = {
    TPOT: replace(PRIOR, sd_P=np.array([0.1, 0.1, 0.15, 0.15, 0.25, 0.4]), shape=KernelShape(0.2, 1.5, 0.03, 0.2)),
    TTFT: replace(PRIOR, shape=KernelShape(0.4, 1.5, 0.03, 0.2), noise=0.12),
}
"""Of the latencies at one load, which are known better than what counts: the largest evidence of measured servers, and
about the same with each model left out (`benchmarks/serving_prior.py`)."""
TRANSFER_SCALE_SD, TRANSFER_RESIDUAL = 0.2, 0.5
"""Of the multiplier `scale`, and factor of the residual, where loads of other work are learned from: most of what a
whole server is off by is common to its works (`benchmarks/newdevice_serving.py`; our choice)."""
LOAD_SCALE = 0.4
"""Doublings of a knob to which a doubling of the load is alike (also from `serving_prior.py`)."""
FEWEST, GROWTH = 1, 2.0
"""Concurrencies that are predicted if a trial searches for the largest: from this one, each so many times the last."""
Compute = Callable[[Rows | None, Array | float], LoadParts]
"""Rows (None: all) and clients -> the parts of a load."""
MAX_PLACES = 4096.0
"""Sequences at once up to which servers under a given rate are predicted."""
HINT_PARTS = {name: {name: 1.0} for name in MULTIPLIERS if name != "scale"}


def make_predictor(card: Card, space: Space, concurrency: float | None) -> Predictor | None:
    """Return the predictor of a load or a batch; None if the card has neither concurrency nor rate, or no lengths."""
    work, arrivals = card.work, None
    most = float(work["max_concurrency"]) if "max_concurrency" in work else concurrency
    if most is None:
        arrivals = read_arrivals(work, find_arrival(card), count_requests(work))
    if (most is None and arrivals is None) or not {"input_len", "output_len"} <= set(work) or card.model is None:
        return None
    at = read_deployment(card, space)
    lengths = float(work["input_len"]), float(work["output_len"])
    compute = _make_compute(card, space, at, lengths)
    is_searched = arrivals is not None or "max_concurrency" in work
    clients = _list_loads(most or _count_places(at), is_searched, space)
    measured_LN = _mark_loads(space, clients)
    loads = _stack([compute(None, number) for number in clients])
    limits = {name: most for name, (_, most) in read_limits(card.work).items() if name in (TPOT, TTFT) and most}
    metrics = {metric.name: metric for metric in LOAD_METRICS}

    def measure(rows: Rows, theta: Array, read: Callable[[Served], Array]) -> Array:
        chosen = _take(loads, rows)
        if arrivals is not None:
            return read(serve_open(chosen, theta, arrivals))
        return _best(chosen, theta, limits, read, measured_LN[:, rows])

    def form(metric: MetricInfo, read: Callable[[Served], Array]) -> ClosedForm:
        def log_cost(rows: Rows) -> RowModel:
            return lambda theta: np.log(measure(rows, theta, read))

        return ClosedForm(metric, MULTIPLIERS, PRIOR, log_cost, heading=metric.unit or "")

    throughput = form(metrics[THROUGHPUT], lambda served: served.cost)
    whole = ClosedForm(
        throughput.metric, MULTIPLIERS, PRIOR, throughput.log_cost,
        split=lambda theta: {
            name: measure(np.arange(len(space)), theta, lambda served, name=name: served.parts[name])  # type: ignore[misc]
            for name in SHARES
        },
        parts_key="accelerator_s_per_token", heading="tokens/s",
    )  # fmt: skip
    chooses = arrivals is None and len(clients) > 1
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
        loads=_predict_loads(card, space, compute, tuple(clients), measured_LN.T) if chooses else None,
    )


def _count_places(at: Deployment) -> float:
    """Return the most sequences at once over all configurations, at most `MAX_PLACES`."""
    return min(float((at.whole.dp * at.whole.sequences).max()), MAX_PLACES)


def _make_compute(card: Card, space: Space, at: Deployment, lengths: tuple[float, float]) -> Compute:
    """Return the function of the parts of rows at so many clients, with measured kernels if the card asks for them."""
    kernels = make_kernel_prior(card, space, at.whole, lengths)

    def compute(rows: Rows | None, clients: Array | float) -> LoadParts:
        parts = compute_parts(card, at if rows is None else at.take(rows), clients, *lengths)
        if kernels is None:
            return parts
        return kernels.lean(parts, np.arange(len(space)) if rows is None else rows, clients)

    return compute


def _predict_loads(
    card: Card, space: Space, compute: Compute, clients: tuple[float, ...], measured_NL: NDArray[np.bool_]
) -> Loads:
    """Return what is known of trials that measure several loads."""
    lengths = float(card.work["input_len"]), float(card.work["output_len"])
    features = read_features(space)

    def build(rows: Rows, concurrency_n: Array) -> Cells:
        parts = compute(rows, concurrency_n)

        def model(read: Callable[[Served], Array]) -> ParametricModel:
            def log_value(own: Rows) -> RowModel:
                taken = LoadParts(**{name: getattr(parts, name)[own] for name in parts.__dataclass_fields__})
                return lambda theta: np.log(read(serve(taken, theta)))

            return log_value

        def combine(logs: Mapping[str, Array], own: Rows) -> Array:
            # Little's law: each client waits for the first token, then for each other one
            answer_s = np.exp(logs[TTFT]) + np.exp(logs[TPOT]) * (lengths[1] - 1)
            return np.asarray(np.log(answer_s * parts.accelerators[own] / (concurrency_n[own] * lengths[1])))

        models = {TPOT: model(lambda served: served.tpot_s), TTFT: model(lambda served: served.ttft_s)}
        return Cells(features.take(rows).with_number(LOAD_SCALE * np.log2(concurrency_n)), models, combine)

    transfer = {metric: _widen(LOAD_PRIORS[near]) for metric, near in ((THROUGHPUT, TPOT), (TPOT, TPOT), (TTFT, TTFT))}
    measured = None if measured_NL.all() else measured_NL
    return Loads("concurrency", clients, LOAD_PRIORS, transfer, MULTIPLIERS, build, measured)


def _widen(prior: Prior) -> Prior:
    """Return the prior with which searches of other work are learned from."""
    wide = np.array([TRANSFER_SCALE_SD if name == "scale" else 0.0 for name in MULTIPLIERS])
    return replace(prior, sd_P=np.maximum(prior.sd_P, wide), shape=prior.shape.scaled(TRANSFER_RESIDUAL))


def _list_loads(most: float, is_searched: bool, space: Space) -> list[float]:
    """Return the loads that trials measure: those recorded, or doublings up to the largest."""
    if not is_searched:
        return [most]
    recorded = sorted({load for own in space.loads for load in own})
    if recorded and recorded[-1] == most:
        return recorded
    loads = [float(FEWEST)]
    while loads[-1] * GROWTH < most:
        loads.append(loads[-1] * GROWTH)
    return [*loads, most] if most > loads[-1] else loads


def _mark_loads(space: Space, loads: list[float]) -> NDArray[np.bool_]:
    """(L, N) whether a trial of each row measures each load; all do unless the rows are recorded."""
    measured_LN = np.ones((len(loads), len(space)), dtype=bool)
    for row, own in enumerate(space.loads if len(loads) > 1 else ()):
        if found := set(own) & set(loads):
            measured_LN[:, row] = [load in found for load in loads]
    return measured_LN


def _stack(loads: list[LoadParts]) -> LoadParts:
    """Return the loads as one, (L, N) each."""
    return LoadParts(
        **{name: np.stack([getattr(each, name) for each in loads]) for name in LoadParts.__dataclass_fields__}
    )


def _take(parts: LoadParts, rows: Rows) -> LoadParts:
    return LoadParts(**{name: getattr(parts, name)[:, rows] for name in parts.__dataclass_fields__})


def _best(
    loads: LoadParts,
    theta: Array,
    limits: dict[str, float],
    read: Callable[[Served], Array],
    measured_LN: NDArray[np.bool_],
) -> Array:
    """Return what a trial measures: of its only load, or of the cheapest that keeps the limits, else the nearest."""
    found = serve(loads, np.asarray(theta)[..., None, :])
    values = read(found)
    if values.shape[-2] == 1:
        return np.asarray(values[..., 0, :])
    over = np.where(measured_LN, 0.0, np.inf) + np.zeros_like(found.cost)
    for name, most in limits.items():
        over += np.maximum(np.log((found.tpot_s if name == TPOT else found.ttft_s) / most), 0.0)
    # a load that breaks a limit counts as much dearer, so that the nearest to the limits comes first among those
    chosen = np.argmin(np.log(found.cost) + 1e3 * over, axis=-2)[..., None, :]
    return np.asarray(np.take_along_axis(values, chosen, axis=-2)[..., 0, :])


def _derive_all(accelerators_N: Array) -> dict[str, Derived]:
    """Return the metrics that follow from throughput per accelerator."""
    return {
        "output_tokens_per_s": Derived(THROUGHPUT, lambda value, rows: value * accelerators_N[rows]),
        "accelerator_seconds_per_mtoken": Derived(THROUGHPUT, lambda value, rows: 1e6 / value),
    }
