"""Calibration finds the multipliers behind the data, downweights slow outliers, and learns limits from failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from cclsearch.recording.load import load_recording
from cclsearch.stats.calibration import CalibrationData, Posterior
from cclsearch.tasks.training.prediction import CardModel, load_priors, model_of
from cclsearch.tasks.training.time import MULTIPLIERS

LANDSCAPE = Path(__file__).parent.parent / "benchmarks" / "landscapes" / "nanotron-8b-4n"


def make_model() -> CardModel:
    recording = load_recording(LANDSCAPE)
    return model_of(recording.card, recording.space)


def known(rows: np.ndarray, values: np.ndarray) -> CalibrationData:
    zeros = np.zeros(len(rows))
    return CalibrationData(rows, values, zeros.astype(np.int8), zeros, one_sided=True)


def true_log_times(model: CardModel) -> np.ndarray:
    """Return the log seconds of a framework that is 1.5x slower overall and has an expensive pipeline."""
    theta = load_priors().time.mean_P.copy()
    theta[MULTIPLIERS.index("scale")] += np.log(1.5)
    theta[MULTIPLIERS.index("bubble")] += 0.4
    return model.log_time(np.arange(len(model.space)))(theta)


def test_a_few_trials_identify_scale_and_pipeline():
    model, prior = make_model(), load_priors().time
    truth = true_log_times(model)
    rows = np.array([12, 20, 34, 46, 60, 70])
    posterior = model.calibrate_time(known(rows, truth[rows]), prior)
    before = model.log_time(np.arange(len(truth)))(prior.mean_P)
    after, variance = posterior.marginals(np.arange(len(truth)))
    assert np.median(np.abs(after - truth)) < 0.25 * np.median(np.abs(before - truth))
    assert np.all(variance[rows] < 0.01)


def test_a_slow_outlier_loses_weight_and_a_fast_one_does_not():
    model, prior = make_model(), load_priors().time
    truth = true_log_times(model)
    rows = np.array([12, 20, 34, 46, 60, 70])
    for jump, loses_weight in ((2.0, True), (-2.0, False)):
        values = truth[rows].copy()
        values[3] += jump
        weights = model.calibrate_time(known(rows, values), prior).weight_n
        assert bool(weights[3] < 0.1) is loses_weight


def memory_after(model: CardModel, sides: list[int], rows: list[int]) -> Posterior:
    evidence = CalibrationData(
        np.array(rows),
        np.full(len(rows), np.nan),
        np.array(sides, dtype=np.int8),
        np.full(len(rows), 0.01),
        limit=model.log_limit,
        softness=0.05,
    )
    return model.calibrate_memory(evidence, load_priors().memory)


def test_an_out_of_memory_failure_raises_the_predicted_memory():
    model = make_model()
    every = np.arange(len(model.space))
    before = model.calibrate_memory(
        replace(known(np.zeros(0, dtype=np.int64), np.zeros(0)), limit=model.log_limit), load_priors().memory
    )
    largest_fitting = int(np.argmin(np.abs(before.marginals(every)[0] - model.log_limit + 0.1)))
    failed = memory_after(model, [1], [largest_fitting])
    fitted = memory_after(model, [-1], [largest_fitting])
    assert np.median(failed.marginals(every)[0]) > np.median(before.marginals(every)[0])
    assert np.median(fitted.marginals(every)[0]) < np.median(before.marginals(every)[0])


def test_the_ensemble_agrees_with_the_marginals():
    model, prior = make_model(), load_priors().time
    truth = true_log_times(model)
    rows = np.array([12, 20, 34])
    posterior = model.calibrate_time(known(rows, truth[rows]), prior)
    every = np.arange(len(truth))
    draws = np.random.default_rng(0).standard_normal((400, len(prior.mean_P)))
    mean_Sm, variance_m = posterior.ensemble(every, draws)
    expected, variance = posterior.marginals(every)
    assert np.median(np.abs(mean_Sm.mean(axis=0) - expected)) < 0.1
    assert np.all(variance_m <= variance + 1e-6)
