"""Servers under an open loop: requests arrive at a rate, whether or not earlier ones are answered.

A server settles where it answers as many requests as arrive; there it holds so many sequences as a closed loop of so
many clients. A request further waits for prompts before it (Kingman 1961, one server) and, near capacity, for a place
(Sakasegawa 1977, many servers). Beyond its capacity a server falls behind for as long as requests arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Config
from cclsearch.tasks.serving.closed_form.replica import Array
from cclsearch.tasks.serving.closed_form.steady_state import Served, time_parts
from cclsearch.tasks.serving.closed_form.steps import HANDOVER_S, SHARES, LoadParts
from cclsearch.tasks.serving.contract import Arrival

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
    return Served(cost, tpot, ttft + behind, {name: cost * shares[name] / total for name in SHARES})


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
