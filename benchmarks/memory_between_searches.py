"""Measures what earlier searches of other models teach the next one: the figures of `memory_between_searches.md`.

    python benchmarks/memory_between_searches.py LANDSCAPES [LANDSCAPES ...] [--jittered 3] [--others all 3 1 wrong]
                                                 [--budget 5] [--workers 2] [--each]

Each landscape is searched with constants fitted without any landscape of its framework, once without and once with what
replayed searches of other landscapes leave (15 trials each): `all` others of its framework, or so many of them at
random, or `wrong`: six searches of other frameworks, which a search never takes over by itself; or `rows`: all rows of
all others of its framework, the most that could be learned.

One decision on one landscape moves a mean, so every search is run several times, with the prior means of all
multipliers moved at random (`--jittered` of `search.py`), and differences are between searches with the same priors.
Their intervals (90 %) are of a bootstrap over landscapes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
from fit_prior import fit_prior
from search import list_priors, load_all

from cclsearch.card.model import Card
from cclsearch.loop.bench import RecordedTable
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.propose.warm_start.apply import apply_earlier
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge
from cclsearch.propose.warm_start.learn import learn_knowledge
from cclsearch.recording.load import Recording
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Predictor
from cclsearch.tasks.training.prediction import Priors, make_predictor, read_priors

BUDGET = 15
"""Trials of an earlier search."""
AFTER = (1, 3, 5, 10, 15)
NONE, ALL, ROWS, WRONG = "none", "all", "rows", "wrong"
NUM_WRONG = 6
RESAMPLED = 2000
Ratios = tuple[float, ...]
"""Best over optimum after each trial."""
Found = Mapping[tuple[str, str], Sequence[Ratios]]
"""(Landscape, kind) -> the ratios of each search."""


@dataclass(frozen=True)
class Played:
    """One replayed search."""

    card: Card
    observations: tuple[Observation, ...]
    ratios: Ratios


@dataclass(frozen=True)
class Task:
    """The searches of one framework's landscapes under one draw of the prior means."""

    framework: str
    folders: tuple[Path, ...]
    jittered: int
    """Number of draws; 0: the means as they are."""
    draw: int
    budget: int
    kinds: tuple[str, ...]


def play(
    recording: Recording, priors: Priors, seed: int, budget: int, earlier: EarlierKnowledge | None = None
) -> Played:
    """Return the first trials of a search with these constants, and with what earlier ones leave."""
    base = make_predictor(recording.card, recording.space, priors)

    def predict(card: Card, space: Space) -> Predictor:
        return apply_earlier(base, space, earlier)

    proposer, table = DefaultProposer(predict), RecordedTable(recording)
    seen: list[Observation] = []
    for trial in range(1, budget + 1):
        view = SearchView(recording.card, recording.space, tuple(seen), frozenset(), BUDGET + 1 - trial, seed)
        proposals = proposer.propose(view, 1)
        if not proposals:
            break
        config = proposals[0].config
        seen.append(table.ask(trial, recording.space.row(config), config))
    return Played(recording.card, tuple(seen), tuple(table.best_over_optimum(seen, budget)))


def read_rows(recording: Recording) -> Played:
    """Return every row of a recording as if one search had run it."""
    table = RecordedTable(recording)
    seen = [table.ask(row + 1, row, recording.space.config(row)) for row in range(len(recording.rows))]
    return Played(recording.card, tuple(seen), ())


def learn(recording: Recording, priors: Priors, searches: Sequence[Played]) -> EarlierKnowledge:
    """Return what these searches leave to one of the recording."""
    predict = partial(make_predictor, priors=priors)
    trials = [(search.card, search.observations) for search in searches]
    return learn_knowledge(recording.card, predict(recording.card, recording.space), trials, predict)


def play_framework(task: Task) -> dict[tuple[str, str], Ratios]:
    """Return (landscape, kind) -> ratios, for the landscapes of one framework."""
    everything = load_all(task.folders)
    own = {r.name: r for r in everything if r.card.framework == task.framework}
    foreign = {r.name: r for r in everything if r.card.framework != task.framework}
    fitted = read_priors(fit_prior(list(foreign.values())))
    priors = list(list_priors(fitted, 0, task.jittered))[task.draw]
    known = {**own, **foreign}

    @cache
    def play_earlier(name: str) -> Played:
        return play(known[name], priors, task.draw, BUDGET)

    @cache
    def read_earlier(name: str) -> Played:
        return read_rows(known[name])

    found = {(name, NONE): play_earlier(name).ratios[: task.budget] for name in own}
    for name, kind in product(own, task.kinds):
        rng = random.Random(f"{name} {task.draw} {kind}")
        others = [other for other in own if other != name]
        if kind == WRONG:
            others = rng.sample(list(foreign), min(len(foreign), NUM_WRONG))
        elif kind not in (ALL, ROWS):
            others = rng.sample(others, min(int(kind), len(others)))
        searches = [read_earlier(other) if kind == ROWS else play_earlier(other) for other in others]
        knowledge = learn(own[name], priors, searches)
        found[name, kind] = play(own[name], priors, task.draw, task.budget, knowledge).ratios
    return found


def print_rows(found: Found, kinds: Sequence[str], names: Sequence[str], budget: int) -> None:
    """Print the geometric means over these landscapes, one row per kind, and how they differ from `none`."""
    at = [k - 1 for k in AFTER if k <= budget]
    before = _log_means(found, NONE, names)[:, at]
    for kind in kinds:
        log_LA = _log_means(found, kind, names)[:, at]
        line = "".join(f"{mean:>9.4f}" for mean in np.exp(log_LA.mean(axis=0)))
        if kind != NONE:
            chosen_RL = np.random.default_rng(0).integers(0, len(names), (RESAMPLED, len(names)))
            gain_RA = np.exp(log_LA[chosen_RL].mean(axis=1)) - np.exp(before[chosen_RL].mean(axis=1))
            gain_A = np.exp(log_LA.mean(axis=0)) - np.exp(before.mean(axis=0))
            low_A, high_A = np.quantile(gain_RA, (0.05, 0.95), axis=0)
            ranges = zip(gain_A, low_A, high_A, strict=True)
            line += "  " + "  ".join(f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]" for gain, low, high in ranges)
        print(f"  {kind:<8}{line}", flush=True)


def _log_means(found: Found, kind: str, names: Sequence[str]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """(L, budget) log of best over optimum of each landscape, as a mean over its searches."""
    return np.array([np.log(np.array(found[name, kind])).mean(axis=0) for name in names])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--jittered", type=int, default=3, help="searches of each landscape with prior means moved")
    parser.add_argument("--others", nargs="+", default=[ALL, "3", "1", WRONG])
    parser.add_argument("--budget", type=int, default=5, help="trials of the search that is measured, at most 15")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--each", action="store_true", help="print every landscape too")
    args = parser.parse_args()
    folders, others, budget = tuple(args.landscapes), tuple(args.others), min(args.budget, BUDGET)
    frameworks: dict[str, list[str]] = {}
    for recording in load_all(folders):
        frameworks.setdefault(recording.card.framework, []).append(recording.name)
    shared = {framework: names for framework, names in frameworks.items() if len(names) > 1}
    draws = range(max(args.jittered, 1))
    tasks = [Task(name, folders, args.jittered, draw, budget, others) for name, draw in product(shared, draws)]
    found: dict[tuple[str, str], list[Ratios]] = {}
    with ProcessPoolExecutor(args.workers) as pool:
        for played in pool.map(play_framework, tasks):
            for key, ratios in played.items():
                found.setdefault(key, []).append(ratios)
    after = "".join(f"{k:>9}" for k in AFTER if k <= budget)
    print(f"{'trials':<10}{after}  difference from none after the same trials, with its 90 % interval")
    everything = [name for names in shared.values() for name in names]
    groups = {f"all ({len(everything)} landscapes)": everything, **shared}
    for title, names in (groups | {name: [name] for name in everything if args.each}).items():
        print(title)
        print_rows(found, (NONE, *others), names, budget)


if __name__ == "__main__":
    main()
