"""Replays samplers on recorded landscapes and measures how good the best configuration is after each trial.

A sampler sees the card's model, batch and hardware, the configurations of the search space, and the results of the
trials it asked for. Each row is read once: a proposal that was tried before counts as a duplicate and a failure.

A recording whose trials were measured at several loads is one problem, a cell, for each limit of its task, if at least
four configurations differ by over 5 % and one keeps the limit.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.core.text import count_of
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.base import Observation, Proposer, SearchView
from cclsearch.propose.study.choose import make_sampler
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.recording.table import RecordedRow, RowStatus
from cclsearch.scoring.objective import Objective, choose_objective, single_metric
from cclsearch.tasks.base import task_of

MILESTONES = (1, 3, 5, 10, 15)
DEFAULT_SAMPLERS = ("surrogate", "random", "heuristic", "tpe")
DEFAULT_SEARCHES = 400
MIN_CONFIGS, MANY_CONFIGS = 4, 8
MIN_GAIN = 0.05
_Task = tuple[str, str, str, str, int, int]
"""Folder of the landscape, its label, its limit, sampler, seed, budget."""
_FAILURES = {
    RowStatus.OOM: (FailureKind.OUT_OF_MEMORY, "recorded as out of memory"),
    RowStatus.FAILED: (FailureKind.CRASHED, "recorded as crashed or out of memory"),
}


@dataclass(frozen=True)
class ReplayedSearch:
    """Result of one search on one landscape."""

    landscape: str
    sampler: str
    seed: int
    best_over_optimum: tuple[float, ...]
    """Loss of the best over the optimum's, after each trial; the worst row's until one succeeds."""
    regret: tuple[float, ...]
    """1 - value of the best / value of the optimum, after each trial; 1 until one succeeds."""
    num_rows: int
    is_cell: bool
    """Whether it has a limit of its task."""
    num_trials: int
    """Trials asked for: fewer than the budget if no configuration was left or the sampler proposed nothing."""
    num_failed: int
    num_duplicates: int
    engine_s: float
    """Seconds spent in the sampler."""


def replay_search(
    recording: Recording, proposer: Proposer, *, seed: int, budget: int, objective: Objective | None = None
) -> ReplayedSearch:
    """Run one serial search on a recording until the budget is spent or the sampler proposes nothing.

    The objective is the primary metric if it is None; some row must satisfy its constraints.
    """
    table = RecordedTable(recording, objective)
    seen: list[Observation] = []
    engine_s = 0.0
    for trial in range(1, budget + 1):
        view = SearchView(
            card=recording.card,
            space=recording.space,
            observations=tuple(seen),
            pending=frozenset(),
            budget_left=budget - trial + 1,
            seed=seed,
            target=objective,
        )
        started = time.perf_counter()
        proposals = proposer.propose(view, 1)
        engine_s += time.perf_counter() - started
        if not proposals:
            break
        seen.append(table.ask(trial, recording.space.row(proposals[0].config), proposals[0].config))
    return ReplayedSearch(
        landscape=recording.name,
        sampler=proposer.name,
        seed=seed,
        best_over_optimum=table.best_over_optimum(seen, budget),
        regret=table.regret(seen, budget),
        num_rows=len(recording.rows),
        is_cell=any(len(row.loads) > 1 for row in recording.rows) and objective is not None,
        num_trials=len(seen),
        num_failed=sum(o.failure is not None for o in seen),
        num_duplicates=table.num_duplicates,
        engine_s=engine_s,
    )


class RecordedTable:
    """The measured rows of a recording; each can be read once."""

    def __init__(self, recording: Recording, objective: Objective | None = None) -> None:
        self._recording = recording
        self._task = task_of(recording.card)
        self._objective = objective or single_metric(recording.primary)
        self._read: set[Any] = set()
        self.num_duplicates = 0

    def ask(self, trial: int, row: int | None, config: Any) -> Observation:
        if config in self._read:
            self.num_duplicates += 1
            return _failed(trial, row, config, FailureKind.ILLEGAL_CONFIG, "proposed before: each row is read once")
        self._read.add(config)
        if row is None:
            return _failed(trial, None, config, FailureKind.ILLEGAL_CONFIG, "not a row of the recording")
        recorded = self._recording.rows[row]
        if recorded.status is not RowStatus.OK:
            return _failed(trial, row, recorded.config, *_FAILURES[recorded.status])
        loss, violation, metrics = self._judge(recorded)
        return Observation(
            trial, recorded.config, row, loss, metrics=metrics, loads=recorded.loads, violation=violation
        )

    def _judge(self, recorded: RecordedRow) -> tuple[float | None, float, dict[str, float]]:
        """Return the loss of a row with status `ok`, None if it violates a constraint; the violation and the metrics.

        With several loads, the metrics are of the load that counts.
        """
        chosen = self._task.choose_load(self._recording.card, recorded.loads)
        metrics = recorded.metrics if chosen is None else recorded.loads[chosen]
        violation = self._objective.violation(metrics)
        return (None if violation else self._objective.loss(metrics)), violation, metrics

    def list_losses(self) -> list[float]:
        """Return the losses of the rows that have one."""
        found = [self._judge(row)[0] for row in self._recording.rows if row.status is RowStatus.OK]
        return [loss for loss in found if loss is not None]

    def regret(self, seen: Sequence[Observation], budget: int) -> tuple[float, ...]:
        """Return the regret after each trial."""
        losses = [seen[n].loss if n < len(seen) else None for n in range(budget)]
        best = list(itertools.accumulate((math.inf if loss is None else loss for loss in losses), min))
        optimum = min(self.list_losses())
        # a loss is less than 0 only if it is not a reciprocal: then a regret is not defined
        return tuple(1.0 if math.isinf(loss) else 1.0 - optimum / loss if loss > 0 else math.nan for loss in best)

    def best_over_optimum(self, seen: Sequence[Observation], budget: int) -> tuple[float, ...]:
        """Return the lowest loss after each trial over the table's; the table's highest until a trial has a loss."""
        losses = self.list_losses()
        tried = [seen[trial].loss or max(losses) if trial < len(seen) else max(losses) for trial in range(budget)]
        return tuple(best / min(losses) for best in itertools.accumulate(tried, min))


def _failed(trial: int, row: int | None, config: Any, kind: FailureKind, message: str) -> Observation:
    return Observation(trial, config, row, None, failure=Failure(stage=Stage.RUN, kind=kind, message=message))


def run_bench(
    folder: Path | str,
    *,
    samplers: Sequence[str] = DEFAULT_SAMPLERS,
    seeds: int | None = None,
    budget: int = 15,
    workers: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run every sampler on every landscape in or below `folder` with every seed; return the figures of `--json`.

    Without `seeds` there are as many as make `DEFAULT_SEARCHES` of each sampler, from 2 to 20.
    A landscape that cannot be loaded is left out, with a line; raises UserError, with one line for each, if all are.
    """
    recordings, left_out = _load_all(find_recordings(folder))
    paths = [recording.folder for recording in recordings]
    for line in left_out if progress else ():
        progress(f"left out: {line}")  # type: ignore[misc]
    problems = list_problems(recordings, label_landscapes(paths, Path(folder)))
    labels = [problem.label for problem in problems]
    seeds = seeds or max(2, min(20, DEFAULT_SEARCHES // len(problems)))
    for name in samplers:
        make_sampler(name)
    tasks = [
        (str(problem.recording.folder), problem.label, problem.limit, name, seed, budget)
        for name in samplers
        for problem in problems
        for seed in range(seeds)
    ]
    searches: list[ReplayedSearch] = []
    for search in _run_tasks(tasks, workers or min(2, os.cpu_count() or 1)):
        searches.append(search)
        if progress and len(searches) % (seeds * len(labels)) == 0:
            progress(f"{search.sampler}: {count_of(seeds, 'search')} on each of {count_of(len(labels), 'landscape')}")
    return {
        "schema_version": 1,
        "provenance": "recorded",
        "folder": str(folder),
        "seeds": seeds,
        "budget": budget,
        "num_landscapes": len(labels),
        "landscapes": labels,
        "notes": {r.name: list(r.notes) for r in recordings if r.notes},
        "left_out": left_out,
        "samplers": {name: _summary_of(name, searches, labels) for name in samplers},
    }


@dataclass(frozen=True)
class Problem:
    """A recording under a limit of its task; the limit is empty if the recording has one load only."""

    recording: Recording
    label: str
    limit: str = ""


def limit_recording(recording: Recording, limit: str) -> tuple[Recording, Objective | None]:
    """Return the recording with a limit frozen in its card, and the objective that has it."""
    if not limit:
        return recording, None
    task = task_of(recording.card)
    objective = choose_objective(recording.primary.name, (limit,), task=recording.card.task)
    objective = task.constrain(recording.card, objective)
    return replace(recording, card=task.freeze(recording.card, objective)), objective


def list_problems(recordings: Sequence[Recording], labels: Sequence[str]) -> list[Problem]:
    """Return the problems to search: each recording, or its cells if its trials have several loads."""
    found = []
    for recording, label in zip(recordings, labels, strict=True):
        limits = task_of(recording.card).bench_limits
        if not limits or not any(len(row.loads) > 1 for row in recording.rows):
            found.append(Problem(recording, label))
            continue
        for limit in limits:
            losses = RecordedTable(*limit_recording(recording, limit)).list_losses()
            misses = len(recording.rows) - len(losses)
            if len(recording.rows) >= MIN_CONFIGS and losses and (misses or min(losses) < (1 - MIN_GAIN) * max(losses)):
                found.append(Problem(recording, f"{label} {limit}", limit))
    return found


def label_landscapes(paths: Sequence[Path], folder: Path) -> list[str]:
    """Return unique labels: the name of each landscape's folder, or its path below `folder` if that name repeats."""
    names = [path.resolve().name if path == folder else path.name for path in paths]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else path.relative_to(folder).as_posix()
        for name, path in zip(names, paths, strict=True)
    ]


def _load_all(paths: Sequence[Path]) -> tuple[list[Recording], list[str]]:
    """Return the landscapes, and why others cannot be loaded."""
    recordings, problems = [], []
    for path in paths:
        try:
            recordings.append(load_recording(path))
        except UserError as error:
            problems.append(str(error))
    if not recordings:
        raise UserError("\n".join(problems))
    return recordings, problems


def _run_tasks(tasks: Sequence[_Task], workers: int) -> Iterator[ReplayedSearch]:
    if workers == 1 or len(tasks) < 4:
        yield from map(_run_task, tasks)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_run_task, tasks, chunksize=max(1, min(20, len(tasks) // (4 * workers))))


def _run_task(task: _Task) -> ReplayedSearch:
    path, label, limit, sampler, seed, budget = task
    recording, objective = _load_cached(path, limit)
    search = replay_search(recording, make_sampler(sampler), seed=seed, budget=budget, objective=objective)
    return replace(search, landscape=label, sampler=sampler)


@cache
def _load_cached(path: str, limit: str) -> tuple[Recording, Objective | None]:
    return limit_recording(load_recording(path), limit)


def _summary_of(name: str, searches: Sequence[ReplayedSearch], labels: Sequence[str]) -> dict[str, Any]:
    own = [search for search in searches if search.sampler == name]
    by_landscape = {label: summarize([s for s in own if s.landscape == label]) for label in labels}
    return summarize(own) | {"landscapes": by_landscape}


def summarize(searches: Sequence[ReplayedSearch]) -> dict[str, Any]:
    """Return the figures of a set of searches; every search has the same weight."""
    budget = len(searches[0].best_over_optimum)
    ratios_SB = np.array([search.best_over_optimum for search in searches])
    cells = [search for search in searches if search.is_cell]
    many = [search for search in cells if search.num_rows >= MANY_CONFIGS]
    milestones = sorted({budget, *(k for k in MILESTONES if k < budget)})
    at = {str(k): ratios_SB[:, k - 1] for k in milestones}
    trials = max(1, sum(search.num_trials for search in searches))
    within = np.where(np.any(ratios_SB <= 1.05, axis=1), np.argmax(ratios_SB <= 1.05, axis=1) + 1.0, np.nan)
    return {
        "best_over_optimum": {
            "gmean": {k: float(np.exp(np.log(ratio).mean())) for k, ratio in at.items()},
            "median": {k: float(np.median(ratio)) for k, ratio in at.items()},
            "p90": {k: float(np.quantile(ratio, 0.9)) for k, ratio in at.items()},
            "worst": {k: float(ratio.max()) for k, ratio in at.items()},
        },
        "num_cells": len(cells),
        "regret": _mean_regret(cells, list(at)),
        "regret_of_many": _mean_regret(many, list(at)),
        "within_1pct": {k: float(np.mean(ratio <= 1.01)) for k, ratio in at.items()},
        "within_5pct": {k: float(np.mean(ratio <= 1.05)) for k, ratio in at.items()},
        "trials_to_within_5pct": None if np.isnan(within).all() else float(np.nanmean(within)),
        "never_within_5pct": float(np.mean(np.isnan(within))),
        "failed_share": sum(search.num_failed for search in searches) / trials,
        "duplicate_share": sum(search.num_duplicates for search in searches) / trials,
        "engine_s_per_trial": sum(search.engine_s for search in searches) / trials,
        "num_searches": len(searches),
    }


def _mean_regret(searches: Sequence[ReplayedSearch], milestones: Sequence[str]) -> dict[str, float] | None:
    if not searches:
        return None
    regrets_SB = np.array([search.regret for search in searches])
    return {k: float(regrets_SB[:, int(k) - 1].mean()) for k in milestones}
