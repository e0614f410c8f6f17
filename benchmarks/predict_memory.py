"""Measures how well peaks of memory are predicted: the section "Memory" of `predict.md`.

    python benchmarks/predict_memory.py LANDSCAPES [LANDSCAPES ...] [--fit LANDSCAPES ...] [--open] [--seeds N]

For every landscape with measured peaks, with constants fitted only on those of `--fit` of other frameworks: before any
trial and after 1, 2 and 3 random trials, the median error of the peak and the share of right "fits or fails" over the
untried rows; medians over the seeds. Also, after two trials that differ only in their micro-batch, the error at the
next one. `--open` takes recomputation as undeclared everywhere, also where the framework has a knob for it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fit_prior import fit_prior
from numpy.typing import NDArray
from search import load_all

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.loop.bench import RecordedTable
from cclsearch.propose.base import Observation
from cclsearch.propose.bayes.feasibility import fit_feasibility
from cclsearch.recording.load import Recording
from cclsearch.recording.table import RowStatus
from cclsearch.stats.closed_form import Predictor
from cclsearch.tasks.training import layout
from cclsearch.tasks.training.prediction import Priors, make_predictor, read_priors

AFTER = (0, 1, 2, 3)
MICRO_BATCH = "micro_batch_size"


def try_rows(recording: Recording, rows: Sequence[int]) -> list[Observation]:
    """Return what trials of these rows show."""
    table = RecordedTable(recording)
    return [table.ask(n, row, recording.space.config(row)) for n, row in enumerate(rows)]


def read_peaks(recording: Recording) -> NDArray[np.float64]:
    """(N,) measured GiB of every row that ran, else NaN."""
    ran = [row.metrics.get(PEAK_MEMORY) if row.status is RowStatus.OK else None for row in recording.rows]
    return np.array([peak or np.nan for peak in ran])


def evaluate(predictor: Predictor, recording: Recording, rows: Sequence[int]) -> tuple[float, float]:
    """Return the median relative error of the peak and the share of right fits, over the rows that were not tried."""
    peak_N = read_peaks(recording)
    left = np.setdiff1d(np.arange(len(recording.rows)), rows)
    gib, _, p_success = fit_feasibility(predictor, try_rows(recording, rows)).predict(left)
    ran = np.array([recording.rows[n].status is RowStatus.OK for n in left])
    error = np.abs(gib / peak_N[left] - 1)
    return float(np.nanmedian(error)), float(np.mean((p_success >= 0.5) == ran))


def follow_ladders(predictor: Predictor, recording: Recording) -> list[float]:
    """Return the relative error at the third and later micro-batches, each after the two below it and nothing else."""
    peak_N, ladders = read_peaks(recording), defaultdict(list)
    for n, row in enumerate(recording.rows):
        others = tuple(sorted((str(k), str(v)) for k, v in recording.space.config(n).items() if k != MICRO_BATCH))
        if np.isfinite(peak_N[n]):
            ladders[others].append((float(row.config[MICRO_BATCH]), n))
    errors = []
    for steps in map(sorted, ladders.values()):
        for (_, first), (_, second), (_, third) in zip(steps, steps[1:], steps[2:], strict=False):
            feasibility = fit_feasibility(predictor, try_rows(recording, [first, second]))
            errors.append(abs(float(feasibility.predict(np.array([third]))[0][0]) / peak_N[third] - 1))
    return errors


def print_landscape(recording: Recording, priors: Priors, seeds: int) -> list[float]:
    """Print the line of one landscape and return its figures."""
    predictor, size = make_predictor(recording.card, recording.space, priors), len(recording.rows)
    by_seed = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(size)
        by_seed.append([evaluate(predictor, recording, order[:count].tolist()) for count in AFTER])
    figures = np.median(np.array(by_seed), axis=0).T
    ladder = follow_ladders(predictor, recording) if recording.space.find(MICRO_BATCH) else []
    middle, within = (np.median(ladder), np.mean(np.array(ladder) <= 0.1)) if ladder else (np.nan, np.nan)
    cells = ["".join(f"{value:>8.2f}" for value in row) for row in (*figures, (middle, within))]
    print(f"{recording.name:<24}" + "  ".join(cells) + f"{len(ladder):>8}", flush=True)
    return [*figures.ravel(), middle, within]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--fit", type=Path, nargs="+", default=[], help="landscapes that constants are fitted on")
    parser.add_argument("--open", action="store_true", help="recomputation is undeclared, whatever the framework")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    if args.open:
        setattr(layout, "has_knob", lambda name, meaning: False)  # noqa: B010  it is not exported there
    recordings = [r for r in load_all(args.landscapes) if np.isfinite(read_peaks(r)).any()]
    fitted = load_all(args.fit)
    print(
        "constants fitted without the landscape's framework; after 0, 1, 2, 3 random trials; next micro-batch after two"
    )
    print(
        f"{'landscape':<24}{'error of the peak':>32}  {'right fits or fails':>32}"
        f"  {'median':>8}{'<= 10 %':>8}{'number':>8}"
    )
    everything = []
    for framework in sorted({recording.card.framework for recording in recordings}):
        others = [recording for recording in fitted if recording.card.framework != framework]
        priors = read_priors(fit_prior(others))
        everything += [print_landscape(r, priors, args.seeds) for r in recordings if r.card.framework == framework]
    cells = np.nanmedian(np.array(everything), axis=0)
    print(f"{'median':<24}" + "".join(f"{value:>8.2f}" for value in cells))


if __name__ == "__main__":
    main()
