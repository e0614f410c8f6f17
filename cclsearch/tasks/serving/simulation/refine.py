"""Corrections of the closed forms by the simulation of a load (`load.py`), for the rows that look best by them.

A closed form ranks a large space in seconds and follows the multipliers that trials teach. The simulation shows its
error at given multipliers, and adds percentiles, waits and preemptions under the card's requests. So each metric is its
closed form, times the ratio from the simulation of that row. In a closed loop of requests of one length the means are
as good in closed form (benchmarks/serving.md), and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import MetricInfo
from cclsearch.stats.calibration import ParametricModel, RowModel
from cclsearch.stats.closed_form import ClosedForm, Predictor, Rows
from cclsearch.stats.columns import take_rows
from cclsearch.tasks.serving.closed_form.disaggregation import Deployment
from cclsearch.tasks.serving.closed_form.replica import Array
from cclsearch.tasks.serving.closed_form.steady_state import Arrivals, read_arrivals
from cclsearch.tasks.serving.closed_form.steps import LOAD_PRIORS, MULTIPLIERS, TPOT, TTFT
from cclsearch.tasks.serving.contract import Arrival
from cclsearch.tasks.serving.measurements import LATENCY_METRICS, SERVED, THROUGHPUT
from cclsearch.tasks.serving.simulation.load import Simulated, SimulatedLoad, Simulator
from cclsearch.tasks.serving.workload import count_requests, draw_requests, find_arrival, find_rate, read_targets

MAX_ROWS = 256
"""Rows that are simulated: those that the closed forms put first."""
# A steady state shows by then.
MAX_REQUESTS, PER_CLIENT = 1000, 6
"""Largest number of simulated requests of a load, and for each client of a closed loop."""
# About 2 s on one core (benchmarks/serving.md).
MAX_SIMULATED = 100_000
"""Largest product of simulated requests and rows."""
# They are as uncertain as the first token.
LATENCY_SHAPE, LATENCY_NOISE = LOAD_PRIORS[TTFT].shape, LOAD_PRIORS[TTFT].noise
"""Shape and noise of percentiles and of times that wait for others."""


@dataclass(frozen=True)
class PredictedLoad:
    """The load of a card as predictions see it."""

    lengths: tuple[float, float]
    """Mean tokens of prompts and of answers."""
    arrivals: Arrivals | None
    """None: a closed loop, or a batch."""
    most: float | None
    """Clients, or the most of them that a trial may find; None without a closed loop."""
    is_uniform: bool
    """Whether it is a closed loop of requests of one length."""


def read_load(card: Card, concurrency: float | None) -> PredictedLoad | None:
    """Return the load of a card; None if it states none that can be predicted.

    A request trace has its mean rate and lengths, and the spread of its intervals.
    """
    work, arrival = card.work, find_arrival(card)
    if arrival is Arrival.TRACE:
        if "request_trace" not in work:
            return None
        try:
            requests = draw_requests(card, 0)
        except UserError:  # a search refuses it before it starts; a report of one that has ended needs no prediction
            return None
        times, given, asked = np.array([[r.arrival_s, r.input_tokens, r.output_tokens] for r in requests]).T
        gaps = np.diff(times)
        if len(gaps) == 0 or gaps.mean() <= 0:
            return PredictedLoad((given.mean(), asked.mean()), None, float(len(requests)), is_uniform=False)
        arrivals = Arrivals(1 / float(gaps.mean()), float(gaps.std() / gaps.mean()), len(requests))
        return PredictedLoad((float(given.mean()), float(asked.mean())), arrivals, None, is_uniform=False)
    if "request_trace" in work:
        drawn = draw_requests(card, 0)
        lengths = (float(np.mean([r.input_tokens for r in drawn])), float(np.mean([r.output_tokens for r in drawn])))
    elif {"input_len", "output_len"} <= set(work):
        lengths = float(work["input_len"]), float(work["output_len"])
    else:
        return None
    most = float(work["max_concurrency"]) if "max_concurrency" in work else concurrency
    if most is not None:
        return PredictedLoad(
            lengths, None, most, is_uniform=work.get("lengths", "fixed") == "fixed" and "request_trace" not in work
        )
    rate = read_arrivals(work, arrival, count_requests(work, find_rate(card)))
    return None if rate is None else PredictedLoad(lengths, rate, None, is_uniform=False)


def plan_load(card: Card, load: PredictedLoad) -> SimulatedLoad:
    """Return the requests that are simulated: the first of those that a trial sends."""
    requests = draw_requests(card, 0)
    if "batch_size" in card.work:
        requests = requests[:1] * int(card.work["batch_size"])
    clients = None if load.arrivals is not None or load.most is None else int(load.most)
    most = MAX_REQUESTS if clients is None else max(PER_CLIENT * clients, MAX_ROWS // 2)
    return SimulatedLoad(requests[:most], clients, read_targets(card.work))


def make_refinement(
    card: Card, at: Deployment, load: PredictedLoad
) -> Callable[[Predictor, Mapping[str, Array], Rows], Predictor] | None:
    """Return the refinement of predictors; None if all workers only prefill or only decode."""
    together = np.ones(len(at.accelerators), dtype=bool) if at.is_apart is None else ~at.is_apart
    if not together.any():
        return None
    known: dict[bytes, Simulated] = {}
    planned = plan_load(card, load)
    most = max(1, min(MAX_ROWS, MAX_SIMULATED // len(planned.requests)))

    def refine(predictor: Predictor, thetas: Mapping[str, Array], rows: Rows) -> Predictor:
        chosen = rows[together[rows]][:most]
        if not len(chosen):
            return predictor
        theta = _join(thetas)
        key = chosen.tobytes() + theta.tobytes()
        if key not in known:
            known.clear()  # of one time only: a search asks again for each proposal until trials change it
            known[key] = Simulator.read(card, take_rows(at.whole, chosen)).run(planned, theta)
        simulated = known[key]
        forms = _lean_forms(predictor, load, thetas, chosen, simulated)
        return replace(predictor, forms=forms, num_refined=len(chosen))

    return refine


def _join(thetas: Mapping[str, Array]) -> Array:
    """Return the multipliers of a simulation: those that the time per token taught, and the request's of the first."""
    theta = np.array(thetas[TPOT], dtype=np.float64)
    theta[MULTIPLIERS.index("request")] = thetas[TTFT][MULTIPLIERS.index("request")]
    return theta


def _lean_forms(
    predictor: Predictor, load: PredictedLoad, thetas: Mapping[str, Array], rows: Rows, simulated: Mapping[str, Array]
) -> dict[str, ClosedForm]:
    """Return the closed forms, corrected by the simulation."""
    forms = predictor.forms
    size = len(predictor.features)
    found = dict(forms)
    if SERVED.name in forms:
        kept = forms[SERVED.name]
        lean = _find_lean(1 / simulated[SERVED.name], kept.log_cost(rows)(thetas[SERVED.name]), rows, size)
        found[SERVED.name] = replace(kept, log_cost=_lean(kept.log_cost, lean))
    if not load.is_uniform:
        cost = forms[THROUGHPUT]
        lean = _find_lean(1 / simulated[THROUGHPUT], cost.log_cost(rows)(thetas[THROUGHPUT]), rows, size)
        split = cost.split
        found[THROUGHPUT] = replace(
            cost, log_cost=_lean(cost.log_cost, lean),
            split=split and (lambda theta: {n: part * np.exp(lean) for n, part in split(theta).items()}),
        )  # fmt: skip
    for metric in LATENCY_METRICS:
        form, taught = find_latency_form(forms, metric, load.lengths[1])
        values = simulated.get(metric.name)
        if values is None or not (values > 0).all():
            continue
        if load.is_uniform:  # the means are those of the closed forms
            expected = np.log(simulated[f"{metric.name.split('_')[0]}_mean_s"])
        else:
            expected = form.log_cost(rows)(thetas[taught])
        found[metric.name] = replace(form, log_cost=_lean(form.log_cost, _find_lean(values, expected, rows, size)))
    return found


def find_latency_form(forms: Mapping[str, ClosedForm], metric: MetricInfo, answer: float) -> tuple[ClosedForm, str]:
    """Return the closed form of a latency of answers of so many tokens, which is its mean's if it has none of its own,
    and the metric whose multipliers it has."""
    tpot, ttft = forms[TPOT].log_cost, forms[TTFT].log_cost

    def whole(own: Rows) -> RowModel:
        of_tpot, of_ttft = tpot(own), ttft(own)
        return lambda theta: np.log(np.exp(of_ttft(theta)) + np.exp(of_tpot(theta)) * (answer - 1))

    bases = {"ttft": (ttft, TTFT), "e2e": (whole, TPOT), "tpot": (tpot, TPOT), "itl": (tpot, TPOT)}
    base, taught = bases[metric.name.split("_")[0]]
    prior = replace(forms[taught].prior, shape=LATENCY_SHAPE, noise=LATENCY_NOISE)
    own = ClosedForm(metric, MULTIPLIERS, prior, base, heading=metric.unit or "", like=taught)
    return forms.get(metric.name, own), taught


def _find_lean(values: Array, log_expected: Array, rows: Rows, size: int) -> Array:
    """(N,) log of simulated over expected; of rows that were not simulated, the median of the others."""
    lean = np.log(values) - log_expected
    lean_N = np.full(size, float(np.median(lean)))
    lean_N[rows] = lean
    return lean_N


def _lean(model: ParametricModel, lean_N: Array) -> ParametricModel:
    def log_cost(rows: Rows) -> RowModel:
        own, lean = model(rows), lean_N[rows]
        return lambda theta: own(theta) + lean

    return log_cost
