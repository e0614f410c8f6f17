"""Comparison of several runs: their ranking on equal work, and their primary metric against its causes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cclsearch.draw.axes import Frame, Scale, fit_scale, show_number
from cclsearch.draw.scene import SERIES, SHAPES, Mark, Rect, Scene, Text
from cclsearch.report.axes import LEFT, RIGHT, WIDTH, draw_bar_scale, draw_legend
from cclsearch.report.data import RunPage, TrialRow
from cclsearch.report.figures import find_gain, name_better, show_value


@dataclass(frozen=True)
class RankingEntry:
    """The best trial of one run in a ranking."""

    rank: int
    """By primary metric, 1 for the best of its group: runs of equal task, work, hardware and provenance."""
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
        for n, (value, page, trial) in enumerate(entries):
            ranking.append(RankingEntry(n + 1, group, page, trial, value, value / entries[0][0]))
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


def draw_against(pages: Sequence[RunPage], cause: str) -> Scene | None:
    """The primary metric of one task against a cause, over all ranked trials; one color and shape per run."""
    metric, label = pages[0].metric, pages[0].task.metric(cause).words
    points = [
        (n, page, trial, trial.metrics[cause], trial.value)
        for n, page in enumerate(pages)
        for trial in page.trials
        if cause in trial.metrics and trial.value
    ]
    if len(points) < 3 or len({value for *_, value, _ in points}) < 2:
        return None
    x = fit_scale([value for *_, value, _ in points], LEFT, WIDTH - RIGHT)
    y = fit_scale([measured for *_, measured in points], 330, 44)
    frame = Frame(x, y)
    marks = "".join(sorted({page.mark for _, page, *_ in points}))
    items = frame.draw(label, metric.axis_label + marks)
    for n, page, trial, value, measured in points:
        figures = f"{label} {show_number(value)}, {show_value(metric, measured)}"
        tip = f"{page.run_id} trial {trial.number}: {figures}\n{trial.config_text}"
        shape, role = SHAPES[n % 5], SERIES[n % len(SERIES)]
        items.append(Mark(x(value), y(measured), shape, 9, role, hollow=trial.number != page.best, tip=tip))
    if len(pages) > 1:
        runs = [(n, pages[n].run_id) for n in sorted({n for n, *_ in points})][:6]
        names = [(name if len(name) <= 24 else name[:23] + "…", n) for n, name in runs]
        entries = [(name, Mark(0, 0, SHAPES[n % 5], 9, SERIES[n % len(SERIES)])) for name, n in names]
        items += draw_legend(entries, LEFT, 24, gap=10, step=32)
    strength = _rank_correlation([(value, measured) for *_, value, measured in points])
    summary = f"{len(points)} trials; rank correlation of {label} with {metric.words} {strength:+.2f}"
    items.append(Text(WIDTH - RIGHT, 24, f"filled: best; rank correlation {strength:+.2f}", 12, "end", "muted"))
    name = f"{metric.words}-{cause}".replace(" ", "-").replace("_", "-").replace("/", "-")
    return Scene(name, f"{metric.title} against {label}", summary, WIDTH, 380, tuple(items))


def draw_bests(pages: Sequence[RunPage]) -> Scene | None:
    """The best of each run of one task as a bar: its primary metric."""
    ranking = rank_runs(pages)
    if len(ranking) < 2:
        return None
    metric, longest = ranking[0].page.metric, max(s.value for s in ranking)
    x = Scale(0.0, longest * 1.18, 330, WIDTH - RIGHT)
    bottom = 40 + 30.0 * len(ranking)
    items = draw_bar_scale(x, 30, bottom, f"{metric.axis_label} of the best trial")
    groups = list(dict.fromkeys(s.group for s in ranking))
    for row, entry in enumerate(ranking):
        y, value = 40 + 30.0 * row, entry.value
        label = f"{entry.page.run_id} · {entry.page.framework}"
        items.append(Text(320, y + 14, label if len(label) < 46 else label[:45] + "…", 12, "end"))
        role = SERIES[groups.index(entry.group) % len(SERIES)]
        items.append(Rect(x.start, y, x(value) - x.start, 20, role, tip=f"{entry.group}\n{entry.trial.config_text}"))
        items.append(Text(x(value) + 6, y + 14, f"{show_number(value)}{entry.page.mark}", 11.5, "start", "muted"))
    summary = "; ".join(f"{s.page.run_id}: {show_value(metric, s.value)}" for s in ranking)
    return Scene("bests", f"Best {metric.words} of each run", summary, WIDTH, bottom + 50, tuple(items))


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation, with mean ranks for ties; 0 if one side does not vary."""
    from scipy.stats import rankdata

    left, right = rankdata([a for a, _ in pairs]), rankdata([b for _, b in pairs])
    dl, dr = left - left.mean(), right - right.mean()
    scale = math.sqrt(float((dl**2).sum() * (dr**2).sum()))
    return float((dl * dr).sum()) / scale if scale else 0.0
