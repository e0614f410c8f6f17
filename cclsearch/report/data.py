"""The content of a report as plain data, and the comparison of several runs: pages, charts and tables read this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.charts.parts import Lane
from cclsearch.charts.trials import NeighborPoint
from cclsearch.core.metrics import MetricInfo
from cclsearch.core.values import Provenance, format_knob_value
from cclsearch.report.evidence import TurnView
from cclsearch.report.figures import find_gain, name_better, show_value
from cclsearch.report.rows import TrialRow
from cclsearch.tasks.base import Task


@dataclass(frozen=True)
class StepOfRanks:
    """One traced step of the best trial; without a best, of the first trial that has traces."""

    trial: int
    seconds_by_rank: Mapping[int, Mapping[str, float]]
    """Rank -> seconds by cause."""
    lanes: tuple[Lane, ...]
    worst_rank: int | None = None
    """The rank that the others wait for."""

    @property
    def waits(self) -> bool:
        return self.worst_rank is not None and len(self.seconds_by_rank) > 1


@dataclass(frozen=True)
class RunPage:
    """One run of a report."""

    run_id: str
    task: Task
    workload: str
    card: str
    title: str
    model: str
    """Name of the model; empty for a task without one."""
    work: str
    """Properties that two comparable runs of a task share, such as model, batch and precision."""
    hardware: str
    framework: str
    provenance: str
    """`measured`, `recorded` or `simulated`."""
    objective: str
    constraints: tuple[str, ...]
    """The objective's, one phrase each."""
    score_label: str
    greater_is_better: bool
    status: str
    """`ended`, `running`, ..., with the reason."""
    banner: tuple[str, ...]
    """Notes to the operator on what runs where."""
    trials: tuple[TrialRow, ...]
    counts: str
    """Number of admitted trials, and of the other ends."""
    best: int | None
    baseline: int | None
    facts: tuple[tuple[str, str], ...]
    """Label and figure at the head of the page."""
    confidence: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    """Interval of the best trial's score; None if it is unknown."""
    drift: tuple[str, ...] = ()
    """Comparison of each window of the cluster with the first, one sentence each."""
    other_load: tuple[str, ...] = ()
    """Figures of the best on a second load that trials measured too."""
    neighbors: tuple[NeighborPoint, ...] = ()
    costs: tuple[tuple[str, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    """Topic and text of the search's notes."""
    tags: tuple[str, ...] = ()
    launch: str = ""
    """Shell script that runs the best configuration by hand; empty without a best."""
    created: str = ""
    folder: Path | None = None
    """Folder of the run, for links relative to the page; None: no links."""
    damage: tuple[str, ...] = ()
    """Faults of the ledger."""
    job_script: str = ""
    """The script that ran the best trial; empty if there is none."""
    importance: Mapping[str, float] = field(default_factory=dict)
    """Knob -> its share of the figure's variation."""
    step: StepOfRanks | None = None
    """One step of the best trial; None without traces."""
    turns: tuple[TurnView, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Environment of the run: versions, nodes, hash of the inputs."""

    @property
    def metric(self) -> MetricInfo:
        """The task's primary metric."""
        return self.task.primary_metric

    @property
    def is_by_primary(self) -> bool:
        """Whether the objective ranks by the primary metric, alone or before others."""
        return self.score_label.split(" (")[0] == self.metric.words

    @property
    def best_trial(self) -> TrialRow | None:
        return next((trial for trial in self.trials if trial.number == self.best), None)

    @property
    def baseline_trial(self) -> TrialRow | None:
        return next((trial for trial in self.trials if trial.number == self.baseline), None)

    @property
    def mark(self) -> str:
        """` (recorded)` or ` (simulated)` if the figures were not measured here; else empty."""
        return Provenance(self.provenance).mark


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
