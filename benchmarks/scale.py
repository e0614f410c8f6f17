"""Quality of the bounded surrogate on large problems, beside the unbounded one, Optuna's TPE and random search.

    python benchmarks/scale.py [--problems 4] [--budget 140] [--rows 2000]

Beyond `MAX_OBSERVATIONS` trials the surrogate is fitted to a window of them and judges fewer candidates. On problems
that are small enough, the same searches run with every trial and every candidate; `blind` searches have no closed
form of anything, as for a task that predicts nothing. The problems are **simulated** (`simulate.py`): the ratios
compare strategies and say nothing about a real system.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import yaml
from simulate import simulate

from cclsearch.card.model import Card
from cclsearch.loop.bench import replay_search
from cclsearch.propose.base import Proposer
from cclsearch.propose.bayes import candidates, surrogate
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.propose.study.choose import make_sampler
from cclsearch.recording.load import Recording, load_recording
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Predictor
from cclsearch.stats.kernel import read_features

MILESTONES = (15, 50, 100, 140, 200, 300)


def make_problem(folder: Path, number: int, num_rows: int) -> Recording:
    """Write and load a simulated landscape of at most `num_rows` rows, and at least half as many."""
    name = f"simulated-large-{number}"
    data, rows = simulate(np.random.default_rng([7, number]), name, num_rows // 2, num_rows)
    (folder / name).mkdir()
    (folder / name / "card.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    with (folder / name / "trials.csv").open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return load_recording(folder / name)


def predict_nothing(card: Card, space: Space) -> Predictor:
    """Return a predictor without closed forms."""
    return Predictor(read_features(space))


@contextmanager
def without_bounds() -> Iterator[None]:
    """Fit every observation and judge the usual number of candidates, however many trials there were."""
    before = candidates.MAX_OBSERVATIONS
    candidates.MAX_OBSERVATIONS = surrogate.MAX_OBSERVATIONS = 10**6  # type: ignore[attr-defined]
    try:
        yield
    finally:
        candidates.MAX_OBSERVATIONS = surrogate.MAX_OBSERVATIONS = before  # type: ignore[attr-defined]


STRATEGIES: tuple[tuple[str, Callable[[], Proposer], Callable[[], AbstractContextManager[None]]], ...] = (
    ("bounded", DefaultProposer, nullcontext),
    ("unbounded", DefaultProposer, without_bounds),
    ("blind, bounded", lambda: DefaultProposer(predict_nothing), nullcontext),
    ("blind, unbounded", lambda: DefaultProposer(predict_nothing), without_bounds),
    ("tpe", lambda: make_sampler("tpe"), nullcontext),
    ("random", lambda: make_sampler("random"), nullcontext),
)


def main() -> None:
    """Print, for each strategy, the mean of best over optimum after each milestone, and its time a proposal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--budget", type=int, default=140)
    parser.add_argument("--rows", type=int, default=2000)
    args = parser.parse_args()
    shown = [m for m in MILESTONES if m <= args.budget]
    print(f"{'':24}{''.join(f'{m:>9}' for m in shown)}  ms a proposal")
    with tempfile.TemporaryDirectory(prefix="ccl-scale-") as name:
        problems = [make_problem(Path(name), number, args.rows) for number in range(args.problems)]
        for label, make, bounds in STRATEGIES:
            with bounds():
                searches = [replay_search(problem, make(), seed=0, budget=args.budget) for problem in problems]
            ratios = [np.mean([s.best_over_optimum[m - 1] for s in searches]) for m in shown]
            cost_ms = 1000 * np.mean([s.engine_s / s.num_trials for s in searches])
            print(f"{label:24}{''.join(f'{r:9.3f}' for r in ratios)}  {cost_ms:8.1f}", flush=True)


if __name__ == "__main__":
    main()
