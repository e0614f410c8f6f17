"""Comparison of several runs: their ranking on equal work, and the knobs in which their winners differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cclsearch.core.values import format_knob_value
from cclsearch.report.data import RunPage, TrialRow
from cclsearch.report.figures import find_gain, name_better, show_value


@dataclass(frozen=True)
class RankingEntry:
    """The best trial of one run in a ranking."""

    rank: int
    """By primary metric, 1 for the best of its group: runs of equal task, work, hardware and provenance. Equal values
    share a rank."""
    group: str
    page: RunPage
    trial: TrialRow
    value: float
    """Its primary metric."""
    ratio: float
    """Its primary metric divided by that of the group's best."""


def rank_runs(pages: Sequence[RunPage]) -> list[RankingEntry]:
    """The best trial of every run, ranked inside its group.

    Only runs of equal work on equal hardware are compared; measured, recorded and simulated figures never mix.
    """
    groups: dict[tuple[str, str], list[tuple[float, RunPage, TrialRow]]] = {}
    for page in pages:
        best = page.best_trial
        if best is not None and best.value:
            groups.setdefault((page.task.name, group_of(page)), []).append((best.value, page, best))
    ranking = []
    for (_, group), entries in groups.items():
        sign = entries[0][1].metric.sign
        entries.sort(key=lambda entry: (sign * entry[0], entry[1].run_id))
        values = [value for value, *_ in entries]
        for value, page, trial in entries:
            ranking.append(RankingEntry(values.index(value) + 1, group, page, trial, value, value / values[0]))
    return ranking


def split_by_task(pages: Sequence[RunPage]) -> list[list[RunPage]]:
    """The runs of each task; runs of different tasks are never ranked against each other."""
    by_task: dict[str, list[RunPage]] = {}
    for page in pages:
        by_task.setdefault(page.task.name, []).append(page)
    return list(by_task.values())


def group_of(page: RunPage) -> str:
    """Work, hardware and provenance: two runs of a task are comparable only if these are equal."""
    return f"{page.work}, on {page.hardware}, {page.provenance}"


def compare_frameworks(pages: Sequence[RunPage]) -> list[str]:
    """For each group, one sentence per worse framework: its best trial against that of the best framework."""
    lines = []
    ranking = [entry for same in split_by_task(pages) for entry in rank_runs(same)]
    for (_, group), entries in itertools.groupby(ranking, key=lambda entry: (entry.page.task.name, entry.group)):
        best: dict[str, RankingEntry] = {}
        for entry in entries:
            best.setdefault(entry.page.framework, entry)
        first, *others = best.values()
        metric = first.page.metric
        for other in others:
            gain = f"{find_gain(metric, other.value, first.value):.3g}x {name_better(metric)}"
            lines.append(
                f"On {group}: the best of {first.page.framework} is {gain} than the best of {other.page.framework}"
                f" ({show_value(metric, other.value)} -> {show_value(metric, first.value)})."
            )
    return lines


def group_ranking(pages: Sequence[RunPage]) -> list[list[RankingEntry]]:
    """The ranking group by group, those with the most runs first."""
    groups: dict[tuple[str, str], list[RankingEntry]] = {}
    for same in split_by_task(pages):
        for entry in rank_runs(same):
            groups.setdefault((entry.page.task.name, entry.group), []).append(entry)
    return sorted(groups.values(), key=lambda entries: -len(entries))


def find_differences(entries: Sequence[RankingEntry]) -> list[tuple[str, list[str]]]:
    """The knobs in which the best trials of these runs differ, with the value of each."""
    knobs = dict.fromkeys(knob for entry in entries for knob in entry.trial.config)
    rows = []
    for knob in knobs:
        configs = [entry.trial.config for entry in entries]
        values = [format_knob_value(config[knob]) if knob in config else "" for config in configs]
        if len(set(values)) > 1:
            rows.append((knob, values))
    return rows
