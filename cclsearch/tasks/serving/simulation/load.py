"""Metrics of a load for many configurations at once, by a simulation of their schedulers (`batching.py`).

Each configuration has `dp` x `pp` engines: a replica's pipeline stages work on different groups of sequences. Requests
go round the engines, and in a closed loop to the engine whose client was answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.stats.columns import take_rows
from cclsearch.tasks.serving.closed_form.memory import count_cached_tokens
from cclsearch.tasks.serving.closed_form.replica import Array, Replica
from cclsearch.tasks.serving.closed_form.steps import MULTIPLIERS, StepCosts, read_costs
from cclsearch.tasks.serving.contract import PlannedRequest
from cclsearch.tasks.serving.measurements import GOODPUT, PERCENTS, SERVED, find_rates, summarize
from cclsearch.tasks.serving.settling import find_kept_share
from cclsearch.tasks.serving.simulation.batching import answer_all
from cclsearch.tasks.serving.simulation.step_times import ENDLESS, Answered, Engines, Ints, Requests, StepTimes

# This bounds the memory.
MAX_CELLS = 1_500_000
"""Largest product of engines and their requests or places that is simulated together."""
Simulated = Mapping[str, Array]
"""Metric -> (n,) its value in each configuration."""


@dataclass(frozen=True)
class SimulatedLoad:
    """The requests of a load, and how they arrive."""

    requests: tuple[PlannedRequest, ...]
    clients: int | None
    """Number of clients in a closed loop; None: requests come at their times."""
    targets: Mapping[str, float]
    """Limits that a request must keep to count for goodput."""


@dataclass(frozen=True, eq=False)
class Simulator:
    """n configurations whose loads can be simulated."""

    costs: StepCosts
    places: Array
    """Sequences at once of one engine."""
    tokens: Array
    """Tokens that its KV cache holds."""

    @classmethod
    def read(cls, card: Card, at: Replica) -> Simulator:
        """Return the simulator of these configurations."""
        places = np.maximum(np.floor(at.sequences / at.pp), 1.0)
        return cls(read_costs(card, at), places, count_cached_tokens(card, at) / at.pp)

    def run(self, load: SimulatedLoad, theta_P: Array) -> Simulated:
        """Return the metrics of a load, by these log multipliers."""
        at = self.costs.at
        most = len(load.requests) if load.clients is None else min(load.clients, len(load.requests))
        engines_n = np.minimum(np.maximum(np.rint(at.dp * at.pp), 1), most).astype(np.int64)
        found: dict[str, Array] = {}
        for count in np.unique(engines_n).tolist():
            alike = np.flatnonzero(engines_n == count)
            width = max(-(-len(load.requests) // count), 1)
            size = max(1, MAX_CELLS // (count * width))
            for start in range(0, len(alike), size):
                rows = alike[start : start + size]
                for name, values in self._run_alike(rows, count, load, theta_P).items():
                    found.setdefault(name, np.full(len(at.tp), np.nan))[rows] = values
        return found

    def _run_alike(self, rows: Ints, count: int, load: SimulatedLoad, theta_P: Array) -> Simulated:
        """Return the metrics of configurations with as many engines each."""
        requests = _split(load, count, len(rows))
        owner = np.repeat(rows, count)
        times = StepTimes.calibrated(take_rows(self.costs, owner), theta_P)
        at = times.costs.at
        longest = max(each.input_tokens + each.output_tokens for each in load.requests)
        size = np.ceil(longest / at.block_size) + 1
        blocks = np.floor(self.tokens[owner] / at.block_size)
        # whether a request fits at all is the memory's prediction; here it has to
        blocks = np.where((at.reserves > 0) | (blocks < size), ENDLESS, blocks)
        places = self.places[owner].astype(np.int64)
        clients = np.zeros(count, dtype=np.int64)
        if load.clients is not None:
            clients = _share(min(load.clients, len(load.requests)), count)
        lag = self.costs.host * self.costs.at.request_s * float(np.exp(theta_P[MULTIPLIERS.index("request")]))
        engines = Engines(
            times=times,
            places=places,
            blocks=blocks,
            is_tight=np.minimum(places, requests.given.shape[1]) * size > blocks,
            lag_s=lag[owner],
            clients=np.tile(clients, len(rows)),
        )
        answered = answer_all(engines, requests)
        return _measure(answered, requests, load, count, self.costs.at.accelerators[rows], at, lag[rows])


def _share(number: int, count: int) -> Ints:
    """Return how many of so many fall on each of `count` engines."""
    return np.array([number // count + (n < number % count) for n in range(count)], dtype=np.int64)


def _split(load: SimulatedLoad, count: int, configurations: int) -> Requests:
    """Return the requests of each engine: every `count`th, in order."""
    asked = load.requests
    width = -(-len(asked) // count)
    columns = np.array([[r.arrival_s, r.input_tokens, r.output_tokens] for r in asked])
    padded = np.full((width * count, 3), 1.0)
    padded[: len(asked)] = columns
    by_engine = padded.reshape(width, count, 3).transpose(1, 0, 2)
    arrival, given, out = (np.tile(by_engine[..., n], (configurations, 1)) for n in range(3))
    return Requests(
        arrival_s=np.zeros_like(arrival) if load.clients is not None else arrival,
        given=given.astype(np.int64),
        asked=out.astype(np.int64),
        count=np.tile(_share(len(asked), count), configurations),
    )


def _measure(
    answered: Answered,
    requests: Requests,
    load: SimulatedLoad,
    count: int,
    accelerators: Array,
    at: Replica,
    lag_s: Array,
) -> dict[str, Array]:
    """Return the metrics of each configuration, by their names in `measurements.py`."""

    def join(values: NDArray[Any]) -> NDArray[Any]:
        """(configurations, requests) of (engines, requests of an engine)."""
        width = values.shape[1]
        joined = values.reshape(-1, count, width).transpose(0, 2, 1).reshape(-1, width * count)
        return joined[:, : len(load.requests)]

    arrival, start, first, end = (
        join(each) for each in (answered.arrival_s, answered.start_s, answered.first_s, answered.end_s)
    )
    given, asked = join(requests.given)[0], join(requests.asked)[0]
    tpot = (end - first)[:, asked > 1] / (asked[asked > 1] - 1)
    latencies = {"ttft": first - arrival, "tpot": tpot, "e2e": end - arrival}
    window = end.max(axis=1) - arrival.min(axis=1)
    found = {
        **find_rates(len(asked), given.sum(), asked.sum(), window, accelerators),
        "queue_mean_s": (start - arrival).mean(axis=1) - lag_s,
        "preemptions": answered.preemptions.reshape(-1, count).sum(axis=1).astype(np.float64),
        "kv_cache_use_peak": answered.peak.reshape(-1, count).max(axis=1),
        "tokens_per_step": (answered.tokens.reshape(-1, count).sum(1) / answered.steps.reshape(-1, count).sum(1)),
    }
    if load.clients is None:
        kept = np.array([find_kept_share(*each) for each in zip(arrival, first, end, strict=True)])
        found[SERVED.name] = np.nan_to_num(kept, nan=1.0)
    for name, values in latencies.items():
        if values.shape[1]:
            found |= summarize(name, values, axis=1)
    found |= _summarize_gaps(answered, count, len(accelerators))
    if tpot.shape[1]:
        found["output_tokens_per_s_per_user"] = 1 / found["tpot_mean_s"]
    cached = at.cached.reshape(-1, count)[:, 0]
    if cached.any():
        found["prefix_cache_hit_rate"] = np.minimum(cached[:, None], given - 1).sum(axis=1) / given.sum()
    if "itl" not in load.targets:
        good_in = [latencies[name] <= most for name, most in load.targets.items() if name != "tpot"]
        if "tpot" in load.targets:
            good = np.ones(first.shape, dtype=bool)
            good[:, asked > 1] = tpot <= load.targets["tpot"]
            good_in.append(good)
        number = np.logical_and.reduce(good_in).sum(axis=1) if good_in else np.full(len(window), len(asked))
        found[GOODPUT] = number / window
    return found


def _summarize_gaps(answered: Answered, count: int, configurations: int) -> dict[str, Array]:
    """Return mean and percentiles of the seconds between tokens, each counted as often as it occurs."""
    if not answered.gaps:
        return {}
    owner, seconds, weight = (np.concatenate(column) for column in zip(*answered.gaps, strict=True))
    occurs = weight > 0
    owner, seconds, weight = owner[occurs] // count, seconds[occurs], weight[occurs]
    order = np.lexsort((seconds, owner))
    owner, seconds, weight = owner[order], seconds[order], weight[order]
    total = np.bincount(owner, weight, configurations)
    mean = np.bincount(owner, weight * seconds, configurations) / np.maximum(total, 1e-300)
    before = np.cumsum(total) - total
    until = np.cumsum(weight)
    found = {"itl_mean_s": mean}
    for name, percent in PERCENTS.items():
        at = (np.maximum(total, 1.0) - 1) * percent / 100
        low, high = (
            seconds[np.minimum(np.searchsorted(until, before + each + 0.5), len(seconds) - 1)]
            for each in (np.floor(at), np.ceil(at))
        )
        found[f"itl_{name}_s"] = low + (at - np.floor(at)) * (high - low)
    return {name: np.where(total > 0, values, np.nan) for name, values in found.items()}
