"""Among configurations that can win the safer one is chosen; one that cannot win is not run because it is safe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from paths import ROOT

from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.acquisition import MAX_FAILURE_PENALTY, choose_batch
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.recording.load import load_recording

LANDSCAPE = ROOT / "benchmarks" / "landscapes" / "vtrain-h1024-l12-g8-b8"


def posterior_of(log_times: list[float], p_success: list[float]) -> CandidatePosterior:
    """Return a posterior of candidates with these expected log times over the best one's, known to 1 %."""
    recording = load_recording(LANDSCAPE)
    seen = Observation(1, recording.rows[0].config, 0, recording.rows[0].metrics["step_time_s"])
    view = SearchView(recording.card, recording.space, (seen,), frozenset(), 10, seed=0)
    posterior = fit_posterior(view)
    assert posterior is not None
    assert posterior.best is not None
    size = len(log_times)
    return replace(
        posterior,
        rows_m=posterior.rows_m[:size],
        weight_k=np.ones(1),
        mean_km=posterior.best + np.array([log_times]),
        sd_km=np.full((1, size), 0.01),
        p_success_m=np.array(p_success),
        p_satisfies_m=np.ones(size),
        shortfall_m=np.zeros(size),
        pending_kp=np.zeros((1, 0)),
    )


def chosen(posterior: CandidatePosterior, count: int = 1) -> list[int]:
    return [m for m, _ in choose_batch(posterior, count, MAX_FAILURE_PENALTY)]


def test_a_safe_configuration_that_is_ten_times_slower_does_not_displace_one_that_may_win() -> None:
    assert chosen(posterior_of([2.3, 0.0, 2.5], [1.0, 0.5, 1.0])) == [1]


def test_of_two_that_may_win_the_safe_one_is_chosen() -> None:
    assert chosen(posterior_of([0.0, 0.0], [0.5, 0.99])) == [1]


@pytest.mark.parametrize(("log_time", "row"), [(0.05, 1), (0.3, 1), (30.0, 0)])
def test_among_the_hopeless_the_larger_chance_wins_until_no_chance_is_left(log_time: float, row: int) -> None:
    assert chosen(posterior_of([log_time + 0.05, log_time], [1.0, 0.7])) == [row]


def test_a_batch_holds_each_configuration_once() -> None:
    assert sorted(chosen(posterior_of([0.0, 0.01, 3.0, 4.0], [0.9, 0.8, 1.0, 1.0]), 4)) == [0, 1, 2, 3]


def test_once_nothing_is_likely_to_win_the_safer_configuration_is_chosen() -> None:
    posterior = posterior_of([0.1, 0.05], [1.0, 0.7])
    assert [m for m, _ in choose_batch(posterior, 1, MAX_FAILURE_PENALTY, is_won=True)] == [0]
