"""Comparison of several runs: their ranking on equal work, and step time against overlap and MFU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cclsearch.draw.axes import Frame, fit_scale, show_number
from cclsearch.draw.scene import SERIES, SHAPES, Item, Mark, Scene, Text
from cclsearch.report.data import RANKED, RunPage, TrialRow

WIDTH, LEFT, RIGHT = 880.0, 76.0, 20.0


@dataclass(frozen=True)
class RankingEntry:
    """The best trial of one run in a ranking."""

    rank: int
    """By step time, 1 for the best of its group; runs of equal work, hardware and provenance form a group."""
    group: str
    page: RunPage
    trial: TrialRow
    ratio: float
    """Its step time divided by that of the group's best."""


def rank_runs(pages: Sequence[RunPage]) -> list[RankingEntry]:
    """The best trial of every run, ranked inside its group.

    Only runs of equal work on equal hardware are compared; measured, recorded and simulated figures never mix.
    """
    groups: dict[str, list[tuple[float, RunPage, TrialRow]]] = {}
    for page in pages:
        best = page.best_trial
        if best is not None and best.step_time_s:
            groups.setdefault(group_of(page), []).append((best.step_time_s, page, best))
    ranking = []
    for group, entries in groups.items():
        entries.sort(key=lambda entry: (entry[0], entry[1].run_id))
        for n, (time_s, page, trial) in enumerate(entries):
            ranking.append(RankingEntry(n + 1, group, page, trial, time_s / entries[0][0]))
    return ranking


def group_of(page: RunPage) -> str:
    """Work, hardware and provenance: two step times are comparable only if these are equal."""
    return f"{page.work}, on {page.hardware}, {page.provenance}"


def compare_frameworks(pages: Sequence[RunPage]) -> list[str]:
    """For each group, one sentence per slower framework: its best step time against the fastest framework's."""
    lines = []
    ranking = rank_runs(pages)
    for group in dict.fromkeys(s.group for s in ranking):
        best: dict[str, RankingEntry] = {}
        for entry in (s for s in ranking if s.group == group):
            best.setdefault(entry.page.framework, entry)
        ordered = sorted(best.values(), key=lambda s: s.ratio)
        for other in ordered[1:]:
            first = ordered[0]
            lines.append(
                f"On {group}: the best of {first.page.framework} is {other.ratio / first.ratio:.3g}x faster than"
                f" the best of {other.page.framework} ({show_number(other.trial.step_time_s or 0)} s ->"
                f" {show_number(first.trial.step_time_s or 0)} s)."
            )
    return lines


def draw_against_step_time(pages: Sequence[RunPage], metric: str, label: str) -> Scene | None:
    """Step time against one metric over all ranked trials, with one color and shape per run."""
    points = [
        (n, page, trial, trial.metrics[metric], trial.step_time_s)
        for n, page in enumerate(pages)
        for trial in page.trials
        if trial.state == RANKED and metric in trial.metrics and trial.step_time_s
    ]
    if len(points) < 3 or len({value for *_, value, _ in points}) < 2:
        return None
    x = fit_scale([value for *_, value, _ in points], LEFT, WIDTH - RIGHT)
    y = fit_scale([time_s for *_, time_s in points if time_s], 330, 44)
    frame = Frame(x, y)
    marks = "".join(sorted({page.mark for _, page, *_ in points}))
    items = frame.draw(label, f"seconds per step{marks}")
    for n, page, trial, value, time_s in points:
        assert time_s is not None
        figures = f"{label} {show_number(value)}, {show_number(time_s)} s"
        tip = f"{page.run_id} trial {trial.number}: {figures}\n{trial.config_text}"
        shape, role = SHAPES[n % 5], SERIES[n % len(SERIES)]
        items.append(Mark(x(value), y(time_s), shape, 9, role, hollow=trial.number != page.best, tip=tip))
    if len(pages) > 1:
        items += _run_legend([page for n, page in enumerate(pages) if any(p[0] == n for p in points)], pages)
    strength = _rank_correlation([(value, time_s or 0.0) for *_, value, time_s in points])
    summary = f"{len(points)} trials; rank correlation of {label} with step time {strength:+.2f}"
    items.append(Text(WIDTH - RIGHT, 24, f"filled: best; rank correlation {strength:+.2f}", 12, "end", "muted"))
    return Scene(
        f"step-time-{metric.replace('_', '-')}", f"Step time against {label}", summary, WIDTH, 380, tuple(items)
    )


def draw_bests(pages: Sequence[RunPage]) -> Scene | None:
    """The best step time of each run as a bar."""
    from cclsearch.draw.axes import Scale, make_ticks
    from cclsearch.draw.scene import Path, Rect

    ranking = rank_runs(pages)
    if len(ranking) < 2:
        return None
    longest = max(s.trial.step_time_s or 0.0 for s in ranking)
    x = Scale(0.0, longest * 1.18, 330, WIDTH - RIGHT)
    bottom = 40 + 30.0 * len(ranking)
    items: list[Item] = [Path(((x(t), 30), (x(t), bottom)), "grid") for t in make_ticks(x, 6)]
    items += [Text(x(t), bottom + 18, show_number(t), 11.5, "middle", "muted") for t in make_ticks(x, 6)]
    items.append(Text((x.start + x.end) / 2, bottom + 38, "seconds per step of the best trial", 12.5, "middle"))
    groups = list(dict.fromkeys(s.group for s in ranking))
    for row, entry in enumerate(ranking):
        y, time_s = 40 + 30.0 * row, entry.trial.step_time_s or 0.0
        label = f"{entry.page.run_id} · {entry.page.framework}"
        items.append(Text(320, y + 14, label if len(label) < 46 else label[:45] + "…", 12, "end"))
        role = SERIES[groups.index(entry.group) % len(SERIES)]
        items.append(Rect(x.start, y, x(time_s) - x.start, 20, role, tip=f"{entry.group}\n{entry.trial.config_text}"))
        items.append(Text(x(time_s) + 6, y + 14, f"{show_number(time_s)}{entry.page.mark}", 11.5, "start", "muted"))
    summary = "; ".join(f"{s.page.run_id}: {show_number(s.trial.step_time_s or 0)} s" for s in ranking)
    return Scene("bests", "Best step time of each run", summary, WIDTH, bottom + 50, tuple(items))


def _run_legend(shown: Sequence[RunPage], pages: Sequence[RunPage]) -> list[Item]:
    items: list[Item] = []
    x = LEFT
    for page in shown[:6]:
        n = list(pages).index(page)
        items.append(Mark(x, 20, SHAPES[n % 5], 9, SERIES[n % len(SERIES)]))
        name = page.run_id if len(page.run_id) <= 24 else page.run_id[:23] + "…"
        items.append(Text(x + 10, 24, name, 12, "start", "muted"))
        x += 32 + 6.6 * len(name)
    return items


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation, with mean ranks for ties; 0 if one side does not vary."""
    from scipy.stats import rankdata

    left, right = rankdata([a for a, _ in pairs]), rankdata([b for _, b in pairs])
    dl, dr = left - left.mean(), right - right.mean()
    scale = math.sqrt(float((dl**2).sum() * (dr**2).sum()))
    return float((dl * dr).sum()) / scale if scale else 0.0
