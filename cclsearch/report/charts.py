"""The charts of one run: each function turns plain data into a scene."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from cclsearch.core.values import Value
from cclsearch.draw.axes import Frame, Scale, fit_scale, make_ticks, show_number
from cclsearch.draw.scene import SCALE, SERIES, Item, Mark, Path, Rect, Scene, Text
from cclsearch.report.axes import LEFT, RIGHT, WIDTH, draw_bar_scale, draw_legend
from cclsearch.report.data import CONFIRMATION, ENDED_EARLY, FAILED, NOT_ADMITTED, RANKED, RUNNING, RunPage, TrialRow
from cclsearch.report.figures import show_value

STRIP_ROW = 22.0
MAX_STRIP_COLUMNS = 200


def draw_progress(page: RunPage, *, by_score: bool = False) -> Scene | None:
    """The primary metric (or score) by trial with best so far and failures; the configurations in a strip below."""
    value: Callable[[TrialRow], float | None] = (lambda t: t.score) if by_score else (lambda t: t.value)
    shown = [(trial, v) for trial in page.trials if (v := value(trial)) is not None]
    refused = {} if by_score else _measured_but_refused(page)
    if not shown and not refused:
        return None
    knobs = _varied_knobs(page.trials)
    bottom = 268.0
    x = Scale(0.5, len(page.trials) + 0.5, LEFT + 60, WIDTH - RIGHT)
    place = {trial.number: n + 1 for n, trial in enumerate(page.trials)}
    metric = page.metric
    interval = page.interval if page.is_by_primary and not by_score else None
    y = fit_scale([*(v for _, v in shown), *refused.values(), *(interval or ())], bottom, 52)
    frame = Frame(x, y)
    unit = page.score_label if by_score else metric.axis_label
    ticks = _trial_ticks(len(page.trials))
    names = [str(page.trials[int(n) - 1].number) for n in ticks]
    items = frame.draw("", unit + page.mark, x_ticks=ticks, x_names=names)
    items += _best_so_far(shown, place, frame, page.greater_is_better if by_score else metric.greater_is_better)
    best = page.best_trial
    if best is not None and interval:
        at, (low, high) = x(place[best.number]), interval
        items.append(Path(((at, y(low)), (at, y(high))), "green", 2.0, tip=f"interval of the true {metric.words}"))
    for trial in page.trials:
        at_y = refused.get(trial.number)
        items.append(_trial_mark(page, trial, value(trial), x(place[trial.number]), frame, refused=at_y))
    used = [(kind, mark) for kind, mark in _MARKS.items() if kind != RUNNING and _is_used(kind, page.trials)]
    items += draw_legend(used, LEFT + 60, 20)
    items += _draw_strip(page, knobs, x, bottom + 34)
    height = bottom + 34 + (STRIP_ROW * len(knobs) + 26 if len(page.trials) <= MAX_STRIP_COLUMNS else 14)
    what = page.score_label if by_score else metric.title
    name = "score" if by_score else "progress"
    return Scene(name, f"{what} by trial", _summarize_progress(page, shown, unit), WIDTH, height, tuple(items))


_MARKS: dict[str, Mark] = {
    RANKED: Mark(0, 0, "circle", 9, "blue"),
    CONFIRMATION: Mark(0, 0, "diamond", 9, "purple"),
    "best": Mark(0, 0, "star", 14, "green"),
    NOT_ADMITTED: Mark(0, 0, "triangle", 9, "yellow", hollow=True),
    ENDED_EARLY: Mark(0, 0, "square", 8, "yellow", hollow=True),
    FAILED: Mark(0, 0, "cross", 8, "orange"),
    RUNNING: Mark(0, 0, "ring", 8, "gray"),
}
"""The mark of each kind of trial, in the order of the legend."""


def _measured_but_refused(page: RunPage) -> dict[int, float]:
    """Number of each trial that ran and was not admitted, or ended early -> its primary metric."""
    name, states = page.metric.name, (NOT_ADMITTED, ENDED_EARLY)
    return {t.number: t.metrics[name] for t in page.trials if t.state in states and name in t.metrics}


def _trial_mark(
    page: RunPage, trial: TrialRow, value: float | None, x: float, frame: Frame, *, refused: float | None = None
) -> Mark:
    """The mark of one trial; `refused` is what was measured, if it was not admitted."""
    tip = f"trial {trial.number}: {trial.config_text}"
    if value is None:
        state = trial.state if trial.state in (NOT_ADMITTED, ENDED_EARLY, FAILED) else RUNNING
        tip += f"\n{state}{': ' + trial.failure_kind if trial.failure_kind else ''} {trial.reason}"
        tip += "" if refused is None else f"\nmeasured {show_number(refused)}, which does not count"
        y = frame.top - 8 if refused is None else frame.y(refused)
        return replace(_MARKS[state], x=x, y=y, size=8, hollow=True, tip=tip)
    tip += f"\n{show_number(value)} by {trial.proposer}"
    if trial.number == page.best:
        mark, tip = replace(_MARKS["best"], size=17), tip + "\nthe best"
    elif trial.purpose == CONFIRMATION:
        mark, tip = _MARKS[CONFIRMATION], tip + "\nconfirmation"
    else:
        mark = _MARKS[RANKED]
    return replace(mark, x=x, y=frame.y(value), tip=tip)


def _best_so_far(
    shown: Sequence[tuple[TrialRow, float]], place: dict[int, int], frame: Frame, greater: bool
) -> list[Item]:
    points: list[tuple[float, float]] = []
    best: float | None = None
    for trial, value in shown:
        is_better = best is None or (value > best if greater else value < best)
        if is_better and trial.purpose != CONFIRMATION:
            x = frame.x(place[trial.number])
            points += [(x, frame.y(v)) for v in (best, value) if v is not None]
            best = value
    return [] if best is None else [Path((*points, (frame.right, frame.y(best))), "green", 1.8)]


def _draw_strip(page: RunPage, knobs: Sequence[str], x: Scale, top: float) -> list[Item]:
    """One row per knob, one cell per trial; the darker, the greater the value among those tried."""
    if len(page.trials) > MAX_STRIP_COLUMNS:
        return [Text(LEFT, top + 12, "configurations: see the table (too many trials)", 11.5, "start", "muted")]
    items: list[Item] = []
    width = (x.end - x.start) / max(len(page.trials), 1)
    for row, knob in enumerate(knobs):
        known = {trial.config[knob] for trial in page.trials if knob in trial.config}
        values = sorted(known, key=lambda value: (isinstance(value, str), value))
        y = top + row * STRIP_ROW
        items.append(Text(x.start - 8, y + 15, knob if len(knob) <= 20 else knob[:19] + "…", 11.5, "end", "muted"))
        for n, trial in enumerate(page.trials):
            if knob not in trial.config:
                continue
            value = trial.config[knob]
            shade = round(values.index(value) / max(len(values) - 1, 1) * (len(SCALE) - 1))
            left = x.start + n * width
            tip = f"trial {trial.number}: {knob}={_show(value)}"
            items.append(Rect(left + 0.6, y, width - 1.2, STRIP_ROW - 2, SCALE[shade], tip=tip))
            ink = "onscale" if shade >= 3 else "ink"
            text = _show(value)
            if len(text) * 6.4 <= width - 2:
                items.append(Text(left + width / 2, y + 15, text, 11, "middle", ink))
    y = top + len(knobs) * STRIP_ROW + 18
    items.append(Text((x.start + x.end) / 2, y, "trial and its configuration", 12.5, "middle", "ink"))
    return items


def draw_causes(page: RunPage) -> Scene | None:
    """Seconds of a traced step by cause, for the best trial and the baseline."""
    rows = [
        (label, trial)
        for label, trial in (("best", page.best_trial), ("baseline", page.baseline_trial))
        if trial is not None and trial.seconds_by_cause
    ]
    rows = [row for n, row in enumerate(rows) if n == 0 or row[1].number != rows[0][1].number]
    if not rows:
        return None
    causes = _order_causes([trial for _, trial in rows])
    longest = max(sum(trial.seconds_by_cause.values()) for _, trial in rows)
    x = Scale(0.0, longest * 1.02, 150, WIDTH - RIGHT)
    bottom = 62 + 52.0 * len(rows)
    items = draw_bar_scale(x, 54, bottom, "seconds of a traced step (profiler on)")
    for row, (label, trial) in enumerate(rows):
        y, left = 62 + 52.0 * row, 0.0
        items.append(Text(140, y + 22, f"{label} (trial {trial.number})", 12.5, "end"))
        for cause in causes:
            seconds = trial.seconds_by_cause.get(cause, 0.0)
            if seconds <= 0:
                continue
            role = SERIES[causes.index(cause) % len(SERIES)]
            tip = f"{cause}: {show_number(seconds)} s"
            width = max(x(left + seconds) - x(left) - 1, 0.5)
            items.append(Rect(x(left), y, width, 34, role, tip=tip))
            if len(cause) * 6.6 <= width - 8:
                items.append(Text(x(left) + width / 2, y + 21, cause, 11.5, "middle", "paper"))
            left += seconds
    marks = [(cause, Mark(0, 0, "square", 11, SERIES[n % len(SERIES)])) for n, cause in enumerate(causes)]
    items += draw_legend(marks, LEFT + 60, 24)
    summary = "; ".join(
        f"{label}: " + ", ".join(f"{c} {show_number(s)} s" for c, s in trial.seconds_by_cause.items())
        for label, trial in rows
    )
    title = f"{page.metric.title if page.metric.is_time else 'Time'} by cause"
    return Scene("causes", title, summary, WIDTH, bottom + 50, tuple(items))


def draw_sensitivity(page: RunPage) -> Scene | None:
    """The primary metric of configurations near the best, relative to its own; predicted ones are hollow."""
    if not page.neighbors or page.best is None:
        return None
    neighbors = sorted(page.neighbors, key=lambda n: n.ratio, reverse=page.metric.greater_is_better)[:16]
    x = fit_scale([1.0, *(n.ratio for n in neighbors)], 330, WIDTH - RIGHT)
    bottom = 46 + 25.0 * len(neighbors)
    items = draw_bar_scale(x, 38, bottom, f"{page.metric.words} relative to the best", "x")
    items.insert(-1, Path(((x(1.0), 34), (x(1.0), bottom)), "green", 1.6))
    for row, neighbor in enumerate(neighbors):
        y = 46 + 25.0 * row + 10
        items.append(Text(320, y + 4, neighbor.change, 12, "end"))
        items.append(Path(((x(1.0), y), (x(neighbor.ratio), y)), "gray", 1.4))
        measured = neighbor.trial is not None
        tip = f"{neighbor.change}: {neighbor.ratio:.3g}x" + (f", trial {neighbor.trial}" if measured else ", predicted")
        items.append(Mark(x(neighbor.ratio), y, "circle" if measured else "ring", 10, "blue", not measured, tip))
    kinds = [("run", Mark(0, 0, "circle", 10, "blue")), ("predicted, not run", Mark(0, 0, "ring", 10, "blue"))]
    used = [kind for kind in kinds if any((n.trial is not None) == (kind[0] == "run") for n in neighbors)]
    items += draw_legend(used, LEFT + 60, 20)
    summary = "; ".join(f"{n.change}: {n.ratio:.3g}x" for n in neighbors)
    return Scene("sensitivity", "Configurations near the best", summary, WIDTH, bottom + 50, tuple(items))


def draw_prediction(page: RunPage) -> Scene | None:
    """The primary metric as expected before the run, and as measured."""
    metric = page.metric
    points = [
        (trial, expected, trial.value)
        for trial in page.trials
        if (expected := trial.expected.get(metric.name)) and trial.value and trial.purpose != CONFIRMATION
    ]
    if len(points) < 2:
        return None
    both = [v for _, *pair in points for v in pair]
    log = max(both) / min(both) > 8
    x = fit_scale(both, LEFT, 560, log=log)
    y = fit_scale(both, 400, 30, log=log)
    frame = Frame(x, y)
    ticks = make_ticks(x, 6)
    names = (f"expected {metric.axis_label}", f"actual {metric.axis_label}{page.mark}")
    items = frame.draw(*names, x_ticks=ticks, y_ticks=ticks)
    items.append(Path(((frame.left, frame.bottom), (frame.right, frame.top)), "gray", 1.2, dash=(5, 4)))
    items.append(Text(frame.right - 8, frame.top + 30, "as expected", 11.5, "end", "muted"))
    off = []
    for trial, expected, measured in points:
        off.append(abs(math.log(measured / expected)))
        values = f"expected {show_value(metric, expected)}, actual {show_value(metric, measured)}"
        tip = f"trial {trial.number}: {values}\n{trial.config_text}"
        mark = replace(_MARKS["best"], size=16) if trial.number == page.best else _MARKS[RANKED]
        items.append(replace(mark, x=x(expected), y=y(measured), tip=tip))
    middle = math.exp(sorted(off)[len(off) // 2]) - 1
    summary = f"{len(points)} trials; half of them were within {middle:.0%} of the expected {metric.words}"
    notes = (f"{len(points)} trials", f"half within {middle:.0%} of expected")
    items += [Text(590, 60 + 20 * n, note, 12.5) for n, note in enumerate(notes)]
    return Scene("prediction", f"Expected and actual {metric.words}", summary, WIDTH, 450, tuple(items))


def _is_used(kind: str, trials: Sequence[TrialRow]) -> bool:
    if kind == CONFIRMATION:
        return any(t.purpose == CONFIRMATION for t in trials)
    return kind == "best" or any(t.state == kind for t in trials)


def _varied_knobs(trials: Sequence[TrialRow]) -> list[str]:
    """Knobs that took more than one value, in the order of the space; all of them if none varied."""
    names = list(dict.fromkeys(knob for trial in trials for knob in trial.config))
    varied = [k for k in names if len({(type(t.config.get(k)), t.config.get(k)) for t in trials}) > 1]
    return varied or names


def _trial_ticks(count: int) -> list[float]:
    step = max(1, math.ceil(count / 30))
    return [float(n) for n in range(1, count + 1) if n == 1 or n % step == 0]


def _summarize_progress(page: RunPage, shown: Sequence[tuple[TrialRow, float]], unit: str) -> str:
    best = page.best_trial
    summary = f"{page.counts}."
    if best is not None:
        values = [v for t, v in shown if t.number == best.number]
        figure = show_number(values[0]) if values else "unknown"
        summary += f" The best is trial {best.number} with {figure} {unit}: {best.config_text}."
    return summary


def _order_causes(trials: Sequence[TrialRow]) -> list[str]:
    totals: Counter[str] = Counter()
    for trial in trials:
        totals.update(trial.seconds_by_cause)  # type: ignore[arg-type]
    return [cause for cause, seconds in totals.most_common() if seconds > 0]


def _show(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
