"""How far the prediction of a server's latencies is off, by the largest evidence, with each model left out once.

    python benchmarks/serving_prior.py FOLDER

For TPOT and TTFT at each load: standard deviations of the multipliers and of the residual under which the measured
tables are the most likely (Rasmussen and Williams 2006, section 5.2), models weighted equally, by a search of one
number at a time; then the evidence of each model's own tables with the numbers in use and with those that the other
models choose. FOLDER is as in benchmarks/serving.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from serving import Table, read_tables
from serving_fit import model_of

from cclsearch.stats.calibration import CalibrationData, Prior, calibrate
from cclsearch.stats.closed_form import Cells, predictor_of
from cclsearch.tasks.serving.prediction import LOAD_SCALE
from cclsearch.tasks.serving.priors import LOAD_PRIORS, TPOT, TTFT

STEPS = (0.5, 2.0), (0.7, 1.4)
"""Factors by which a number is changed, in two rounds."""
LEAST_GAIN = 0.02
"""Evidence below which a change is not worth it."""


class Measured(NamedTuple):
    """One table's loads."""

    model: str
    cells: Cells
    log_values: Mapping[str, np.ndarray]


def read_measured(table: Table) -> Measured:
    loads = np.array(table.loads)
    expected = predictor_of(table.card, table.space).loads
    assert expected is not None
    cells = expected.build(loads[:, 0].astype(np.int64), loads[:, 1])
    return Measured(model_of(table), cells, {TTFT: np.log(loads[:, 2]), TPOT: np.log(loads[:, 3])})


def numbers_of(prior: Prior) -> dict[str, float]:
    """The prior's numbers by their names."""
    shape = {name: getattr(prior.shape, name) for name in ("amplitude", "slope", "category_sd")}
    multipliers = {"scale": prior.sd_P[0], "engine": prior.sd_P[5], "others (factor)": 1.0}
    return {**shape, "noise": prior.noise, **multipliers, "load_scale": LOAD_SCALE}


def weigh(measured: Measured, metric: str, numbers: Mapping[str, float]) -> float:
    """Return the log evidence of a table, divided by the root of its loads: neighbouring loads are alike."""
    prior = LOAD_PRIORS[metric]
    sd_P = prior.sd_P * numbers["others (factor)"]
    sd_P[0], sd_P[5] = numbers["scale"], numbers["engine"]
    shape = replace(prior.shape, **{name: numbers[name] for name in ("amplitude", "slope", "category_sd")})
    coordinates = measured.cells.features.numbers_ND.copy()
    coordinates[:, -1] *= numbers["load_scale"] / LOAD_SCALE
    features = replace(measured.cells.features, numbers_ND=coordinates)
    values = measured.log_values[metric]
    data = CalibrationData.measured(np.arange(len(values)), values)
    fit = calibrate(
        measured.cells.models[metric], features, replace(prior, sd_P=sd_P, shape=shape, noise=numbers["noise"]), data
    )
    return fit.log_evidence / float(np.sqrt(len(values)))


def weigh_all(tables: Sequence[Measured], metric: str, numbers: Mapping[str, float]) -> float:
    """Return the evidence of all tables, each model with the mean of its own."""
    by_model: dict[str, list[float]] = {}
    for table in tables:
        by_model.setdefault(table.model, []).append(weigh(table, metric, numbers))
    return float(sum(np.mean(found) for found in by_model.values()))


def fit(tables: Sequence[Measured], metric: str) -> dict[str, float]:
    """Return the numbers with the largest evidence that changes of one at a time find."""
    best = numbers_of(LOAD_PRIORS[metric])
    evidence = weigh_all(tables, metric, best)
    for factors in STEPS:
        for name in best:
            for factor in factors:
                while True:
                    changed = {**best, name: best[name] * factor}
                    found = weigh_all(tables, metric, changed)
                    if found <= evidence + LEAST_GAIN:
                        break
                    best, evidence = changed, found
    return best


def main() -> None:
    tables = [read_measured(table) for table in read_tables(Path(sys.argv[1]))]
    models = sorted({table.model for table in tables})
    for metric in (TPOT, TTFT):
        used = numbers_of(LOAD_PRIORS[metric])
        print(f"\n| {metric}, model left out | {' | '.join(used)} | its evidence | with those in use |")
        print("|" + " --- |" * (len(used) + 3))
        print(f"| in use | {' | '.join(f'{value:.3g}' for value in used.values())} | | |")
        for model in models:
            found = fit([table for table in tables if table.model != model], metric)
            own = [table for table in tables if table.model == model]
            cells = " | ".join(f"{value:.3g}" for value in found.values())
            theirs, ours = (weigh_all(own, metric, numbers) for numbers in (found, used))
            print(f"| {model} | {cells} | {theirs:.2f} | {ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
