"""Calibration finds the multipliers behind the data, downweights slow outliers, and learns limits from failures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from paths import ROOT
from scipy.stats import norm

from cclsearch.recording.load import load_recording
from cclsearch.stats.calibration import CalibrationData, KnownResidual, Posterior, Prior, RowModel, calibrate
from cclsearch.stats.closed_form import ClosedForm, MemoryForm, Predictor, predictor_of
from cclsearch.stats.kernel import Features, KernelShape

LANDSCAPE = ROOT / "benchmarks" / "landscapes" / "nanotron-8b-4n"
EVERY = np.arange(len(load_recording(LANDSCAPE).space))


def make_predictor() -> Predictor:
    recording = load_recording(LANDSCAPE)
    return predictor_of(recording.card, recording.space)


def make_time_form() -> ClosedForm:
    return make_predictor().forms["step_time_s"]


def make_memory_form() -> MemoryForm:
    form = make_predictor().memory
    assert form is not None
    return form


def known(rows: np.ndarray, values: np.ndarray) -> CalibrationData:
    return CalibrationData.measured(rows, values, one_sided=True)


def true_log_times(form: ClosedForm) -> np.ndarray:
    """Return the log seconds of a framework that is 1.5x slower overall and has an expensive pipeline."""
    theta = form.prior.mean_P.copy()
    theta[form.multipliers.index("scale")] += np.log(1.5)
    theta[form.multipliers.index("bubble")] += 0.4
    return form.log_cost(EVERY)(theta)


def fit(form: ClosedForm, data: CalibrationData) -> Posterior:
    return calibrate(form.log_cost, make_predictor().features, form.prior, data)


def test_a_few_trials_identify_scale_and_pipeline():
    form = make_time_form()
    truth = true_log_times(form)
    rows = np.array([12, 20, 34, 46, 60, 70])
    posterior = fit(form, known(rows, truth[rows]))
    before = form.log_cost(EVERY)(form.prior.mean_P)
    after, variance = posterior.marginals(EVERY)
    assert np.median(np.abs(after - truth)) < 0.25 * np.median(np.abs(before - truth))
    assert np.all(variance[rows] < 0.01)


def test_a_slow_outlier_loses_weight_and_a_fast_one_does_not():
    form = make_time_form()
    truth = true_log_times(form)
    rows = np.array([12, 20, 34, 46, 60, 70])
    for jump, loses_weight in ((2.0, True), (-2.0, False)):
        values = truth[rows].copy()
        values[0] += jump
        weights = fit(form, known(rows, values)).weight_n
        assert bool(weights[0] < 0.1) is loses_weight


def memory_after(memory: MemoryForm, sides: list[int], rows: list[int]) -> Posterior:
    evidence = CalibrationData(
        np.array(rows),
        np.full(len(rows), np.nan),
        np.array(sides, dtype=np.int8),
        np.full(len(rows), 0.01),
        limit=memory.log_limit,
        softness=0.05,
    )
    return fit(memory.form, evidence)


def test_an_out_of_memory_failure_raises_the_predicted_memory():
    memory = make_memory_form()
    before = fit(memory.form, replace(known(np.zeros(0, dtype=np.int64), np.zeros(0)), limit=memory.log_limit))
    largest_fitting = int(np.argmin(np.abs(before.marginals(EVERY)[0] - memory.log_limit + 0.1)))
    failed = memory_after(memory, [1], [largest_fitting])
    fitted = memory_after(memory, [-1], [largest_fitting])
    assert np.median(failed.marginals(EVERY)[0]) > np.median(before.marginals(EVERY)[0])
    assert np.median(fitted.marginals(EVERY)[0]) < np.median(before.marginals(EVERY)[0])


@pytest.mark.parametrize("seen", [[1], [-1], [1, 0], [-1, 1, 0, 0]], ids=str)
def test_the_evidence_of_what_fitted_and_of_what_was_measured_is_the_mean_likelihood_of_drawn_models(seen):
    features = Features(np.zeros((4, 1)), np.zeros((4, 0), dtype=np.int16), np.zeros((4, 0), dtype=np.int16))
    shape = KernelShape(1e-4, 1.0, 0.0, 0.0)
    prior = Prior(np.array([0.3, 0.1]), np.array([1.0, 0.7]), shape, noise=0.2, dof=1e6)
    slope = np.array([0.0, 1.0, 2.0, -1.0])

    def line(rows: np.ndarray) -> RowModel:
        return lambda theta: np.asarray(theta[..., :1] + theta[..., 1:2] * slope[rows])

    rows, side = np.arange(len(seen)), np.array(seen, dtype=np.int8)
    values, label_noise = np.where(side == 0, 0.8, np.nan), np.where(side > 0, 0.15, 0.0)
    found = calibrate(line, features, prior, CalibrationData(rows, values, side, label_noise, limit=0.5, softness=0.1))
    drawn = line(rows)(prior.mean_P + prior.sd_P * np.random.default_rng(0).standard_normal((200_000, 2)))
    measured = norm.pdf(drawn, 0.8, 0.2) * np.sqrt(2 * np.pi)
    threshold = label_noise + (1 - label_noise) * norm.cdf(side * (drawn - 0.5) / 0.1)
    expected = np.log(np.where(side == 0, measured, threshold).prod(axis=1).mean())
    assert found.log_evidence == pytest.approx(expected, abs=0.02)


def test_the_ensemble_agrees_with_the_marginals():
    form = make_time_form()
    truth = true_log_times(form)
    rows = np.array([12, 20, 34])
    posterior = fit(form, known(rows, truth[rows]))
    draws = np.random.default_rng(0).standard_normal((400, len(form.prior.mean_P)))
    mean_Sm, variance_m = posterior.ensemble(EVERY, draws)
    expected, variance = posterior.marginals(EVERY)
    assert np.median(np.abs(mean_Sm.mean(axis=0) - expected)) < 0.1
    assert np.all(variance_m <= variance + 1e-6)


def test_the_spread_follows_leave_one_out_errors_and_is_one_without_any():
    form = make_time_form()
    rows = np.array([12, 20, 34, 46, 60, 70])
    exact = fit(form, known(rows, form.log_cost(EVERY)(form.prior.mean_P)[rows]))
    rough = np.array([0.4, -0.4, 0.4, -0.4, 0.4, -0.4])
    noisy = fit(form, known(rows, true_log_times(form)[rows] + rough))
    assert fit(form, known(rows[:0], np.zeros(0))).spread == 1.0
    dof = form.prior.dof
    assert np.isclose(exact.spread, np.sqrt(dof / (dof + len(rows))), atol=0.02)  # errors near 0
    assert noisy.spread > 1.1


def test_observations_with_much_noise_do_not_narrow_the_spread():
    form = make_time_form()
    rows = np.array([12, 20, 34, 46, 60, 70])
    values = form.log_cost(EVERY)(form.prior.mean_P)[rows]
    noise = np.full(len(rows), 10 * form.prior.noise)
    assert fit(form, CalibrationData.measured(rows, values, noise_n=noise)).spread == 1.0


def test_drawn_models_do_not_depend_on_the_order_of_the_parts():
    features, order = make_predictor().features, np.array([2, 0, 3, 1])
    weights_PN = np.vstack([np.sin(n + EVERY) for n in range(4)])
    shape = make_time_form().prior.shape
    prior = Prior(np.zeros(4), np.full(4, 0.3), shape, noise=0.02, dof=4.0)
    data = CalibrationData.measured(EVERY[:2], np.array([0.1, 0.4]))
    normal_SP = np.random.default_rng(0).standard_normal((5, 4))
    drawn = [
        calibrate(lambda rows, at=at: lambda theta: theta @ weights_PN[at][:, rows], features, prior, data).ensemble(
            EVERY, normal_SP[:, at]
        )[0]
        for at in (np.arange(4), order)
    ]
    assert np.allclose(drawn[0], drawn[1], rtol=0, atol=1e-8)


def test_a_known_residual_predicts_as_if_its_rows_had_been_observed_without_a_closed_form():
    form, features = make_time_form(), make_predictor().features
    seen, others = np.array([12, 20, 34]), np.array([13, 21, 46])
    offsets, noise = np.array([0.2, -0.1, 0.15]), 0.05
    certain = replace(form.prior, sd_P=np.full_like(form.prior.sd_P, 1e-6), noise=noise, dof=1e6)
    nothing = known(np.zeros(0, dtype=np.int64), np.zeros(0))
    residual = KnownResidual(features.take(seen), offsets, np.full(3, noise**2))
    told = calibrate(form.log_cost, features, replace(certain, known=residual), nothing)
    values = form.log_cost(seen)(form.prior.mean_P) + offsets
    observed = calibrate(form.log_cost, features, certain, CalibrationData.measured(seen, values))
    for left, right in zip(told.marginals(others), observed.marginals(others), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-5)
    # a trial of the search itself adds to what is known
    data = CalibrationData.measured(others[:1], form.log_cost(others[:1])(form.prior.mean_P) + 0.3)
    assert (
        calibrate(form.log_cost, features, replace(certain, known=residual), data).marginals(seen[:1])[0]
        > (told.marginals(seen[:1])[0])
    )
    draws = np.zeros((1, len(form.prior.mean_P)))
    mean, variance = told.ensemble(others, draws)
    np.testing.assert_allclose(mean[0], told.marginals(others)[0], atol=1e-5)
    np.testing.assert_allclose(variance, told.marginals(others)[1], atol=1e-5)
