"""Compares a sweep with one search per weight, on recordings with the number of accelerators as a dimension.

    python benchmarks/pareto.py [FOLDER ...] [--seeds 3] [--budget 15] [--json FILE]

FOLDER contains recordings (default: those shipped with the project). Recordings of the same work on different numbers
of accelerators are joined into one problem each. Two methods read trials from the same table:

- by weight (the naive method): one search of `--budget` trials with the default strategy for each weight 0, 0.1, ..., 1
  of the composite score;
- the sweep: one search with the `pareto` strategy.

Failures count as trials, and a search knows nothing of a row before it asks for it. The hypervolume is computed on
logarithms of step time and accelerators, up to the nadir of the table's Pareto front, as a share of the table's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.base import Observation, Proposer, SearchView
from cclsearch.propose.bayes.pareto_proposer import ParetoProposer
from cclsearch.propose.study.choose import make_sampler
from cclsearch.recording.join import find_family, join_recordings
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.scoring.objective import Objective, load_objective
from cclsearch.stats.pareto import choose_reference_point, find_pareto_front, log_axes, measure_hypervolume

WEIGHTS = tuple(round(0.1 * n, 1) for n in range(11))
Loss = Callable[[dict[str, float]], float]


@dataclass(frozen=True)
class Problem:
    """One joined recording, with the reference point and hypervolume of its whole table."""

    recording: Recording
    reference_2: np.ndarray
    full: float
    """Hypervolume of the whole table."""

    def share(self, rows: Sequence[int]) -> float:
        """Return the hypervolume of these rows as a share of the whole table's."""
        points = self.points(rows)
        return measure_hypervolume(log_axes(points), self.reference_2) / self.full if len(points) else 0.0

    def points(self, rows: Sequence[int]) -> np.ndarray:
        """(n, 2) step time and number of accelerators of the rows that have a time."""
        times = [(self.recording.rows[row].metrics.get("step_time_s"), row) for row in rows]
        sizes = self.recording.space.num_accelerators_N
        return np.array([[t, float(sizes[row])] for t, row in times if t is not None]).reshape(-1, 2)


def make_problem(recording: Recording) -> Problem:
    """Return the problem, with the reference point from the Pareto front of the whole table."""
    rows = range(len(recording.rows))
    bare = Problem(recording, np.zeros(2), 1.0)
    points = bare.points(rows)
    spread = log_axes(points)
    reference = choose_reference_point(spread[find_pareto_front(points)])
    return Problem(recording, reference, measure_hypervolume(spread, reference))


def find_problems(folders: Sequence[Path], into: Path) -> list[Recording]:
    """Return each family of recordings below these folders, joined; recordings without a family are left out."""
    joined: dict[str, Recording] = {}
    seen: set[Path] = set()
    for folder in (path for root in folders for path in find_recordings(root)):
        if folder.resolve() in seen:
            continue
        family = find_family(folder)
        seen |= {member.folder.resolve() for member in family if member.folder}
        if len({member.card.hardware.num_accelerators for member in family}) > 1:
            recording = load_recording(join_recordings(family, into))
            joined[recording.name] = recording
    return list(joined.values())


def replay(problem: Problem, proposer: Proposer, budget: int, *, seed: int, objective: str, loss: Loss) -> list[int]:
    """Return the rows in the order in which the proposer asks for them."""
    recording = problem.recording
    rows: list[int] = []
    seen: list[Observation] = []
    while len(rows) < budget:
        view = SearchView(
            card=recording.card,
            space=recording.space,
            observations=tuple(seen),
            pending=frozenset(),
            budget_left=budget - len(rows),
            seed=seed,
            target=load_objective(objective),
        )
        proposals = proposer.propose(view, 1)
        if not proposals:
            break
        row = recording.space.row(proposals[0].config)
        assert row is not None
        rows.append(row)
        seen.append(observe(recording, row, len(rows), loss))
    return rows


def observe(recording: Recording, row: int, trial: int, loss: Loss) -> Observation:
    """Return the observation that a search gets for this row."""
    measured = recording.rows[row]
    if measured.metrics.get("step_time_s") is None:
        kind = FailureKind.OUT_OF_MEMORY if measured.status == "oom" else FailureKind.CRASHED
        failure = Failure(stage=Stage.RUN, kind=kind, message=f"recorded as {measured.status}")
        return Observation(trial=trial, config=measured.config, row=row, loss=None, failure=failure)
    size = float(recording.space.num_accelerators_N[row])
    metrics = {"step_time_s": measured.metrics["step_time_s"], "num_accelerators": size}
    return Observation(
        trial=trial,
        config=measured.config,
        row=row,
        loss=loss(metrics),
        metrics=measured.metrics | metrics,
    )


def compare(problem: Problem, *, seed: int, budget: int) -> dict[str, float]:
    """Return the trials that each method needs and the hypervolume and score that it reaches."""
    naive = run_naive(problem, seed=seed, budget=budget)
    by_weight = [rows[n] for n in range(budget) for rows in naive if n < len(rows)]
    limit = len(by_weight) // 3
    sweep = replay(problem, ParetoProposer(), limit, seed=seed, objective="pareto", loss=lambda m: m["step_time_s"])
    shares = [problem.share(sweep[: n + 1]) for n in range(len(sweep))]
    share = problem.share(by_weight)
    reached = next((n + 1 for n, s in enumerate(shares) if s >= share - 1e-9), None)
    figures = {
        "by_weight_trials": len(by_weight),
        "by_weight_share": share,
        "by_weight_score": score_found(problem, by_weight),
        "by_weight_distinct": len(set(by_weight)),
        "sweep_reaches_by_weight": float(reached is not None),
        "sweep_trials_to_by_weight": reached or limit + 1,
    }
    for count in (15, 40, limit):
        figures[f"sweep_share_after_{count}"] = shares[min(count, len(shares)) - 1]
        figures[f"sweep_score_after_{count}"] = score_found(problem, sweep[:count])
    return figures


def score_found(problem: Problem, rows: Sequence[int]) -> float:
    """Return the best composite score of these rows over the table's best, averaged over the weights.

    The reference configuration is the front's point of the middle size.
    """
    every, found = problem.points(range(len(problem.recording.rows))), problem.points(rows)
    if not len(found):
        return 0.0
    front = every[find_pareto_front(every)]
    reference = front[np.argsort(front[:, 1])][len(front) // 2]
    ratios = []
    for weight in WEIGHTS:
        best, ours = (
            (weight * reference[0] / p[:, 0] + (1 - weight) * reference[1] / p[:, 1]).max() for p in (every, found)
        )
        ratios.append(ours / best)
    return float(np.mean(ratios))


def run_naive(problem: Problem, *, seed: int, budget: int) -> list[list[int]]:
    """Return the rows of one search per weight; each uses its first success as reference."""
    runs = []
    for weight in WEIGHTS:
        objective = load_objective("composite", {"weight": weight})
        proposer = make_sampler("default")
        loss = make_loss(objective)
        runs.append(replay(problem, proposer, budget, seed=seed, objective="composite", loss=loss))
    return runs


def make_loss(objective: Objective) -> Loss:
    """Return the objective's loss function, with the first metrics it gets as the baseline."""
    baseline: list[dict[str, float]] = []

    def loss(metrics: dict[str, float]) -> float:
        baseline.append(metrics)
        return objective.loss(metrics, baseline[0])

    return loss


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    shipped = Path(__file__).resolve().parent.parent / "workloads" / "recordings"
    parser.add_argument("folder", nargs="*", type=Path, default=[shipped])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for recording in find_problems(args.folder, Path(scratch)):
            problem = make_problem(recording)
            runs = [compare(problem, seed=seed, budget=args.budget) for seed in range(args.seeds)]
            mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
            ratios = [run["sweep_trials_to_by_weight"] / run["by_weight_trials"] for run in runs]
            mean |= {"trial_ratio": float(np.mean(ratios)), "worst_trial_ratio": max(ratios)}
            results[recording.name] = mean
            print(f"{recording.name} ({len(recording.rows)} rows)")
            for key, value in mean.items():
                print(f"  {key:<30}{value:9.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"seeds": args.seeds, "budget": args.budget, "problems": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
