"""Measures the default strategy on landscapes that its constants were not fitted on: the figures of `search.md`.

    python benchmarks/search.py LANDSCAPES [LANDSCAPES ...] [--seeds 20] [--without NAME] [--json FILE]
                                [--experts EXPERTS.csv MODELS.csv]

Three splits. `shipped`: constants as shipped (fitted on all landscapes: an upper bound). `landscape`: each landscape is
searched with constants fitted on all others. `framework`: with constants fitted only on the landscapes of the other
frameworks. `fit_prior.py` refits the constants from the guess each time; with `--experts`, as for the shipped ones, to
the published configurations too, without those of the searched framework.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from experts import read_published
from fit_prior import fit_prior

from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.search.bench import ReplayedSearch, replay_search, summarize
from cclsearch.tasks.training.prediction import Priors, load_priors, make_predictor, read_priors

SPLITS: dict[str, Callable[[Recording, Recording], bool]] = {
    "landscape": lambda fitted, searched: fitted.folder != searched.folder,
    "framework": lambda fitted, searched: fitted.card.framework != searched.card.framework,
}
"""Split -> whether the constants for searching one landscape may be fitted on another."""


def load_all(folders: Sequence[Path]) -> list[Recording]:
    """Return every landscape below these folders; of those with the same name, one."""
    found = {path.name: path for folder in folders for path in find_recordings(folder)}
    return [load_recording(path) for path in found.values()]


def search_one(
    task: tuple[Path, tuple[Path, ...], tuple[Path, ...], str, int],
) -> tuple[str, list[ReplayedSearch]]:
    """Return the searches of all seeds on one landscape under one split."""
    path, folders, experts, split, seeds = task
    recording = load_recording(path)
    priors: Priors = load_priors()
    if split in SPLITS:
        kept = [other for other in load_all(folders) if SPLITS[split](other, recording)]
        published = read_published(*experts) if experts else []
        others = [row for row in published if row.card.framework != recording.card.framework]
        priors = read_priors(fit_prior(kept, others))
    proposer = DefaultProposer(partial(make_predictor, priors=priors))
    return split, [replay_search(recording, proposer, seed=seed, budget=15) for seed in range(seeds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--splits", nargs="+", default=["shipped", *SPLITS], choices=["shipped", *SPLITS])
    parser.add_argument(
        "--without", nargs="+", default=[], help="landscapes; for each, prints one more row over all others"
    )
    parser.add_argument("--experts", type=Path, nargs=2, default=(), metavar="CSV", help="published runs, and models")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folders = tuple(args.landscapes)
    recordings = load_all(folders)
    unknown = set(args.without) - {r.name for r in recordings}
    if unknown or args.seeds < 1:
        parser.error(
            f"there is no landscape {min(unknown)!r}" if unknown else f"--seeds must be at least 1; got {args.seeds}"
        )
    tasks = [
        (r.folder, folders, tuple(args.experts), split, args.seeds)
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
        for landscape in args.without:
            figures[split][f"no {landscape}"] = summarize([search for search in own if search.landscape != landscape])
        for name, summary in figures[split].items():
            gmean = summary["best_over_optimum"]["gmean"]
            means = " ".join(f"{gmean[k]:.4f}" for k in gmean)
            worst, share = summary["best_over_optimum"]["worst"]["15"], summary["within_5pct"]["15"]
            print(
                f"{split:<10}{name:<24}{means}  worst {worst:.3f}  within 5 % {share:.1%}  "
                f"failed {summary['failed_share']:.1%}  duplicates {summary['duplicate_share']:.1%}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
