"""Servers under a rate of requests: the prediction against a simulation that computes one prompt or step at a time."""

from __future__ import annotations

import numpy as np
import pytest

from cclsearch.tasks.serving.closed_form.open_loop import Arrivals, serve_open
from cclsearch.tasks.serving.closed_form.steady_state import Served
from cclsearch.tasks.serving.closed_form.steps import MULTIPLIERS, REQUEST_S, LoadParts

ANSWER, PLACES, PREFILL_S = 60, 16, 0.03
STEP_S, SEQUENCE_S = 0.01, 0.0005
CAPACITY = PLACES / (ANSWER * (STEP_S + SEQUENCE_S * PLACES) + PLACES * PREFILL_S)
"""Requests per second that one server answers at most."""


def step_s(sequences: float) -> float:
    return STEP_S + SEQUENCE_S * sequences


def make_loads(replicas: int = 1) -> LoadParts:
    """One configuration at 1, 2, 4, ... clients."""
    batches = np.array([1.0, 2.0, 4.0, 8.0, 16.0])[:, None]
    fields = dict.fromkeys(LoadParts.__dataclass_fields__, np.zeros_like(batches))
    fields |= {
        "batch": batches, "replicas": np.full_like(batches, replicas), "accelerators": np.full_like(batches, replicas),
        "weights": np.full_like(batches, STEP_S), "kv_cache": SEQUENCE_S * batches,
        "prefill": np.full_like(batches, PREFILL_S), "prefill_alone": np.full_like(batches, PREFILL_S),
        "answer": np.full_like(batches, ANSWER), "clients": batches * replicas,
    }  # fmt: skip
    return LoadParts(**fields)


def predict(arrivals: Arrivals, replicas: int = 1) -> Served:
    return serve_open(make_loads(replicas), np.zeros(len(MULTIPLIERS)), arrivals)


def simulate(arrivals: Arrivals, seed: int) -> tuple[float, float, float]:
    """Mean seconds to the first token and per token, and tokens per second, of one server."""
    rng = np.random.default_rng(seed)
    shape = arrivals.spread**-2 if arrivals.spread else 0.0
    gaps = (
        rng.gamma(shape, 1 / shape / arrivals.rate, arrivals.count)
        if shape
        else np.full(arrivals.count, 1 / arrivals.rate)
    )
    due = list(np.cumsum(gaps) - gaps[0])
    now, running, first, tpot, arrived = 0.0, [], [], [], list(due)
    while due or running:
        if due and due[0] <= now and len(running) < PLACES:
            came = due.pop(0)
            now += PREFILL_S
            first.append(now - came + REQUEST_S)
            running.append([now, ANSWER - 1])
        elif running:
            now += step_s(len(running))
            for sequence in running:
                sequence[1] -= 1
            tpot += [(now - start) / (ANSWER - 1) for start, left in running if left == 0]
            running = [sequence for sequence in running if sequence[1] > 0]
        else:
            now = due[0]
    return float(np.mean(first)), float(np.mean(tpot)), arrivals.count * ANSWER / (now - arrived[0])


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_below_its_capacity_a_server_has_the_latencies_of_a_simulation(share: float, spread: float) -> None:
    arrivals = Arrivals(share * CAPACITY, spread, 1500)
    ttft, tpot, rate = np.mean([simulate(arrivals, seed) for seed in range(3)], axis=0)
    found = predict(arrivals)
    assert found.tpot_s[0] == pytest.approx(tpot, rel=0.15)
    assert found.ttft_s[0] == pytest.approx(ttft, rel=0.35)
    assert 1 / found.cost[0] == pytest.approx(rate, rel=0.05)


def test_beyond_its_capacity_a_server_falls_behind_for_as_long_as_requests_arrive() -> None:
    for count in (200, 800):
        arrivals = Arrivals(1.5 * CAPACITY, 1.0, count)
        ttft, tpot, rate = np.mean([simulate(arrivals, seed) for seed in range(3)], axis=0)
        found = predict(arrivals)
        assert found.ttft_s[0] == pytest.approx(ttft, rel=0.25)
        assert found.tpot_s[0] == pytest.approx(tpot, rel=0.15)
        assert 1 / found.cost[0] == pytest.approx(rate, rel=0.1)


def test_bursts_delay_first_tokens_more_than_a_poisson_process() -> None:
    steady, bursts = (predict(Arrivals(0.6 * CAPACITY, spread, 400)) for spread in (1.0, 2.0))
    assert bursts.ttft_s[0] > steady.ttft_s[0]


def test_replicas_share_the_requests_and_parts_add_up() -> None:
    one, two = predict(Arrivals(2.0, 0.0, 400)), predict(Arrivals(4.0, 0.0, 400), replicas=2)
    assert two.tpot_s == pytest.approx(one.tpot_s)
    assert sum(one.parts.values()) == pytest.approx(one.cost)
