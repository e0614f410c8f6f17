"""One wrong time among six moves the predictions of the other configurations by a bounded factor."""

from __future__ import annotations

import numpy as np
import pytest
from paths import ROOT

from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.recording.load import Recording, load_recording
from cclsearch.stats.kernel import Array

LANDSCAPES = ROOT / "benchmarks" / "landscapes"
NAMES = ("vtrain-h1024-l12-g8-b8", "vtrain-h1024-l20-g8-b32", "nanotron-8b-4n", "nanotron-3b-8n", "nanotron-8b-64n")
BOUND = {50.0: 1.5, 1 / 3: 2.2}
"""Factor on one time -> bound of the median change of the others' predictions; far less than the error itself."""


def predict(recording: Recording, rows: list[int], wrong: int, factor: float) -> Array:
    """Return the log of the predicted times of the untried configurations, if one of six times is wrong."""
    seen = []
    for trial, row in enumerate(rows, start=1):
        time_s = recording.rows[row].metrics["step_time_s"] * (factor if row == wrong else 1.0)
        seen.append(Observation(trial, recording.rows[row].config, row, time_s, metrics={"step_time_s": time_s}))
    posterior = fit_posterior(SearchView(recording.card, recording.space, tuple(seen), frozenset(), 9, seed=0))
    assert posterior is not None
    return np.log(posterior.value_m)


@pytest.mark.parametrize("factor", BOUND)
@pytest.mark.parametrize("name", NAMES)
def test_one_outlier_of_six_teaches_little_about_others(name, factor):
    recording = load_recording(LANDSCAPES / name)
    fine = [n for n, row in enumerate(recording.rows) if "step_time_s" in row.metrics]
    for seed in range(2):
        rows = [int(n) for n in np.random.default_rng(seed).permutation(fine)[:6]]
        moved = [
            np.median(np.abs(predict(recording, rows, wrong, factor) - predict(recording, rows, wrong, 1.0)))
            for wrong in rows
        ]
        assert float(np.exp(max(moved))) < BOUND[factor]
