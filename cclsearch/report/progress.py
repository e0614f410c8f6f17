"""The progress of a search as a table that fits a terminal of any size: newest trials, the best one, and a footer.

`Progress` is frozen, so that a thread may draw it while the search continues.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cclsearch.core.text import count_of, one_line, plain
from cclsearch.core.values import Provenance, format_knob_value
from cclsearch.propose.events import LlmTurn
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.report.figures import ObjectiveFigure, find_figure
from cclsearch.report.terminal import SOURCES, describe_best_so_far, result_text
from cclsearch.run.phase import read_phase
from cclsearch.run.spec import RunSpec
from cclsearch.run.usage import count_node_hours, find_node_hour_limit
from cclsearch.space.knobs import meaning_of
from cclsearch.space.table import Space

MAX_ROWS = 40
"""Number of trials in a table, besides the best one and the running ones."""
RECENT = 8
"""Number of latest finished trials whose durations give the estimate of the time left."""
MIN_RESULT, GAP = 24, 2
"""Cells that the result gets at least, and between two columns."""

LiveNote = Callable[[int], str]
"""Number of a running trial -> its launcher's note (`queued: Resources`); empty if none."""


@dataclass(frozen=True)
class Progress:
    """Data of the live table of a search."""

    title: str
    folder: Path
    figure: ObjectiveFigure
    knobs: tuple[str, ...]
    """Those with a column, in order."""
    trials: tuple[Trial, ...]
    """By number: the last ones, the best one and the unfinished ones."""
    num_trials: int
    best: int | None
    best_text: str
    budget: int
    num_spent: int
    started_s: float
    ended_s: float | None
    """None while the search runs."""
    node_hours: float | None
    """Node-hours of the finished trials; None if nothing runs on nodes."""
    node_hour_limit: float | None
    typical_s: float | None
    """Median duration of the latest trials; None if unknown."""
    note: str
    llm_spent: str
    """Tokens and dollars of the LLM's turns so far, in words; empty before the first."""
    spec: RunSpec


class ProgressObserver:
    """Makes the progress of a search from its state, each time that the state has changed."""

    def __init__(self, spec: RunSpec, folder: Path, *, budget: int = 0) -> None:
        """`budget` replaces the budget of the search."""
        self._spec, self._folder, self._budget, self._figure = spec, folder, budget, find_figure(spec)
        self._num_counted, self._node_hours = 0, 0.0

    def observe(self, state: RunState, knobs: tuple[str, ...], *, is_running: bool) -> Progress:
        """The progress at this moment; each of `knobs` gets a column."""
        spec, best, figure = self._spec, state.best, self._figure
        numbers = sorted(state.trials)[-MAX_ROWS:]
        shown = {*numbers, *(trial.number for trial in state.unfinished), *([best.number] if best else [])}
        notes = [event for event in state.reported if not isinstance(event, LlmTurn)]
        costs = [event.cost for event in state.reported if isinstance(event, LlmTurn)]
        is_measured = spec.provenance is Provenance.MEASURED
        return Progress(
            title=plain(f"{spec.run_id}: {spec.card.name}, {spec.objective.name}{spec.provenance.mark}"),
            folder=self._folder,
            figure=figure,
            knobs=knobs,
            trials=tuple(state.trials[number] for number in sorted(shown)),
            num_trials=len(state.trials),
            best=best.number if best else None,
            best_text=describe_best_so_far(best, state, figure) if best else "no trial ranked yet",
            budget=self._budget or max(spec.limits.budget, state.budget_raised_to),
            num_spent=state.num_spent,
            started_s=state.begun_s,
            ended_s=None if is_running else state.last_s,
            node_hours=self._count_node_hours(state) if is_measured else None,
            node_hour_limit=find_node_hour_limit(spec, state),
            typical_s=_find_typical(state) if is_measured else None,
            note=one_line(notes[-1].text, 400) if notes else "",
            llm_spent=sum(costs[1:], start=costs[0]).describe_spent() if costs else "",
            spec=spec,
        )

    def _count_node_hours(self, state: RunState) -> float:
        """Node-hours of the finished trials, each counted once: a long search has many events."""
        finished = state.trials.finish_order
        for number in finished[self._num_counted :]:
            self._node_hours += count_node_hours(self._spec, state.trials[number], 0.0, 0.0)
        self._num_counted = len(finished)
        return self._node_hours


def list_varied_knobs(space: Space) -> tuple[str, ...]:
    """The knobs of a search space that have more than one value in it, in its order."""
    varies_K = (space.codes_NK != space.codes_NK[:1]).any(axis=0)
    return tuple(knob.name for knob, varies in zip(space.knobs, varies_K, strict=True) if varies)


def _find_typical(state: RunState) -> float | None:
    recent = [state.trials[number] for number in state.trials.finish_order[-RECENT:]]
    durations = [_ended_seconds(trial) for trial in recent if trial.spans]
    return statistics.median(durations) if durations else None


def _ended_seconds(trial: Trial) -> float:
    return sum(end_s - start_s for start_s, end_s in trial.spans)


def _seconds(trial: Trial, now_s: float) -> float | None:
    """Seconds from submission to end, or to now, of all attempts; None if none was made."""
    running = 0.0 if trial.attempt_s is None else max(now_s - trial.attempt_s, 0.0)
    return _ended_seconds(trial) + running if trial.spans or trial.attempt_s is not None else None


def format_duration(seconds: float) -> str:
    """`48s`, `3m 12s`, `2h 05m`, `3d 04h`."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def render_progress(
    progress: Progress, width: int, height: int | None, now_s: float, live_note: LiveNote = lambda _: ""
) -> Group:
    """Title, table and footer in at most `height` lines of at most `width` cells; all rows if the height is None."""
    now_s = now_s if progress.ended_s is None else progress.ended_s
    footer = _make_footer(progress, width, now_s)
    room = len(progress.trials)
    if height is not None:
        footer = footer[: max(1, height - 4)]
        room = max(height - len(footer) - 2, 0)
    table = _make_table(progress, _choose_trials(progress, room), width, now_s, live_note)
    parts: list[RenderableType] = [_one_line(progress.title, "bold"), table, *footer]
    return Group(*(parts if height is None else parts[-max(height, 1) :]))


def _one_line(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _choose_trials(progress: Progress, room: int) -> list[Trial]:
    """The trials that fit: the best, then those that run, then the newest; by number."""
    trials = progress.trials
    if len(trials) <= room:
        return list(trials)
    first = [trial for trial in trials if trial.number == progress.best]
    running = [trial for trial in reversed(trials) if trial.outcome is None]
    others = [trial for trial in reversed(trials) if trial.outcome is not None and trial.number != progress.best]
    return sorted([*first, *running, *others][:room], key=lambda trial: trial.number)


def _make_table(progress: Progress, trials: list[Trial], width: int, now_s: float, live_note: LiveNote) -> Table:
    """One row per trial; columns that do not fit are left out, the result never."""
    columns = {"trial": [str(trial.number) for trial in trials]}
    for name in progress.knobs:
        columns[name] = [format_knob_value(t.config[name]) if name in t.config else "" for t in trials]
    if progress.node_hours is not None:
        timed = [_seconds(trial, now_s) for trial in trials]
        columns["time"] = ["" if value is None else format_duration(value) for value in timed]
    columns["by"] = [SOURCES.get(trial.proposer, trial.proposer) for trial in trials]
    columns = {name: [one_line(cell, 20) for cell in cells] for name, cells in columns.items()}
    results = [_describe_result(progress, trial, live_note) for trial in trials]

    def find_room(names: Mapping[str, str]) -> int:
        """Cells left for the result, beside the columns with these heads."""
        return width - sum(max(map(cell_len, (head, *columns[name]))) + GAP for name, head in names.items())

    heads = {name: name for name in columns}
    if find_room(heads) < min(max([MIN_RESULT, *map(cell_len, results)]), 60):
        heads |= {name: meaning_of(name).label or name for name in progress.knobs}
    left_out: list[str] = []
    for name in ("by", "time", *reversed(progress.knobs)):
        if find_room(heads) < MIN_RESULT and name in heads:
            head = heads.pop(name)
            left_out += [head] if name in progress.knobs else []
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name, head in heads.items():
        table.add_column(head, justify="left" if name == "by" else "right", no_wrap=True)
    named = f" (no room: {', '.join(left_out[::-1])})" if left_out else ""
    table.add_column(f"result{named}", no_wrap=True, overflow="ellipsis", width=max(find_room(heads), 1))
    for row, trial in enumerate(trials):
        cells = [Text(columns[name][row]) for name in heads]
        table.add_row(*cells, Text(results[row]), style=_style_of(progress, trial))
    return table


def _style_of(progress: Progress, trial: Trial) -> str:
    if trial.number == progress.best:
        return "bold green"
    if trial.outcome is None:
        return "cyan"
    return "" if trial.loss is not None else "dim"


def _describe_result(progress: Progress, trial: Trial, live_note: LiveNote) -> str:
    """The phase of a running trial; of a finished one its figure, or how and why it failed."""
    attempt = f", attempt {trial.attempt}" if trial.attempt > 1 else ""
    outcome = trial.outcome
    if outcome is None:
        phase = read_phase(progress.folder, trial) if progress.ended_s is None else "unfinished"
        text = live_note(trial.number) if phase == "submitted" else ""
        return one_line(f"{text or phase}{attempt}", 120)
    text = result_text(trial, progress.figure, 120)
    if outcome.failure:
        text += f": {outcome.failure.message}" if outcome.failure.message else ""
    elif outcome.admission and not outcome.admission.admitted:
        why = next((verdict.detail for verdict in outcome.admission.verdicts if verdict.ok is False), "")
        text += f": {why}" if why else ""
    mark = " (best)" if trial.number == progress.best else ""
    return one_line(f"{text}{mark}{attempt}", 300)


def _make_footer(progress: Progress, width: int, now_s: float) -> list[Text]:
    """Trials left, elapsed, time left and cost; then the best; then the last note. Most important first."""
    left = max(progress.budget - progress.num_spent, 0)
    running = [trial for trial in progress.trials if trial.outcome is None]
    parts = [f"{left} of {progress.budget} trials left"]
    if running and progress.ended_s is None:
        parts.append(f"{len(running)} running")
    parts.append(f"{format_duration(now_s - progress.started_s)} elapsed")
    if progress.ended_s is None and progress.typical_s is not None and (left or running):
        parts.append(f"about {format_duration(_estimate_left(progress, running, left, now_s))} left")
    if progress.node_hours is not None:
        used = progress.node_hours + sum(count_node_hours(progress.spec, t, 0.0, now_s) for t in running)
        limit = f" of {progress.node_hour_limit:g}" if progress.node_hour_limit is not None else ""
        parts.append(f"{used:.2g}{limit} node-hours")
    if progress.llm_spent:
        parts.append(f"LLM {progress.llm_spent}")
    hidden = progress.num_trials - len(progress.trials)
    if hidden > 0:
        parts.append(f"{count_of(hidden, 'earlier trial')} in `status`")
    texts = [("; ".join(parts), ""), (f"best so far: {progress.best_text}", "green"), (progress.note, "dim")]
    return [_one_line(plain(text)[: 2 * width], style) for text, style in texts if text]


def _estimate_left(progress: Progress, running: list[Trial], left: int, now_s: float) -> float:
    """Seconds until the last trial ends, if each takes as long as the latest ones and as many run at a time."""
    typical = progress.typical_s or 0.0
    rest = [max(typical - (_seconds(trial, now_s) or 0.0), 0.0) for trial in running]
    slots = max(len(running), 1)
    return max([*rest, 0.0]) + math.ceil(left / slots) * typical


REDRAWS_PER_S = 2
Show = Callable[[Progress], None]


class _LiveTable(Live):
    """The progress that was shown last, drawn by the thread of `rich.Live`."""

    def __init__(self, console: Console, live_note: LiveNote) -> None:
        self.progress: Progress | None = None
        self._live_note, self._size = live_note, console.size
        super().__init__(console=console, refresh_per_second=REDRAWS_PER_S, transient=True, vertical_overflow="crop")

    def refresh(self) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone
            if self.console.size != self._size:
                # The terminal has broken the drawn lines, so their number is unknown: begin on an empty screen.
                self.console.clear()
                self._size = self.console.size
            super().refresh()

    def get_renderable(self) -> RenderableType:
        return self.render(self._size.height - 1)

    def render(self, height: int | None) -> RenderableType:
        """The table in at most `height` lines; all rows if the height is None."""
        if self.progress is None:
            return ""
        return render_progress(self.progress, self._size.width, height, time.time(), self._live_note)


@contextlib.contextmanager
def live_screen(console: Console, live_note: LiveNote = lambda _: "") -> Iterator[Show]:
    """A function that shows the progress it is given; at the end the whole table stays on the terminal."""
    live = _LiveTable(console, live_note)

    def show(progress: Progress) -> None:
        live.progress = progress

    live.start()
    try:
        yield show
    finally:
        with contextlib.suppress(OSError):
            live.stop()
            console.print(live.render(None))
