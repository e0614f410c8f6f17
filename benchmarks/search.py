"""Measures the default strategy on landscapes that its constants were not fitted on: the figures of `search.md`.

    python benchmarks/search.py LANDSCAPES [LANDSCAPES ...] [--seeds 20] [--jittered 6] [--misjudged 1]
                                [--json FILE] [--experts EXPERTS.csv MODELS.csv]

Three splits. `shipped`: constants as shipped (fitted on all landscapes: an upper bound). `landscape`: each landscape is
searched with constants fitted on all others. `framework`: with constants fitted only on the landscapes of the other
frameworks. `fit_prior.py` refits the constants from the guess each time; with `--experts`, as for the shipped ones, to
the published configurations too, without those of the searched framework.

Seeds hardly change a search, so one lucky trial on one landscape can make two versions of the code look different.
With `--jittered N`, each seed searches N times instead, with the prior means of all multipliers moved at random by
about a tenth of their widths, and the figures are means over these searches: this is how to compare versions.

With `--misjudged 8`, the closed form predicts every time 8 times too short before any trial, as on hardware or with a
framework unlike all that its constants were fitted to (simulated: the tables are the same).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from experts import read_published
from fit_prior import fit_prior

from cclsearch.core.errors import UserError
from cclsearch.loop.bench import ReplayedSearch, replay_search, summarize
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.stats.calibration import Prior
from cclsearch.tasks.training import time
from cclsearch.tasks.training.prediction import Priors, load_priors, make_predictor, read_priors

SPLITS = ("landscape", "framework")
"""What is left out when the constants for searching one landscape are fitted."""
NEAR = 1.05
JITTER = 0.1
"""Of its width, by how much a prior mean is moved (standard deviation)."""


def load_all(folders: Sequence[Path]) -> list[Recording]:
    """Return every landscape below these folders; of those with the same name, one."""
    found = {path.name: path for folder in folders for path in find_recordings(folder)}
    return [load_recording(path) for path in found.values()]


@dataclass(frozen=True)
class Task:
    """The searches of one landscape under one split."""

    path: Path
    folders: tuple[Path, ...]
    experts: tuple[Path, ...]
    split: str
    seeds: int
    jittered: int
    misjudged: float


@cache
def fit_without(folders: tuple[Path, ...], experts: tuple[Path, ...], split: str, path: Path, framework: str) -> Priors:
    """Return the constants for this landscape under a split; the path is that of the folder if one framework is left
    out, so that these are fitted once."""
    kept = [
        other
        for other in load_all(folders)
        if (other.card.framework != framework if split == "framework" else other.folder != path)
    ]
    published = read_published(*experts) if experts else []
    return read_priors(fit_prior(kept, [row for row in published if row.card.framework != framework]))


def search_one(task: Task) -> tuple[str, list[ReplayedSearch]]:
    """Return the searches of all seeds on one landscape under one split."""
    recording = load_recording(task.path)
    priors = load_priors()
    if task.split in SPLITS:
        left_out = task.path if task.split == "landscape" else Path()
        priors = fit_without(task.folders, task.experts, task.split, left_out, recording.card.framework)
    less_P = np.log(task.misjudged) * (np.array(time.MULTIPLIERS) == "scale")
    priors = replace(priors, time=replace(priors.time, mean_P=priors.time.mean_P - less_P))
    found = []
    for seed in range(task.seeds):
        for moved in list_priors(priors, seed, task.jittered):
            proposer = DefaultProposer(partial(make_predictor, priors=moved))
            found.append(replay_search(recording, proposer, seed=seed, budget=15))
    return task.split, found


def list_priors(priors: Priors, seed: int, jittered: int) -> Iterator[Priors]:
    """Yield the constants of each search of a seed: the given ones, or so many with means moved at random."""
    if not jittered:
        yield priors
    for n in range(jittered):
        rng = np.random.default_rng([seed, n])
        yield replace(priors, time=_move_means(priors.time, rng), memory=_move_means(priors.memory, rng))


def _move_means(prior: Prior, rng: np.random.Generator) -> Prior:
    return replace(prior, mean_P=prior.mean_P + JITTER * prior.sd_P * rng.standard_normal(len(prior.mean_P)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jittered", type=int, default=0, help="searches of each seed with prior means moved")
    parser.add_argument("--misjudged", type=float, default=1.0, help="every time is predicted so many times too short")
    parser.add_argument("--splits", nargs="+", default=["shipped", *SPLITS], choices=["shipped", *SPLITS])
    parser.add_argument("--experts", type=Path, nargs=2, default=(), metavar="CSV", help="published runs, and models")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folders = tuple(args.landscapes)
    try:
        recordings = load_all(folders)
    except UserError as error:
        parser.error(str(error))
    if args.seeds < 1 or not 0 < args.misjudged < np.inf:
        parser.error(f"--seeds must be at least 1 and --misjudged above 0; got {args.seeds} and {args.misjudged}")
    tasks = [
        Task(r.folder, folders, tuple(args.experts), split, args.seeds, args.jittered, args.misjudged)
        for split in args.splits
        for r in recordings
        if r.folder
    ]
    with ProcessPoolExecutor(2) as pool:
        played = list(pool.map(search_one, tasks))
    figures: dict[str, Any] = {}
    for split in args.splits:
        own = [search for name, searches in played if name == split for search in searches]
        families = {r.name: r.card.framework for r in recordings}
        figures[split] = {"all": summarize(own)} | {
            family: summarize([search for search in own if families[search.landscape] == family])
            for family in sorted(set(families.values()))
        }
        for name, summary in figures[split].items():
            gmean = summary["best_over_optimum"]["gmean"]
            means = " ".join(f"{gmean[k]:.4f}" for k in gmean)
            worst, share = summary["best_over_optimum"]["worst"]["15"], summary["within_5pct"]["15"]
            print(
                f"{split:<10}{name:<24}{means}  worst {worst:.3f}  within 5 % {share:.1%}  "
                f"failed {summary['failed_share']:.1%}  duplicates {summary['duplicate_share']:.1%}",
                flush=True,
            )
        missed = Counter(search.landscape for search in own if search.best_over_optimum[-1] > NEAR)
        for landscape, count in missed.items():
            worst = max(search.best_over_optimum[-1] for search in own if search.landscape == landscape)
            print(f"{split:<10}not within 5 %: {landscape} in {count} searches, worst {worst:.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
