"""The content of a report as plain data, the comparison of several runs, and the charts of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import draw_bests, draw_curves
from cclsearch.charts.knobs import draw_contour, draw_importance, draw_parallel, draw_slice
from cclsearch.charts.parts import Lane, StackedBar, draw_parts, draw_timeline
from cclsearch.charts.trials import (
    FAILED,
    Axis,
    NeighborPoint,
    TrialPoint,
    draw_against,
    draw_history,
    draw_neighbors,
    draw_prediction,
    draw_strip,
    rank_correlation,
)
from cclsearch.core.metrics import MetricInfo
from cclsearch.core.values import Provenance, format_knob_value
from cclsearch.report.figures import find_gain, name_better, show_value
from cclsearch.report.rows import TrialRow, TurnView
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


WIDE = ("progress", "score", "strip", "parallel", "timeline")
"""Charts that take the whole width of a page."""
SAME = 0.995
"""Rank correlation from which one metric is a function of the other, so that a chart of both shows nothing."""


def name_axis(page: RunPage) -> Axis:
    """The task's primary metric as an axis."""
    metric = page.metric
    return Axis(metric.words, metric.axis_label + page.mark, metric.greater_is_better)


def make_points(page: RunPage, *, by_score: bool = False) -> list[TrialPoint]:
    """The trials of a run as charts show them: by primary metric, or by the objective's score."""
    if by_score:
        return [replace(row.as_point(page.best, row.score), spread=None) for row in page.trials]
    name = page.metric.name
    return [
        row.as_point(page.best, None if row.kind == FAILED else row.metrics.get(name), row.expected.get(name))
        for row in page.trials
    ]


def draw_run(page: RunPage) -> list[Chart]:
    """The charts that the data of one run allow."""
    points, axis = make_points(page), name_axis(page)
    important = sorted(page.importance, key=lambda knob: -page.importance[knob])
    interval = page.interval if page.is_by_primary else None
    own = [(page.run_id, point) for point in points]
    charts = [
        draw_history(points, axis, summary=summarize(page), interval=interval),
        None if page.is_by_primary else _draw_score(page),
        draw_strip(points),
        draw_parallel(points, axis),
        draw_importance(page.importance, axis),
        draw_slice(points, axis, first=important[0] if important else None),
        draw_contour(points, axis, first=important[:2]),
        draw_prediction(points, axis),
        draw_neighbors(page.neighbors, axis),
        _draw_causes(page),
        *(_draw_against(own, cause, page.task.metric(cause).words, axis) for cause in page.task.causes),
        *_draw_step(page),
    ]
    return [chart for chart in charts if chart is not None]


def _draw_score(page: RunPage) -> Chart | None:
    axis = Axis(page.score_label, page.score_label + page.mark, page.greater_is_better)
    chart = draw_history(make_points(page, by_score=True), axis, summary=summarize(page))
    return replace(chart, name="score") if chart else None


def _draw_against(points: Sequence[tuple[str, TrialPoint]], cause: str, words: str, axis: Axis) -> Chart | None:
    """The figure against a cause, unless one is a function of the other."""
    pairs = [(p.metrics[cause], p.value) for _, p in points if p.counts and p.value and cause in p.metrics]
    if len(pairs) < 3 or abs(rank_correlation(pairs)) > SAME:
        return None
    return draw_against(points, cause, words, axis)


def _draw_causes(page: RunPage) -> Chart | None:
    """Seconds by cause of the best trial and the baseline."""
    pair = {"best": page.best_trial, "baseline": page.baseline_trial}
    rows = {t.number: (label, t) for label, t in reversed(pair.items()) if t is not None and t.seconds_by_cause}
    bars = [StackedBar(f"{label} (trial {t.number})", t.seconds_by_cause) for label, t in reversed(rows.values())]
    title = f"{page.metric.title if page.metric.is_time else 'Time'} by cause"
    return draw_parts(bars, f"seconds of a {page.task.diagnosed_unit}", name="causes", title=title)


def _draw_step(page: RunPage) -> list[Chart | None]:
    """The best trial's step: seconds by cause of every rank, and its timeline."""
    step = page.step
    if step is None:
        return []
    title = f"Trial {step.trial}: one step by rank" + (
        f" (the others wait for rank {step.worst_rank})" if step.waits else ""
    )
    bars = [StackedBar(f"rank {rank}", parts) for rank, parts in step.seconds_by_rank.items()]
    timeline = draw_timeline(step.lanes)
    named = replace(timeline, title=f"Trial {step.trial}: timeline of one step") if timeline else None
    return [draw_parts(bars, "seconds", name="ranks", title=title), named]


def summarize(page: RunPage) -> str:
    """Counts of the trials by state, and the best one."""
    best = page.best_trial
    if best is None:
        return f"{page.counts}."
    figure = "" if best.value is None else f" with {best.value:.4g} {page.metric.shown_unit}".rstrip() + page.mark
    return f"{page.counts}. The best is trial {best.number}{figure}: {best.config_text}."


def draw_comparisons(entries: Sequence[RankingEntry], name: str) -> list[Chart]:
    """The charts of one group of comparable runs: their bests, and their curves over each other."""
    if len(entries) < 2:
        return []
    pages = [entry.page for entry in entries]
    axis = name_axis(pages[0])
    bests = [(f"{e.page.run_id} · {e.page.framework}", e.value, e.trial.config_text) for e in entries]
    curves = [(page.run_id, make_points(page)) for page in pages]
    ranked = draw_bests(bests, axis, entries[0].group, name=f"{name}bests")
    found = [ranked, draw_curves(curves, axis, name=f"{name}curves")]
    every = [(run, point) for run, points in curves for point in points]
    for cause in pages[0].task.causes:
        chart = _draw_against(every, cause, pages[0].task.metric(cause).words, axis)
        found.append(replace(chart, name=f"{name}{chart.name}") if chart else None)
    return [chart for chart in found if chart is not None]
