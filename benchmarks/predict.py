"""Measures how well time and memory are predicted: the figures of `predict.md`.

    python benchmarks/predict.py LANDSCAPES [LANDSCAPES ...] [--first [--experts EXPERTS.csv MODELS.csv]]

For each landscape, with constants fitted only on the landscapes of the other frameworks: rank correlation and error of
the step time, and accuracy of "fits or fails", before any measurement and after 3 and 5 trials of the default strategy
(evaluated on the untried rows). Also prints the seconds that a million configurations take.

`--first` prints what is known before any measurement only, with the first trial of the default strategy, the fastest
predicted configuration that is likely to succeed, and the fastest predicted one of those that ran, as if their success
were known; the constants are then fitted to the published configurations of
`--experts` too, without those of the landscape's framework.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from experts import Published, read_published
from fit_prior import fit_prior
from scipy.stats import spearmanr
from search import load_all

from cclsearch.loop.bench import RecordedTable
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.ensemble import fit_ensemble
from cclsearch.propose.bayes.feasibility import fit_feasibility
from cclsearch.propose.bayes.prediction import find_quantiles
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.recording.load import Recording, load_recording
from cclsearch.recording.table import RowStatus
from cclsearch.space.table import Knob, Space
from cclsearch.stats.closed_form import LIKELY, predict_space
from cclsearch.tasks.training.prediction import Priors, load_priors, make_predictor, read_priors

AFTER = (0, 3, 5)
SEEDS = range(5)
"""The default strategy draws models of the time at random: its first trial is that of each of these seeds."""
WITHIN = 1.1
NEAR = 2.0
"""The error is also printed over the rows within this factor of the best, among which a search chooses."""
COLUMNS = ("rank", "error", "error near best", "fits or fails", "inside 80 %")


def evaluate(recording: Recording, seen: Sequence[Observation], priors: Priors) -> list[float]:
    """Return, on untried rows, rank correlation, median error, median error near the best, fits-or-fails accuracy and
    the share of measured times inside their 80 % interval.
    """
    predictor = make_predictor(recording.card, recording.space, priors)
    tried = {o.row for o in seen}
    rows = np.array([n for n in range(len(recording.rows)) if n not in tried])
    fit = fit_ensemble(predictor.forms["step_time_s"], predictor.features, seen, ())
    log_time, noise_h = fit.mean(rows), np.array([hypothesis.prior.noise for hypothesis in fit.hypotheses])
    _, low, high = np.exp(find_quantiles(fit.hypotheses, fit.weight_h, rows, noise_h))
    p_success = fit_feasibility(predictor, seen).predict(rows)[2]
    measured = np.array([recording.rows[n].metrics.get("step_time_s") or np.nan for n in rows])
    ok = np.isfinite(measured)
    error = np.abs(np.expm1(log_time[ok] - np.log(measured[ok])))
    near = measured[ok] <= NEAR * recording.best_value
    return [
        float(spearmanr(log_time[ok], measured[ok]).statistic),
        float(np.median(error)),
        float(np.median(error[near])) if near.any() else float("nan"),
        float(np.mean((p_success >= 0.5) == ok)),
        float(np.mean((low[ok] < measured[ok]) & (measured[ok] < high[ok]))),
    ]


def evaluate_one(task: tuple[Path, tuple[Path, ...]]) -> tuple[str, list[list[float]]]:
    """Return the name of one landscape and its figures after 0, 3 and 5 trials."""
    path, folders = task
    recording = load_recording(path)
    others = [r for r in load_all(folders) if r.card.framework != recording.card.framework]
    priors = read_priors(fit_prior(others)) if others else load_priors()
    proposer, table = DefaultProposer(partial(make_predictor, priors=priors)), RecordedTable(recording)
    seen: list[Observation] = []
    figures = []
    for trial in range(max(AFTER) + 1):
        if trial in AFTER:
            figures.append(evaluate(recording, seen, priors))
        view = SearchView(recording.card, recording.space, tuple(seen), frozenset(), 15 - trial, 0)
        config = proposer.propose(view, 1)[0].config
        seen.append(table.ask(trial, recording.space.row(config), config))
    return recording.name, figures


def print_first(folders: Sequence[Path], published: Sequence[Published]) -> None:
    """Print the figures before any measurement and the first trial's time over the optimum, by landscape."""
    recordings = load_all(folders)
    print("before any measurement; constants fitted without its framework")
    names = (*COLUMNS, "predicted/meas.", "first/optimum", "fastest/optimum", "fastest that ran")
    print(f"{'landscape':<26}" + "".join(f"{name:>17}" for name in names))
    everything, firsts, memory = [], [], []
    for framework in sorted({r.card.framework for r in recordings}):
        others = [r for r in recordings if r.card.framework != framework]
        priors = read_priors(fit_prior(others, [one for one in published if one.card.framework != framework]))
        for recording in (r for r in recordings if r.card.framework == framework):
            firsts.append([try_first(recording, priors, seed) for seed in SEEDS])
            ends = [float(np.median(firsts[-1])), *(try_fastest(recording, priors, known=k) for k in (False, True))]
            memory.append(judge_memory(recording, priors))
            everything.append([*evaluate(recording, (), priors), find_bias(recording, priors), *ends])
            print(f"{recording.name:<26}" + "".join(f"{value:>17.2f}" for value in everything[-1]), flush=True)
    ran, fits, oom = np.concatenate(memory, axis=1)
    for kind, own, wrong in (("ran, but more likely not to fit", ran, ~fits), ("out of memory, but likely", oom, fits)):
        print(f"{kind}: {np.sum(own & wrong)} of {own.sum()}")
    found = np.array(everything)
    print(f"{'median':<26}" + "".join(f"{value:>17.3f}" for value in np.nanmedian(found, axis=0)))
    print(f"mean rank {np.mean(found[:, 0]):.3f}; rank of at least 0.85 in {np.mean(found[:, 0] >= 0.85):.0%}")
    within = np.mean(np.array(firsts) <= WITHIN)
    print(
        f"within 10 % of the optimum: first trial {within:.0%}, fastest predicted"
        f" {np.mean(found[:, -2] <= WITHIN):.0%}, fastest predicted that ran {np.mean(found[:, -1] <= WITHIN):.0%}"
        f" of {len(found)} landscapes; failed: {np.mean(np.isinf(firsts)):.0%}, {np.mean(np.isinf(found[:, -2])):.0%}"
    )


def judge_memory(recording: Recording, priors: Priors) -> np.ndarray:
    """(3, N) whether each row ran, is more likely to fit than not, and ran out of memory."""
    predictor = make_predictor(recording.card, recording.space, priors)
    fits = fit_feasibility(predictor, ()).predict(np.arange(len(recording.rows)))[1] >= LIKELY
    ends = np.array([row.status for row in recording.rows])
    return np.array([ends == RowStatus.OK, fits, ends == RowStatus.OOM])


def find_bias(recording: Recording, priors: Priors) -> float:
    """Return the median of predicted / measured step time."""
    predictor = make_predictor(recording.card, recording.space, priors)
    log_time = predictor.forms["step_time_s"].predict(len(recording.rows))[0]
    measured = np.array([row.metrics.get("step_time_s") or np.nan for row in recording.rows])
    return float(np.nanmedian(np.exp(log_time) / measured))


def try_first(recording: Recording, priors: Priors, seed: int) -> float:
    """Return the measured time of the default strategy's first trial over the optimum; infinite if it failed."""
    view = SearchView(recording.card, recording.space, (), frozenset(), 15, seed)
    [proposal] = DefaultProposer(partial(make_predictor, priors=priors)).propose(view, 1)
    return over_optimum(recording, recording.space.row(proposal.config))


def try_fastest(recording: Recording, priors: Priors, *, known: bool = False) -> float:
    """Return the same of the configuration of the lowest predicted time among those more likely to succeed than not.

    `known`: among those that succeeded, which no forecast knows.
    """
    predictor = make_predictor(recording.card, recording.space, priors)
    rows = np.arange(len(recording.rows))
    log_time = predictor.forms["step_time_s"].predict(len(rows))[0]
    if known:
        succeeds = np.array([row.metrics.get("step_time_s") is not None for row in recording.rows])
    else:
        succeeds = fit_feasibility(predictor, ()).predict(rows)[2] >= 0.5
    return over_optimum(recording, int(np.argmin(np.where(succeeds, log_time, np.inf))))


def over_optimum(recording: Recording, row: int | None) -> float:
    value = None if row is None else recording.rows[row].metrics.get("step_time_s")
    return float(value / recording.best_value) if value else float("inf")


def time_a_million(recording: Recording) -> float:
    """Return the seconds for a million configurations of the recording's card, all parts included; best of three."""
    knobs = (
        Knob("tp", (1, 2, 4, 8)),
        Knob("pp", (1, 2, 4, 8, 16)),
        Knob("dp", (1, 2, 4, 8, 16, 32)),
        Knob("micro_batch_size", (1, 2, 4, 8)),
        Knob("zero_stage", (0, 1, 2, 3)),
        Knob("activation_checkpointing", (False, True)),
    )
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(3):
        codes = np.column_stack([rng.integers(0, len(knob.choices), 1_000_000) for knob in knobs]).astype(np.int16)
        space = Space(knobs, codes, num_raw=1_000_000)
        started = time.perf_counter()
        predict_space(recording.card, space)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--first", action="store_true", help="print only what is known before any measurement")
    parser.add_argument("--experts", type=Path, nargs=2, metavar="CSV", help="published configurations, and models")
    args = parser.parse_args()
    folders = tuple(args.landscapes)
    if args.first:
        published = read_published(*args.experts) if args.experts else []
        print_first(folders, published)
        return
    recordings = load_all(folders)
    print("constants fitted without the landscape's framework; after 0, 3 and 5 trials")
    print(f"{'landscape':<26}" + "".join(f"{column:>24}" for column in COLUMNS))
    everything = []
    with ProcessPoolExecutor(2) as pool:
        for name, figures in pool.map(evaluate_one, [(r.folder, folders) for r in recordings if r.folder]):
            everything.append(figures)
            cells = [" ".join(f"{figures[k][c]:>7.2f}" for k in range(len(AFTER))) for c in range(len(COLUMNS))]
            print(f"{name:<26}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
    median = np.nanmedian(np.array(everything), axis=0)
    cells = [" ".join(f"{median[k, c]:>7.2f}" for k in range(len(AFTER))) for c in range(len(COLUMNS))]
    print(f"{'median':<26}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"a million configurations: {time_a_million(recordings[0]):.2f} s")


if __name__ == "__main__":
    main()
