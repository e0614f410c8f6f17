"""The hypotheses about a closed form, weighted by what the trials measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from paths import ROOT

from cclsearch.propose.base import Observation
from cclsearch.propose.bayes.ensemble import Ensemble, fit_ensemble
from cclsearch.recording.load import load_recording
from cclsearch.stats.closed_form import predictor_of

RECORDING = load_recording(ROOT / "benchmarks" / "landscapes" / "nanotron-8b-4n")
PREDICTOR = predictor_of(RECORDING.card, RECORDING.space)
FORM = PREDICTOR.forms["step_time_s"]


def fit(rows: Sequence[int], factor: float) -> Ensemble:
    """The ensemble after measurements of so many times what the closed form predicts."""
    log_times = FORM.predict(len(RECORDING.space))[0] + np.log(factor)
    seen = [
        Observation(n + 1, RECORDING.space.config(row), row, float(time), metrics={"step_time_s": float(time)})
        for n, (row, time) in enumerate(zip(rows, np.exp(log_times[list(rows)]), strict=True))
    ]
    return fit_ensemble(FORM, PREDICTOR.features, seen, ())


def test_two_trials_teach_every_configuration_that_the_closed_form_is_off_by_a_factor_of_ten():
    everything = np.arange(len(RECORDING.space))
    predicted = FORM.predict(len(RECORDING.space))[0]
    for factor in (0.1, 10.0):
        learned = fit((0, len(everything) // 2), factor).mean(everything) - predicted
        assert np.quantile(np.abs(learned - np.log(factor)), 0.9) < np.log(1.35), factor


def test_one_trial_teaches_every_configuration_that_the_cluster_is_slow():
    everything = np.arange(len(RECORDING.space))
    learned = fit((0,), 10.0).mean(everything) - FORM.predict(len(RECORDING.space))[0]
    assert np.median(np.abs(learned - np.log(10.0))) < np.log(1.25)


def test_a_closed_form_that_fits_keeps_its_narrow_scale():
    ensemble = fit((0, 1, 2), 1.0)
    widths = [hypothesis.prior.sd_P[FORM.multipliers.index("scale")] for hypothesis in ensemble.hypotheses]
    assert max(widths) == FORM.prior.sd_P[FORM.multipliers.index("scale")]
