"""The steady state of a load, from its parts (`steps.py`): a closed loop of clients, or requests that arrive at a rate.

In a closed loop: continuous batching in servers that do both, or the slower of the workers that only prefill and those
that only decode. In an open loop a server settles where it answers as many requests as arrive; there it holds so many
sequences as a closed loop of so many clients. A request further waits for prompts before it (Kingman 1961, one server)
and, near capacity, for a place (Sakasegawa 1977, many servers). Beyond its capacity a server falls behind for as long
as requests arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Config
from cclsearch.tasks.serving.closed_form.replica import Array
from cclsearch.tasks.serving.closed_form.steps import HANDOVER_S, MULTIPLIERS, SHARES, TOGETHER, LoadParts
from cclsearch.tasks.serving.contract import Arrival


@dataclass(frozen=True, eq=False)
class Served:
    """Metrics of one load, by the multipliers; (..., N) each."""

    cost: Array
    """Accelerator-seconds per output token."""
    tpot_s: Array
    ttft_s: Array
    parts: dict[str, Array]
    """Part -> its share of the cost."""
    served: Array | float = 1.0
    """Share of the arriving requests that are kept up with."""


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds after multipliers; (..., N) each."""

    step: Array
    prefill: Array
    """Seconds of one prompt when all stages are busy."""
    alone: Array
    """Seconds of one prompt from its first to its last stage."""
    request: Array
    step_parts: dict[str, Array]
    """Part -> its share of a step."""


def time_parts(parts: LoadParts, theta: Array) -> Times:
    """Return the seconds of a step and of a prompt."""
    by_name = dict(zip(MULTIPLIERS, np.moveaxis(np.exp(theta), -1, 0)[..., None], strict=True))
    scale = by_name["scale"]
    weights, kv_cache = scale * by_name["weights"] * parts.weights, scale * by_name["kv_cache"] * parts.kv_cache
    decode = np.maximum(weights + kv_cache, scale * by_name["prefill"] * parts.products)
    links, engine = scale * by_name["collectives"], scale * by_name["engine"]
    own = scale * by_name["prefill"]
    return Times(
        step=decode + links * parts.collectives + engine * parts.engine,
        prefill=own * parts.prefill + links * parts.prefill_collectives + engine * parts.prefill_engine,
        alone=own * parts.prefill_alone
        + links * parts.prefill_collectives
        + engine * (parts.engine + parts.prefill_engine),
        request=parts.request * by_name["request"],
        step_parts={
            "weights": np.maximum(decode - kv_cache, 0.0),
            "kv_cache": np.minimum(kv_cache, decode),
            "collectives": links * parts.collectives,
            "engine": engine * parts.engine,
        },
    )


def serve(parts: LoadParts, theta: Array) -> Served:
    """Return the steady state of a closed loop."""
    times = time_parts(parts, theta)
    together = _serve_together(parts, times)
    if not parts.prefillers.any():
        return _lean(together, parts)
    apart, is_apart = _serve_apart(parts, times), parts.prefillers > 0
    together = _lean(together, parts)
    return Served(
        cost=np.where(is_apart, apart.cost, together.cost),
        tpot_s=np.where(is_apart, apart.tpot_s, together.tpot_s),
        ttft_s=np.where(is_apart, apart.ttft_s, together.ttft_s),
        parts={name: np.where(is_apart, apart.parts[name], together.parts[name]) for name in SHARES},
    )


def _lean(served: Served, parts: LoadParts) -> Served:
    """The state with latencies that another prediction moved; the cost follows by Little's law."""
    if not parts.tpot_lean.any() and not parts.ttft_lean.any():
        return served
    ttft, tpot = served.ttft_s * np.exp(parts.ttft_lean), served.tpot_s * np.exp(parts.tpot_lean)
    others = parts.answer - 1
    grown = (ttft + others * tpot) / (served.ttft_s + others * served.tpot_s)
    return Served(
        cost=served.cost * grown,
        tpot_s=tpot,
        ttft_s=ttft,
        parts={name: seconds * grown for name, seconds in served.parts.items()},
    )


def _serve_together(parts: LoadParts, times: Times) -> Served:
    """Continuous batching: while a replica answers a batch, it prefills one prompt for each of its sequences."""
    prompts = parts.batch * times.prefill
    cycle = parts.answer * times.step + prompts
    busy = prompts / cycle
    # some come together; others find a busy server, as in Kingman's formula, and at most all other prompts
    others = np.minimum(busy / np.maximum(1 - busy, 1e-9) * times.prefill, prompts)
    queue = 0.5 * (TOGETHER * prompts + (1 - TOGETHER) * others)
    tokens = parts.replicas * parts.batch * parts.answer / parts.accelerators
    shares = {"prefill": prompts, **{name: parts.answer * seconds for name, seconds in times.step_parts.items()}}
    return Served(
        cost=cycle / tokens,
        tpot_s=times.step + (1 - TOGETHER) * np.maximum(parts.batch - 1, 0.0) * times.prefill / parts.answer,
        ttft_s=times.request + times.alone + times.step / 2 + queue + parts.waiting / parts.batch * cycle,
        parts={name: seconds / tokens for name, seconds in shares.items()},
    )


def _serve_apart(parts: LoadParts, times: Times) -> Served:
    """Workers that only prefill beside workers that only decode: the slower of the two sets the rate.

    Requests wait where the rate is set, so that the time to the first token follows from Little's law there.
    """
    workers, decode = np.maximum(parts.prefillers, 1.0), parts.answer * times.step
    prompts = parts.clients / workers * times.prefill  # one prompt of each client
    arrive = times.request + times.alone + parts.transfer + HANDOVER_S + times.step / 2
    busy = np.minimum(prompts / (arrive + decode), 1.0)
    ttft = arrive + 0.5 * (TOGETHER + (1 - TOGETHER) * busy) * prompts
    places = np.where(parts.waiting > 0, parts.replicas * parts.batch / decode, np.inf)
    rate = np.minimum(np.minimum(workers / times.prefill, places), parts.clients / (ttft + decode))
    cost = parts.accelerators / (rate * parts.answer)
    of_decode = cost * (1 - parts.prefill_share) / times.step
    return Served(
        cost=cost,
        tpot_s=times.step,
        ttft_s=np.maximum(ttft, parts.clients / rate - decode),
        parts={
            "prefill": cost * parts.prefill_share,
            **{name: of_decode * seconds for name, seconds in times.step_parts.items()},
        },
    )


# Above it the queue never reaches a steady state, and a load ends before it would.
MAX_BUSY = 0.98
"""Largest utilization."""


@dataclass(frozen=True)
class Arrivals:
    """Arrival times of the requests of a load."""

    rate: float
    """Requests per second at the whole server."""
    spread: float
    """Coefficient of variation of the intervals: 0 if they are equal, 1 of a Poisson process."""
    count: int
    """Requests of the load."""


def read_arrivals(work: Config, arrival: Arrival, count: int) -> Arrivals | None:
    """Return the arrivals of a card's load; None if it has no rate: a closed loop, or a request trace."""
    spreads: Mapping[Arrival, float] = {
        Arrival.CONSTANT: 0.0,
        Arrival.POISSON: 1.0,
        Arrival.GAMMA: float(work.get("burstiness", 1.0)),
    }
    if arrival not in spreads or "request_rate" not in work:
        return None
    return Arrivals(float(work["request_rate"]), spreads[arrival], count)


def serve_open(loads: LoadParts, theta: Array, arrivals: Arrivals) -> Served:
    """Return the metrics of a load, (..., N), from the parts at growing numbers of clients, (L, N) each."""
    times = time_parts(loads, np.asarray(theta)[..., None, :])
    is_apart, answer = loads.prefillers > 0, loads.answer
    workers = np.where(is_apart, np.maximum(loads.prefillers, 1.0), loads.replicas)
    own_prompts = np.where(is_apart, 0.0, loads.batch * times.prefill)
    answer_s = answer * times.step + own_prompts
    rates = loads.replicas * loads.batch / answer_s
    rates = np.where(is_apart, np.minimum(rates, workers / times.prefill), rates)
    rates = np.maximum.accumulate(rates, axis=-2)
    most = rates[..., -1, :]
    settle = _Settled.find(rates, np.minimum(arrivals.rate, most))

    def at(values: Array) -> Array:
        return settle.read(np.broadcast_to(values, rates.shape))

    rate, step, prefill, fleet = np.minimum(arrivals.rate, most), at(times.step), at(times.prefill), at(workers)
    apart, tokens = is_apart[0], answer[0]
    busy = np.minimum(rate * prefill / fleet, MAX_BUSY)  # share of the time in which a worker computes prompts
    tpot = np.where(apart, step, step / (1 - busy)) * np.exp(settle.nearest(loads.tpot_lean))
    variability = arrivals.spread**2 / 2  # answers of equal length
    places = loads.replicas[0] * loads.batch[-1]
    full = np.minimum(rate / most, MAX_BUSY)
    for_place = tokens * tpot / places * full ** (np.sqrt(2 * (places + 1)) - 1) / (1 - full) * variability
    for_place = np.where(arrivals.rate < most, np.minimum(for_place, arrivals.count / arrivals.rate / 2), 0.0)
    # requests that come while the places fill are answered faster
    filled = answer_s[..., -1, :] - answer_s[..., 0, :]
    behind = np.maximum(arrivals.count / 2 * (1 / most - 1 / arrivals.rate) - filled, 0.0)
    start = at(times.request + times.alone + loads.transfer) + step / 2 + np.where(apart, HANDOVER_S, 0.0)
    ttft = start + busy / (1 - busy) * prefill * variability + for_place
    ttft = ttft * np.exp(settle.nearest(loads.ttft_lean))
    window = arrivals.count / rate + ttft + tokens * tpot
    cost = loads.accelerators[0] * window / (arrivals.count * tokens)
    shares = {"prefill": busy, **{n: (1 - busy) * at(v) / step for n, v in times.step_parts.items()}}
    total = np.sum(list(shares.values()), axis=0)
    parts = {name: cost * shares[name] / total for name in SHARES}
    return Served(cost, tpot, ttft + behind, parts, rate / arrivals.rate)


@dataclass(frozen=True, eq=False)
class _Settled:
    """The two numbers of clients between which each configuration settles."""

    above: NDArray[np.int64]
    """(..., 1, N) index of the first number at which it answers as many requests as arrive."""
    weight: Array
    """(..., 1, N) weight of that number; the one before has the rest."""

    @classmethod
    def find(cls, rates: Array, wanted: Array) -> _Settled:
        """`rates` (..., L, N) do not decrease along L; `wanted` (..., N) is at most the last."""
        above = np.argmax(rates >= wanted[..., None, :] * (1 - 1e-9), axis=-2)[..., None, :]
        high, low = (np.take_along_axis(rates, np.maximum(n, 0), axis=-2) for n in (above, above - 1))
        span = np.log(high) - np.log(low)
        inside = (above > 0) & (span > 0)
        weight = (np.log(wanted[..., None, :]) - np.log(low)) / np.where(inside, span, 1.0)
        return cls(above, np.where(inside, np.clip(weight, 0.0, 1.0), 1.0))

    def read(self, values: Array) -> Array:
        """(..., N) values above 0, or 0 everywhere, interpolated as logarithms of (..., L, N)."""
        high, low = (np.take_along_axis(values, np.maximum(n, 0), axis=-2) for n in (self.above, self.above - 1))
        logs = (np.log(np.maximum(one, 1e-30)) for one in (high, low))
        high, low = logs
        return np.asarray(np.exp(self.weight * high + (1 - self.weight) * low)[..., 0, :])

    def nearest(self, values: Array) -> Array:
        """(..., N) values of (L, N) at the number above."""
        shape = (*self.above.shape[:-2], *values.shape)
        return np.asarray(np.take_along_axis(np.broadcast_to(values, shape), self.above, axis=-2)[..., 0, :])
