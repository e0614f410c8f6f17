"""Measures what earlier searches of other models teach the next one: the figures of `memory_between_searches.md`.

    python benchmarks/memory_between_searches.py LANDSCAPES [LANDSCAPES ...] [--seeds 2] [--others all 3 1 wrong]

Each landscape is searched with constants fitted without any landscape of its framework, 15 trials, once without and
once with the priors that replayed searches of other landscapes leave (15 trials each): `all` others of its framework,
or so many of them at random, or `wrong`: six searches of other frameworks, which a search never takes over by itself.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from fit_prior import fit_prior
from search import load_all

from cclsearch.card.model import Card
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.earlier_fit import learn_odds, learn_priors
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.propose.earlier import EarlierKnowledge, apply_earlier
from cclsearch.recording.load import Recording
from cclsearch.search.bench import RecordedTable
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Predictor
from cclsearch.tasks.training.prediction import Priors, make_predictor, read_priors

BUDGET = 15
AFTER = (1, 3, 5, 10, 15)
WRONG = "wrong"
Ratios = tuple[float, ...]
"""Best over optimum after each trial."""


@dataclass(frozen=True)
class Played:
    """One replayed search."""

    card: Card
    observations: tuple[Observation, ...]
    ratios: Ratios


def play(recording: Recording, priors: Priors, seed: int, earlier: EarlierKnowledge | None = None) -> Played:
    """Return one search with these constants, and with what earlier ones leave."""
    base = make_predictor(recording.card, recording.space, priors)

    def predict(card: Card, space: Space) -> Predictor:
        return apply_earlier(base, earlier)

    proposer, table = DefaultProposer(predict), RecordedTable(recording)
    seen: list[Observation] = []
    for trial in range(1, BUDGET + 1):
        view = SearchView(recording.card, recording.space, tuple(seen), frozenset(), BUDGET + 1 - trial, seed)
        proposals = proposer.propose(view, 1)
        if not proposals:
            break
        config = proposals[0].config
        seen.append(table.ask(trial, recording.space.row(config), config))
    return Played(recording.card, tuple(seen), tuple(table.best_over_optimum(seen, BUDGET)))


def learn(recording: Recording, priors: Priors, searches: Sequence[Played]) -> EarlierKnowledge:
    """Return what these searches leave to one of the recording."""
    predict = partial(make_predictor, priors=priors)
    trials = [(search.card, search.observations) for search in searches]
    predictor = predict(recording.card, recording.space)
    priors, odds = learn_priors(predictor, trials, predict), learn_odds(predictor, trials, predict)
    return EarlierKnowledge(priors=priors, odds=odds)


def play_framework(task: tuple[str, tuple[Path, ...], int, tuple[str, ...]]) -> dict[tuple[str, str], list[Ratios]]:
    """Return (landscape, kind) -> ratios of each seed, for the landscapes of one framework."""
    framework, folders, seeds, kinds = task
    everything = load_all(folders)
    own = [r for r in everything if r.card.framework == framework]
    foreign = [r for r in everything if r.card.framework != framework]
    priors = read_priors(fit_prior(foreign))
    played = {(r.name, seed): play(r, priors, seed) for r in own for seed in range(seeds)}
    found = {(r.name, "none"): [played[r.name, seed].ratios for seed in range(seeds)] for r in own}
    for recording in own:
        for kind in kinds:
            results = []
            for seed in range(seeds):
                rng = random.Random(f"{recording.name} {seed} {kind}")
                others = [r for r in own if r is not recording]
                if kind == WRONG:
                    chosen = rng.sample(foreign, min(len(foreign), 6))
                    searches = [play(r, priors, seed) for r in chosen]
                else:
                    chosen = others if kind == "all" else rng.sample(others, min(int(kind), len(others)))
                    searches = [played[r.name, seed] for r in chosen]
                results.append(play(recording, priors, seed, learn(recording, priors, searches)).ratios)
            found[recording.name, kind] = results
    return found


def print_rows(found: Mapping[tuple[str, str], list[Ratios]], kinds: Sequence[str], names: Sequence[str]) -> None:
    """Print the geometric means over these landscapes, one row per kind."""
    for kind in kinds:
        ratios = np.array([one for name in names for one in found[name, kind]])
        means = np.exp(np.log(ratios).mean(axis=0))
        print(f"  {kind:<28}" + "".join(f"{means[k - 1]:>9.4f}" for k in AFTER), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--others", nargs="+", default=["all", "3", "1", WRONG])
    parser.add_argument("--each", action="store_true", help="print every landscape too")
    args = parser.parse_args()
    folders, others = tuple(args.landscapes), tuple(args.others)
    kinds = ("none", *others)
    frameworks: dict[str, list[str]] = {}
    for recording in load_all(folders):
        frameworks.setdefault(recording.card.framework, []).append(recording.name)
    shared = {framework: names for framework, names in frameworks.items() if len(names) > 1}
    found: dict[tuple[str, str], list[Ratios]] = {}
    with ProcessPoolExecutor(2) as pool:
        for one in pool.map(play_framework, [(name, folders, args.seeds, others) for name in shared]):
            found |= one
    print("best / optimum after trials" + "".join(f"{k:>9}" for k in AFTER).rjust(48))
    everything = [name for names in shared.values() for name in names]
    for title, names in {f"all ({len(everything)} landscapes)": everything, **shared}.items():
        print(title)
        print_rows(found, kinds, names)
    for name in everything if args.each else ():
        print(name)
        print_rows(found, kinds, [name])


if __name__ == "__main__":
    main()
