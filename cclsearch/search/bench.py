"""Replays of recorded landscapes with every strategy, and what they found after how many trials.

A strategy sees the card's model, batch and hardware, the configurations of the legal set, and the results of the trials
that it asked for. No row is read twice: a proposal that was already tried counts as a duplicate and shows nothing.
"""

from __future__ import annotations

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
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Observation, Proposer, SearchView
from cclsearch.recording.load import RecordedRow, Recording, find_recordings, load_recording

MILESTONES = (1, 3, 5, 10, 15)
DEFAULT_STRATEGIES = ("default", "random", "heuristic", "tpe")
_Task = tuple[str, str, str, int, int]
"""Folder of the landscape, what it is called, strategy, seed, budget."""
_KINDS = {"oom": FailureKind.OUT_OF_MEMORY, "failed": FailureKind.CRASHED}
_MESSAGES = {"oom": "recorded as out of memory", "failed": "recorded as crashed or out of memory"}


@dataclass(frozen=True)
class ReplayedSearch:
    """One search over one landscape."""

    landscape: str
    strategy: str
    seed: int
    best_over_optimum: tuple[float, ...]
    """After each trial; until the first success, what the slowest row of the table would have been."""
    num_trials: int
    """Trials that were asked for: fewer than the budget where the space, or the strategy, ran out."""
    num_failed: int
    num_duplicates: int
    engine_s: float
    """Seconds spent in the strategy."""


def replay_search(recording: Recording, proposer: Proposer, *, seed: int, budget: int) -> ReplayedSearch:
    """One search, serially, from nothing known to the end of the budget."""
    table = RecordedTable(recording)
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
        )
        started = time.perf_counter()
        proposals = proposer.propose(view, 1)
        engine_s += time.perf_counter() - started
        if not proposals:
            break
        observation = table.ask(trial, recording.space.row(proposals[0].config), proposals[0].config)
        seen.append(observation)
    return ReplayedSearch(
        landscape=recording.name,
        strategy=proposer.name,
        seed=seed,
        best_over_optimum=_curve(recording, seen, budget),
        num_trials=len(seen),
        num_failed=sum(o.failure is not None for o in seen),
        num_duplicates=table.num_duplicates,
        engine_s=engine_s,
    )


class RecordedTable:
    """Hands out each row once."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._read: set[Any] = set()
        self.num_duplicates = 0

    def ask(self, trial: int, row: int | None, config: Any) -> Observation:
        if config in self._read:
            self.num_duplicates += 1
            return _failed(trial, row, config, FailureKind.ILLEGAL_CONFIG, "tried before: a row is read once")
        self._read.add(config)
        if row is None:
            return _failed(trial, None, config, FailureKind.ILLEGAL_CONFIG, "is no row of the recording")
        return _observe(trial, row, self._recording.rows[row])


def _observe(trial: int, row: int, recorded: RecordedRow) -> Observation:
    if recorded.status != "ok":
        return _failed(trial, row, recorded.config, _KINDS[recorded.status], _MESSAGES[recorded.status])
    return Observation(
        trial=trial,
        config=recorded.config,
        row=row,
        loss=recorded.step_time_s,
        step_time_s=recorded.step_time_s,
        peak_memory_gib=recorded.peak_memory_gib,
    )


def _failed(trial: int, row: int | None, config: Any, kind: FailureKind, message: str) -> Observation:
    return Observation(trial, config, row, None, failure=Failure(stage=Stage.RUN, kind=kind, message=message))


def _curve(recording: Recording, seen: Sequence[Observation], budget: int) -> tuple[float, ...]:
    slowest = max(row.step_time_s for row in recording.rows if row.step_time_s is not None)
    best, curve = slowest, []
    for trial in range(budget):
        if trial < len(seen):
            best = min(best, seen[trial].loss or slowest)
        curve.append(best / recording.best_step_time_s)
    return tuple(curve)


def run_bench(
    folder: Path | str,
    *,
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    seeds: int = 20,
    budget: int = 15,
    workers: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Every strategy on every landscape at or below `folder`, with every seed: the figures as `--json` holds them.

    Raises UserError, one line a problem and before anything starts, where a landscape or a strategy cannot be had.
    """
    paths = find_recordings(folder)
    recordings = _load_all(paths)
    labels = label_landscapes(paths, Path(folder))
    for name in strategies:
        PROPOSERS.get(name)
    tasks = [
        (str(path), label, name, seed, budget)
        for name in strategies
        for path, label in zip(paths, labels, strict=True)
        for seed in range(seeds)
    ]
    searches: list[ReplayedSearch] = []
    for search in _run_tasks(tasks, workers or min(2, os.cpu_count() or 1)):
        searches.append(search)
        if progress and len(searches) % (seeds * len(paths)) == 0:
            progress(f"{search.strategy}: {seeds} searches on each of {len(paths)} landscapes")
    return {
        "schema_version": 1,
        "provenance": "recorded",
        "folder": str(folder),
        "seeds": seeds,
        "budget": budget,
        "num_landscapes": len(paths),
        "landscapes": labels,
        "notes": {label: list(r.notes) for label, r in zip(labels, recordings, strict=True) if r.notes},
        "strategies": {name: _summary_of(name, searches, labels) for name in strategies},
    }


def label_landscapes(paths: Sequence[Path], folder: Path) -> list[str]:
    """What each landscape is called, all different: its folder's name, or its path from `folder` where names repeat."""
    names = [path.resolve().name if path == folder else path.name for path in paths]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else path.relative_to(folder).as_posix()
        for name, path in zip(names, paths, strict=True)
    ]


def _load_all(paths: Sequence[Path]) -> list[Recording]:
    recordings, wrong = [], []
    for path in paths:
        try:
            recordings.append(load_recording(path))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("\n".join(wrong))
    return recordings


def _run_tasks(tasks: Sequence[_Task], workers: int) -> Iterator[ReplayedSearch]:
    if workers == 1 or len(tasks) < 4:
        yield from map(_run_task, tasks)
        return
    held = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    os.environ.update(dict.fromkeys(held, "1"))  # two processes of one thread each beat one of two on small matrices
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield from pool.map(_run_task, tasks, chunksize=max(1, min(20, len(tasks) // (4 * workers))))
    finally:
        for name, value in held.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _run_task(task: _Task) -> ReplayedSearch:
    path, label, strategy, seed, budget = task
    played = replay_search(_load_cached(path), PROPOSERS.get(strategy)(), seed=seed, budget=budget)
    return replace(played, landscape=label)


@cache
def _load_cached(path: str) -> Recording:
    return load_recording(path)


def _summary_of(name: str, searches: Sequence[ReplayedSearch], labels: Sequence[str]) -> dict[str, Any]:
    # every strategy registers under the name it was asked for, which is how its searches are told apart
    own = [search for search in searches if search.strategy == name]
    by_landscape = {label: summarize([s for s in own if s.landscape == label]) for label in labels}
    return summarize(own) | {"landscapes": by_landscape}


def summarize(searches: Sequence[ReplayedSearch]) -> dict[str, Any]:
    """The figures of a set of searches, each search counting the same."""
    budget = len(searches[0].best_over_optimum)
    curves_SB = np.array([search.best_over_optimum for search in searches])
    milestones = [k for k in MILESTONES if k <= budget] or [budget]
    if budget > milestones[-1]:
        milestones.append(budget)
    at = {str(k): curves_SB[:, k - 1] for k in milestones}
    trials = max(1, sum(search.num_trials for search in searches))
    within = np.where(np.any(curves_SB <= 1.05, axis=1), np.argmax(curves_SB <= 1.05, axis=1) + 1.0, np.nan)
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
