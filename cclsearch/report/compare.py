"""Comparison of several runs: their ranking on equal work, and the knobs in which their winners differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cclsearch.core.values import format_knob_value
from cclsearch.report.data import RunPage
from cclsearch.report.figures import find_gain, name_better, show_value
from cclsearch.report.rows import TrialRow


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
    """Its primary metric divided by the best one's of the group."""


def rank_runs(pages: Sequence[RunPage]) -> list[list[RankingEntry]]:
    """The best trial of every run, ranked in groups of comparable runs; the groups with the most runs first.

    Only runs of equal work on equal hardware are compared; measured, recorded and simulated figures never mix.
    """
    groups: dict[tuple[str, str], list[tuple[float, RunPage, TrialRow]]] = {}
    for page in pages:
        best = page.best_trial
        if best is not None and best.value:
            group = f"{page.work}, on {page.hardware}, {page.provenance}"
            groups.setdefault((page.task.name, group), []).append((best.value, page, best))
    rankings = []
    for (_, group), entries in groups.items():
        sign = entries[0][1].metric.sign
        entries.sort(key=lambda entry: (sign * entry[0], entry[1].run_id))
        values = [value for value, *_ in entries]
        ranked = [(values.index(value) + 1, page, trial, value) for value, page, trial in entries]
        rankings.append([RankingEntry(n, group, page, trial, v, v / values[0]) for n, page, trial, v in ranked])
    return sorted(rankings, key=lambda entries: -len(entries))


def compare_frameworks(pages: Sequence[RunPage]) -> list[str]:
    """Return for each group one sentence per worse framework: its best trial against the best framework's."""
    lines = []
    for entries in rank_runs(pages):
        best: dict[str, RankingEntry] = {}
        for entry in entries:
            best.setdefault(entry.page.framework, entry)
        first, *others = best.values()
        metric = first.page.metric
        for other in others:
            ours, theirs = first.page.framework, other.page.framework
            gain = f"{find_gain(metric, other.value, first.value):.3g}x {name_better(metric)}"
            lines.append(
                f"On {first.group}: the best of {ours} is {gain} than the best of {theirs}"
                f" ({show_value(metric, other.value)} -> {show_value(metric, first.value)})."
            )
    return lines


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
