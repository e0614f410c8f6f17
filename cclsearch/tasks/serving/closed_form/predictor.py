"""Predictions for serving and inference: throughput, latencies and the least memory of a whole space in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.metrics import MetricInfo
from cclsearch.space.table import Space
from cclsearch.stats.calibration import ParametricModel, RowModel
from cclsearch.stats.closed_form import Cells, ClosedForm, Derived, Loads, Predictor, Rows
from cclsearch.stats.columns import map_columns, take_rows
from cclsearch.stats.kernel import read_features
from cclsearch.tasks.serving.closed_form.disaggregation import (
    Deployment,
    compute_parts,
    find_first_equal,
    read_deployment,
)
from cclsearch.tasks.serving.closed_form.kernel_tables import make_kernel_prior
from cclsearch.tasks.serving.closed_form.memory import make_memory_form
from cclsearch.tasks.serving.closed_form.replica import Array
from cclsearch.tasks.serving.closed_form.steady_state import Served, serve, serve_open
from cclsearch.tasks.serving.closed_form.steps import LOAD_PRIORS, MULTIPLIERS, PRIOR, SHARES, TPOT, TTFT, LoadParts
from cclsearch.tasks.serving.measurements import LATENCY_METRICS, LOAD_METRICS, SERVED, THROUGHPUT
from cclsearch.tasks.serving.simulation.refine import find_latency_form, make_refinement, read_load
from cclsearch.tasks.serving.workload import can_settle, read_limits

# A whole server's error is mostly common to its works (benchmarks/newdevice.md; our choice).
TRANSFER_SD_P, TRANSFER_RESIDUAL = np.array([0.2 * (name == "scale") for name in MULTIPLIERS]), 0.5
"""Least standard deviations, and factor of the residual, when learning from loads of other work."""
# From benchmarks/serving.md.
LOAD_SCALE = 0.4
"""Doublings of a knob whose effect a doubling of the load resembles."""
FEWEST, GROWTH = 1, 2.0
"""Concurrencies that are predicted if a trial searches for the largest: from this one, each so many times the last."""
Compute = Callable[[Rows | None, Array | float], LoadParts]
"""Rows (None: all) and clients -> the parts of a load."""
# 128 MB.
MAX_PARTS = 16_000_000
"""Largest number of values that describe a space's loads at once; a larger space is computed in chunks."""
MAX_PLACES = 4096.0
"""Largest number of sequences at once for which servers under a given rate are predicted."""


def make_predictor(card: Card, space: Space, concurrency: float | None) -> Predictor | None:
    """Return the predictor of a load or a batch; None if the card has no load, or no lengths."""
    load = read_load(card, concurrency)
    if load is None or card.model is None:
        return None
    at = read_deployment(card, space)
    arrivals, lengths, most = load.arrivals, load.lengths, load.most
    compute = _make_compute(card, space, at, lengths)
    is_searched = arrivals is not None or "max_concurrency" in card.work
    most = most or min(float((at.whole.dp * at.whole.sequences).max()), MAX_PLACES)
    clients = _list_loads(most, is_searched, space)
    measured_LN = _mark_loads(space, clients)
    knows_more = card.hardware.kernel_tables is not None or not measured_LN.all()
    first_equal = np.arange(len(space)) if knows_more else find_first_equal(at)
    loads = _Loads(compute, clients, measured_LN, len(space))
    limits = {name: most for name, (_, most) in read_limits(card.work).items() if name in (TPOT, TTFT) and most}
    metrics = {metric.name: metric for metric in LOAD_METRICS}

    def measure(rows: Rows, theta: Array, *reads: Callable[[Served], Array]) -> list[Array]:
        pieces = []
        different, inverse = np.unique(first_equal[rows], return_inverse=True)
        for piece in loads.chunks(different):
            parts, measured_LN = loads.take(piece)
            if arrivals is not None:
                served = serve_open(parts, theta, arrivals)
                pieces.append([read(served) for read in reads])
            else:
                pieces.append(_best(parts, theta, limits, reads, measured_LN))
        return [np.concatenate(each, axis=-1)[..., inverse] for each in zip(*pieces, strict=True)]

    def form(metric: MetricInfo, read: Callable[[Served], Array]) -> ClosedForm:
        def log_cost(rows: Rows) -> RowModel:
            return lambda theta: np.log(measure(rows, theta, read)[0])

        return ClosedForm(metric, MULTIPLIERS, PRIOR, log_cost, heading=metric.unit or "")

    throughput = form(metrics[THROUGHPUT], lambda served: served.cost)
    shares = [lambda served, name=name: served.parts[name] for name in SHARES]  # type: ignore[misc]
    whole = ClosedForm(
        throughput.metric, MULTIPLIERS, PRIOR, throughput.log_cost,
        split=lambda theta: dict(zip(SHARES, measure(np.arange(len(space)), theta, *shares), strict=True)),
        parts_key="accelerator_s_per_token", heading="tokens/s",
    )  # fmt: skip
    chooses = arrivals is None and len(clients) > 1
    forms = {
        THROUGHPUT: whole,
        TPOT: form(metrics[TPOT], lambda served: served.tpot_s),
        TTFT: form(metrics[TTFT], lambda served: served.ttft_s),
    }
    if can_settle(card):
        # capacity follows from the multipliers: only these are uncertain
        prior = replace(PRIOR, shape=PRIOR.shape.scaled(0.01), noise=0.003)
        forms[SERVED.name] = replace(
            form(SERVED, lambda served: np.asarray(1 / served.served)), prior=prior, heading="kept up", like=THROUGHPUT
        )
        bounded = [metric for metric in LATENCY_METRICS if metric.name in read_limits(card.work)]
        forms = {m.name: find_latency_form(forms, m, lengths[1])[0] for m in bounded} | forms
    predictor = Predictor(
        features=read_features(space),
        forms=forms,
        memory=make_memory_form(card, at, sum(lengths)),
        derived=_derive_all(at.accelerators),
        loads=_predict_loads(card, space, compute, tuple(clients), loads.measured_LN.T) if chooses else None,
    )
    return predictor if chooses else replace(predictor, refine=make_refinement(card, at, load))


class _Loads:
    """The parts of every load of every row: kept, or computed in chunks of a space that is too large for that."""

    def __init__(self, compute: Compute, clients: list[float], measured_LN: NDArray[np.bool_], size: int) -> None:
        self.compute, self.clients, self.measured_LN = compute, clients, measured_LN
        self.most = max(1, MAX_PARTS // (len(clients) * len(LoadParts.__dataclass_fields__)))
        self.kept = self._stack(None) if size <= self.most else None

    def _stack(self, rows: Rows | None) -> LoadParts:
        """Return the loads as one, (L, N) each."""
        loads = [self.compute(rows, number) for number in self.clients]
        return map_columns(lambda *each: np.stack(each), *loads)

    def chunks(self, rows: Rows) -> list[Rows]:
        """Return the rows in pieces whose parts fit into memory; at least one piece."""
        return [rows[start : start + self.most] for start in range(0, max(len(rows), 1), self.most)]

    def take(self, rows: Rows) -> tuple[LoadParts, NDArray[np.bool_]]:
        """Return the parts of these rows, and the loads that a trial of each measures; (L, n) each."""
        if self.kept is None:
            return self._stack(rows), self.measured_LN[:, rows]
        return map_columns(lambda column_LN: column_LN[:, rows], self.kept), self.measured_LN[:, rows]


def _make_compute(card: Card, space: Space, at: Deployment, lengths: tuple[float, float]) -> Compute:
    """Return the function of the parts of rows at so many clients, with measured kernels if the card asks for them."""
    kernels = make_kernel_prior(card, space, at.whole, lengths)

    def compute(rows: Rows | None, clients: Array | float) -> LoadParts:
        parts = compute_parts(card, at if rows is None else take_rows(at, rows), clients, *lengths)
        if kernels is None:
            return parts
        return kernels.lean(parts, np.arange(len(space)) if rows is None else rows, clients)

    return compute


def _predict_loads(
    card: Card, space: Space, compute: Compute, clients: tuple[float, ...], measured_NL: NDArray[np.bool_]
) -> Loads:
    """Return the loads of trials that measure several."""
    lengths = float(card.work["input_len"]), float(card.work["output_len"])
    features = read_features(space)

    def build(rows: Rows, concurrency_n: Array) -> Cells:
        parts = compute(rows, concurrency_n)

        def model(read: Callable[[Served], Array]) -> ParametricModel:
            def log_value(own: Rows) -> RowModel:
                taken = take_rows(parts, own)
                return lambda theta: np.log(read(serve(taken, theta)))

            return log_value

        def combine(logs: Mapping[str, Array], own: Rows) -> Array:
            # Little's law: each client waits for the first token, then for each other one
            answer_s = np.exp(logs[TTFT]) + np.exp(logs[TPOT]) * (lengths[1] - 1)
            return np.asarray(np.log(answer_s * parts.accelerators[own] / (concurrency_n[own] * lengths[1])))

        models = {TPOT: model(lambda served: served.tpot_s), TTFT: model(lambda served: served.ttft_s)}
        return Cells(features.take(rows).with_number(LOAD_SCALE * np.log2(concurrency_n)), models, combine)

    wide = {
        near: replace(prior, sd_P=np.maximum(prior.sd_P, TRANSFER_SD_P), shape=prior.shape.scaled(TRANSFER_RESIDUAL))
        for near, prior in LOAD_PRIORS.items()
    }
    measured = None if measured_NL.all() else measured_NL
    return Loads("concurrency", clients, LOAD_PRIORS, wide | {THROUGHPUT: wide[TPOT]}, MULTIPLIERS, build, measured)


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


def _best(
    loads: LoadParts,
    theta: Array,
    limits: dict[str, float],
    reads: Sequence[Callable[[Served], Array]],
    measured_LN: NDArray[np.bool_],
) -> list[Array]:
    """Return the metrics of a trial: of its only load, or of the cheapest that keeps the limits, else the nearest."""
    found = serve(loads, np.asarray(theta)[..., None, :])
    if found.cost.shape[-2] == 1:
        return [read(found)[..., 0, :] for read in reads]
    over = np.where(measured_LN, 0.0, np.inf) + np.zeros_like(found.cost)
    for name, most in limits.items():
        over += np.maximum(np.log((found.tpot_s if name == TPOT else found.ttft_s) / most), 0.0)
    # a load that breaks a limit counts as much dearer, so that the nearest to the limits comes first among those
    chosen = np.argmin(np.log(found.cost) + 1e3 * over, axis=-2)[..., None, :]
    return [np.take_along_axis(read(found), chosen, axis=-2)[..., 0, :] for read in reads]


def _derive_all(accelerators_N: Array) -> dict[str, Derived]:
    """Return the metrics that follow from throughput per accelerator."""
    return {
        "output_tokens_per_s": Derived(THROUGHPUT, lambda value, rows: value * accelerators_N[rows]),
        "accelerator_seconds_per_mtoken": Derived(THROUGHPUT, lambda value, rows: 1e6 / value),
    }
