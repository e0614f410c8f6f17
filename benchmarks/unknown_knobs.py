"""How a search learns from failures if no closed form knows its knobs: the table "Unknown knobs" of `search.md`.

    python benchmarks/unknown_knobs.py FOLDER [FOLDER ...] [--seeds 2] [--each] [--knowing value memory crash]

`failing`: share of the table's rows; `first`: trial of the first success, in the median; `failed of 10`: share of the
first 10 trials (fewer if the search ends before); `least`: what no search could avoid, because the table has fewer rows
that succeed. The causes of these failures are known of simulated tables only (their column `cause`): `value`, `pair`: a
value, or two values together, that always fails; `again`: those of them that an earlier trial of the search showed;
`memory`; `crash`: an effect of the known knobs. `--knowing`: what a search that knew these causes would still do.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cclsearch.loop.bench import replay_search
from cclsearch.propose.base import Observation, Proposal, SearchView
from cclsearch.propose.bayes.feasibility import Feasibility
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.recording.table import RowStatus
from cclsearch.stats.kernel import Array

FIRST, AFTER = 10, 5
CAUSES = ("value", "pair", "again", "memory", "crash")
SURE = 0.999
HEADER = ("tables", "searches", "failing", "first", "failed of 10", "least", f"best / optimum after {AFTER}", *CAUSES)


class Watched(DefaultProposer):
    """The default strategy, which keeps the trials that it saw last: all but a last one that uses up the budget."""

    seen: Sequence[Observation] = ()

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """See `Proposer`."""
        self.seen = view.observations
        return super().propose(view, count)


@dataclass(frozen=True)
class Figures:
    """What one search did; failures are those of its first 10 trials."""

    failing: float
    """Share of the table's rows."""
    least: float
    """Share of the trials that had to fail."""
    first: int
    """Trial of the first success; one more than the trials if none succeeded."""
    failed: float
    ratio: float
    """Best over optimum after 5 trials."""
    causes: dict[str, float]
    """Cause -> share of the trials."""
    marks: str
    """One sign for each trial: `x` failed."""


def search(recording: Recording, causes: Sequence[str], seed: int) -> Figures:
    """Return the figures of one search."""
    proposer = Watched()
    found = replay_search(recording, proposer, seed=seed, budget=FIRST + AFTER)
    failed = [trial.failure is not None for trial in proposer.seen]
    rows = [row.status is RowStatus.OK for row in recording.rows]
    trials = proposer.seen[:FIRST]
    counts = count_causes([causes[trial.row or 0] for trial in trials if trial.failure is not None])
    return Figures(
        failing=1 - float(np.mean(rows)),
        least=max(0, len(trials) - sum(rows)) / len(trials),
        first=[*failed, False].index(False) + 1,
        failed=sum(failed[:FIRST]) / len(trials),
        ratio=found.best_over_optimum[AFTER - 1],
        causes={cause: counts[cause] / len(trials) for cause in CAUSES},
        marks="".join("x" if one else "." for one in failed),
    )


def count_causes(causes: Sequence[str]) -> Counter[str]:
    """Return how many failures had each kind of cause; `causes` are theirs, in order."""
    counts: Counter[str] = Counter()
    for n, cause in enumerate(causes):
        kind = "pair" if "+" in cause else "value" if "=" in cause else cause
        counts["again" if kind in ("value", "pair") and cause in causes[:n] else kind] += 1
    return counts


@contextmanager
def knowing(kinds: Collection[str], causes: Sequence[str]) -> Iterator[None]:
    """A search that knows which rows fail by these kinds of causes: `value` (and pairs), `memory`, `crash`."""
    learned = Feasibility.predict

    def predict(self: Feasibility, rows: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        gib, p_fits, _ = learned(self, rows)
        mean, spread = self.crash.marginals(rows)
        intact = np.ones(len(rows)) if self.broken is None else 1 - self.broken.p_broken(rows)
        p_of = {"value": intact, "memory": p_fits, "crash": ndtr(-mean / np.sqrt(1 + spread))}
        actual = ["value" if "=" in causes[row] else causes[row] for row in rows]
        for kind in kinds:
            p_of[kind] = np.array([SURE if cause != kind else 1 - SURE for cause in actual])
        return gib, p_fits, p_of["value"] * p_of["memory"] * p_of["crash"]

    with patch.object(Feasibility, "predict", predict if kinds else learned):
        yield


def read_causes(folder: Path) -> list[str]:
    """Return the cause of each row's failure; empty where none is known."""
    with (folder / "trials.csv").open(newline="", encoding="utf-8") as lines:
        return [line.get("cause", "") for line in csv.DictReader(lines)]


def print_row(title: str, found: Sequence[Figures], marks: str = "") -> None:
    """Print the means over these searches, as a row of a Markdown table."""
    ratio = float(np.exp(np.mean([np.log(one.ratio) for one in found])))
    mean = {cause: float(np.mean([one.causes[cause] for one in found])) for cause in CAUSES}
    cells = [title, str(len(found)), f"{np.mean([one.failing for one in found]):.0%}"]
    cells += [f"{np.median([one.first for one in found]):.0f}", f"{np.mean([one.failed for one in found]):.1%}"]
    cells += [f"{np.mean([one.least for one in found]):.1%}", f"{ratio:.3f}", *(f"{mean[c]:.1%}" for c in CAUSES)]
    print("| " + " | ".join(cells) + " |" + marks, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--each", action="store_true", help="print every table too, with a mark for each trial")
    parser.add_argument("--knowing", nargs="+", default=[], choices=("value", "memory", "crash"))
    args = parser.parse_args()
    print("| " + " | ".join(HEADER) + " |\n" + "| --- " * len(HEADER) + "|")
    for folder in args.folders:
        found: list[Figures] = []
        for path in find_recordings(folder):
            recording, causes = load_recording(path), read_causes(path)
            with knowing(args.knowing, causes):
                own = [search(recording, causes, seed) for seed in range(args.seeds)]
            if args.each:
                print_row(path.name, own, f" {own[0].marks}")
            found += own
        print_row(folder.name, found)


if __name__ == "__main__":
    main()
