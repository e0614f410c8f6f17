"""Replays samplers on recorded landscapes and measures how good the best configuration is after each trial.

A sampler sees the card's model, batch and hardware, the configurations of the search space, and the results of the
trials it asked for. Each row is read once: a proposal that was tried before counts as a duplicate and a failure.
"""

from __future__ import annotations

import itertools
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
from cclsearch.recording.load import RecordedRow, Recording, RowStatus, find_recordings, load_recording
from cclsearch.score.objective import Objective, single_metric

MILESTONES = (1, 3, 5, 10, 15)
DEFAULT_SAMPLERS = ("surrogate", "random", "heuristic", "tpe")
_Task = tuple[str, str, str, int, int]
"""Folder of the landscape, its label, sampler, seed, budget."""
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
        num_trials=len(seen),
        num_failed=sum(o.failure is not None for o in seen),
        num_duplicates=table.num_duplicates,
        engine_s=engine_s,
    )


class RecordedTable:
    """The measured rows of a recording; each can be read once."""

    def __init__(self, recording: Recording, objective: Objective | None = None) -> None:
        self._recording = recording
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
        loss, violation = self._judge(recorded)
        return Observation(trial, recorded.config, row, loss, metrics=recorded.metrics, violation=violation)

    def _judge(self, recorded: RecordedRow) -> tuple[float | None, float]:
        """Return the loss of a row with status `ok`, None if it violates a constraint, and the violation."""
        violation = self._objective.violation(recorded.metrics)
        return (None if violation else self._objective.loss(recorded.metrics)), violation

    def best_over_optimum(self, seen: Sequence[Observation], budget: int) -> tuple[float, ...]:
        """Return the lowest loss after each trial over the table's; the table's highest until a trial has a loss."""
        rows = [self._judge(row)[0] for row in self._recording.rows if row.status is RowStatus.OK]
        losses = [loss for loss in rows if loss is not None]
        tried = [seen[trial].loss or max(losses) if trial < len(seen) else max(losses) for trial in range(budget)]
        return tuple(best / min(losses) for best in itertools.accumulate(tried, min))


def _failed(trial: int, row: int | None, config: Any, kind: FailureKind, message: str) -> Observation:
    return Observation(trial, config, row, None, failure=Failure(stage=Stage.RUN, kind=kind, message=message))


def run_bench(
    folder: Path | str,
    *,
    samplers: Sequence[str] = DEFAULT_SAMPLERS,
    seeds: int = 20,
    budget: int = 15,
    workers: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run every sampler on every landscape in or below `folder` with every seed; return the figures of `--json`.

    Raises UserError before anything starts, with one line per landscape or sampler that cannot be loaded.
    """
    paths = find_recordings(folder)
    recordings = _load_all(paths)
    labels = label_landscapes(paths, Path(folder))
    for name in samplers:
        make_sampler(name)
    tasks = [
        (str(path), label, name, seed, budget)
        for name in samplers
        for path, label in zip(paths, labels, strict=True)
        for seed in range(seeds)
    ]
    searches: list[ReplayedSearch] = []
    for search in _run_tasks(tasks, workers or min(2, os.cpu_count() or 1)):
        searches.append(search)
        if progress and len(searches) % (seeds * len(paths)) == 0:
            progress(f"{search.sampler}: {count_of(seeds, 'search')} on each of {count_of(len(paths), 'landscape')}")
    return {
        "schema_version": 1,
        "provenance": "recorded",
        "folder": str(folder),
        "seeds": seeds,
        "budget": budget,
        "num_landscapes": len(paths),
        "landscapes": labels,
        "notes": {label: list(r.notes) for label, r in zip(labels, recordings, strict=True) if r.notes},
        "samplers": {name: _summary_of(name, searches, labels) for name in samplers},
    }


def label_landscapes(paths: Sequence[Path], folder: Path) -> list[str]:
    """Return unique labels: the name of each landscape's folder, or its path below `folder` if that name repeats."""
    names = [path.resolve().name if path == folder else path.name for path in paths]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else path.relative_to(folder).as_posix()
        for name, path in zip(names, paths, strict=True)
    ]


def _load_all(paths: Sequence[Path]) -> list[Recording]:
    recordings, problems = [], []
    for path in paths:
        try:
            recordings.append(load_recording(path))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return recordings


def _run_tasks(tasks: Sequence[_Task], workers: int) -> Iterator[ReplayedSearch]:
    if workers == 1 or len(tasks) < 4:
        yield from map(_run_task, tasks)
        return
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    os.environ.update(dict.fromkeys(before, "1"))  # on small matrices, 2 processes x 1 thread beat 1 x 2
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield from pool.map(_run_task, tasks, chunksize=max(1, min(20, len(tasks) // (4 * workers))))
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _run_task(task: _Task) -> ReplayedSearch:
    path, label, sampler, seed, budget = task
    search = replay_search(_load_cached(path), make_sampler(sampler), seed=seed, budget=budget)
    return replace(search, landscape=label, sampler=sampler)


_load_cached = cache(load_recording)


def _summary_of(name: str, searches: Sequence[ReplayedSearch], labels: Sequence[str]) -> dict[str, Any]:
    own = [search for search in searches if search.sampler == name]
    by_landscape = {label: summarize([s for s in own if s.landscape == label]) for label in labels}
    return summarize(own) | {"landscapes": by_landscape}


def summarize(searches: Sequence[ReplayedSearch]) -> dict[str, Any]:
    """Return the figures of a set of searches; every search has the same weight."""
    budget = len(searches[0].best_over_optimum)
    ratios_SB = np.array([search.best_over_optimum for search in searches])
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
        "within_1pct": {k: float(np.mean(ratio <= 1.01)) for k, ratio in at.items()},
        "within_5pct": {k: float(np.mean(ratio <= 1.05)) for k, ratio in at.items()},
        "trials_to_within_5pct": None if np.isnan(within).all() else float(np.nanmean(within)),
        "never_within_5pct": float(np.mean(np.isnan(within))),
        "failed_share": sum(search.num_failed for search in searches) / trials,
        "duplicate_share": sum(search.num_duplicates for search in searches) / trials,
        "engine_s_per_trial": sum(search.engine_s for search in searches) / trials,
        "num_searches": len(searches),
    }
