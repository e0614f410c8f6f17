"""The runs of a folder as the pages read them: each ledger once, then only what it has gained."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.record.event import Event, TrialProposed
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.lock import is_locked
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, TrialState, describe_counts, fold_trial
from cclsearch.report.gather import describe_work
from cclsearch.report.objective_figure import find_figure
from cclsearch.run.annotations import ANNOTATIONS_FILE, read_annotations
from cclsearch.run.folder import Run, RunFollower
from cclsearch.run.spec import SPEC_FILE, RunSpec
from cclsearch.ui.table import TrialLine, make_line
from cclsearch.ui.text import clean

MAX_VIEWS = 8
"""Runs whose lines stay in memory; of the others only the entry in the list does."""
READ_S = 0.25
"""For how long one request reads ledgers: a page is answered, and says how much is still to be read."""

Stamp = tuple[object, ...]
"""Changes whenever something of a run does that a page shows."""


@dataclass(frozen=True)
class RunEntry:
    """One run in the list of runs. All text is plain and without secrets."""

    name: str
    error: str = ""
    """Why it cannot be read; the other fields are then empty."""
    title: str = ""
    workload: str = ""
    work: str = ""
    """What two runs must share to be compared."""
    task: str = ""
    framework: str = ""
    hardware: str = ""
    accelerator: str = ""
    num_accelerators: int = 0
    objective: str = ""
    provenance: str = ""
    origin: str = ""
    """The provenance, or which cluster was simulated: figures of two of them are not comparable."""
    status: str = ""
    ending: str = ""
    counts: str = ""
    num_trials: int = 0
    num_spent: int = 0
    budget: int = 0
    figure: str = ""
    """Words of what the search optimizes, with its unit."""
    greater_is_better: bool = False
    best: Trial | None = None
    best_text: str = ""
    best_value: float | None = None
    started_s: float = 0.0
    last_s: float = 0.0
    tags: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()
    is_running: bool = False
    is_resumable: bool = False
    folder: Path = Path()
    spec: RunSpec | None = None
    text: str = ""
    """What a search of the list looks in, in lower case."""


class RunView:
    """One run, followed: its state and its trials as lines. A caller that reads them holds `lock`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.lines: dict[int, TrialLine] = {}
        self.knobs: list[str] = []
        """Knobs with more than one value among the trials, in their order; all of them if there is none."""
        self._follower = RunFollower(folder)
        self._events: dict[int, list[Event]] = {}
        """Events of the trials that have not ended."""
        self._seen: dict[str, object] = {}
        self._varied: set[str] = set()
        self._state: RunState | None = None
        self._entry: tuple[Stamp, RunEntry] | None = None
        self.run = self.refresh(0.0)

    @property
    def is_complete(self) -> bool:
        """Whether the ledger was read to its end."""
        return self._follower.is_complete

    @property
    def share_read(self) -> float:
        """Which part of the ledger was read."""
        try:
            return min(1.0, self._follower.offset / max((self.folder / LEDGER_FILE).stat().st_size, 1))
        except OSError:
            return 1.0

    def refresh(self, limit_s: float) -> Run:
        """Read on for at most that many seconds; raises UserError if the run is gone or cannot be read."""
        with self.lock:
            touched: dict[int, list[Event]] = {}

            def take(event: Event) -> None:
                number = getattr(event, "trial", None)
                if number is not None:
                    touched.setdefault(number, []).append(event)

            run = self._follower.read(take, limit_s=limit_s)
            if run.state is not self._state:
                self._state = run.state
                for kept in (self.lines, self._events, self._seen, self._varied):
                    kept.clear()
            figure = find_figure(run.spec)
            for number, events in touched.items():
                whole = [*self._events.pop(number, ()), *events]
                known = isinstance(whole[0], TrialProposed)
                trial = fold_trial(whole) if known else run.state.trials[number]
                if trial.outcome is None and known:
                    self._events[number] = whole
                line = self.lines[number] = make_line(trial, figure)
                self._note_knobs(line)
            if touched:
                self.knobs = [k for k in self._seen if k in self._varied] or list(self._seen)
            self.run = run
            return run

    def _note_knobs(self, line: TrialLine) -> None:
        for knob, value in line.config.items():
            if self._seen.setdefault(knob, value) != value:
                self._varied.add(knob)

    def find_trial(self, number: int) -> Trial:
        """A trial of the run; raises UserError if it has none of that number."""
        with self.lock:
            trial = self.run.state.trials.get(number)
        if trial is None:
            raise UserError(f"run {clean(self.folder.name)!r} has no trial {number}")
        return trial

    def counts(self) -> Counter[TrialState]:
        """How the trials ended."""
        return Counter(line.state for line in self.lines.values())

    def entry(self) -> RunEntry:
        """The run in the list of runs, as far as it was read."""
        with self.lock:
            tags = read_annotations(self.folder).tags
            stamp = (id(self._state), self._follower.offset, self.run.status, tags)
            if self._entry is None or self._entry[0] != stamp:
                self._entry = (stamp, _describe(self, tags))
            return self._entry[1]


def _describe(view: RunView, tags: tuple[str, ...]) -> RunEntry:
    run, spec, state = view.run, view.run.spec, view.run.state
    figure, best, hardware = find_figure(spec), state.best, spec.card.hardware
    end = state.ended or state.stopped
    entry = RunEntry(
        name=view.folder.name,
        title=clean(spec.card.title),
        workload=clean(spec.workload),
        work=describe_work(spec),
        task=spec.card.task,
        framework=clean(spec.framework),
        hardware=clean(f"{hardware.num_accelerators} x {hardware.accelerator}"),
        accelerator=clean(hardware.accelerator),
        num_accelerators=hardware.num_accelerators,
        objective=clean(spec.objective.spec),
        provenance=spec.provenance.value,
        origin=spec.simulated_cluster or spec.provenance.value,
        status=run.status.value,
        ending=clean(end.reason) if end is not None and not run.is_running else "",
        counts=describe_counts(view.counts()),
        num_trials=len(view.lines),
        num_spent=state.num_spent,
        budget=max(spec.limits.budget, state.budget_raised_to),
        figure=figure.metric.words_with_unit,
        greater_is_better=figure.metric.greater_is_better,
        best=best,
        best_text=clean(figure.format(best) + spec.provenance.mark) if best else "",
        best_value=figure.value(best) if best else None,
        started_s=state.started_s,
        last_s=state.last_s,
        tags=tags,
        damage=tuple(clean(line) for line in state.damage),
        is_running=run.is_running,
        is_resumable=run.status.is_resumable,
        folder=view.folder,
        spec=spec,
    )
    words = (entry.name, entry.title, entry.workload, entry.framework, entry.hardware, entry.objective, entry.status)
    text = " ".join((*words, entry.provenance, *(f"#{tag}" for tag in tags))).lower()
    return replace(entry, text=text)


@dataclass(frozen=True)
class RunList:
    """The runs as far as they were read, the latest first."""

    entries: Sequence[RunEntry] = field(default_factory=tuple)
    num_unread: int = 0


class RunBook:
    """All runs of a folder; safe to use from several threads."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._views: OrderedDict[str, RunView] = OrderedDict()
        self._entries: dict[str, tuple[Stamp, RunEntry]] = {}
        self._lock = threading.Lock()

    def list_names(self) -> list[str]:
        """The names of the run folders, that with the latest change first."""
        try:
            with os.scandir(self.runs) as found:
                names = [i.name for i in found if i.name.isprintable() and os.path.lexists(Path(i.path) / SPEC_FILE)]
        except OSError:
            return []
        return sorted(names, key=lambda name: (-self._changed_s(name), name))

    def read_recent(self, age_s: float, limit_s: float) -> list[Run]:
        """The runs that run, or that changed so many seconds ago at most, each read for at most `limit_s` seconds."""
        since_s, found = time.time() - age_s, []
        for name in self.list_names():
            if self._changed_s(name) >= since_s or is_locked(self.runs / name):
                with contextlib.suppress(UserError):  # the list of runs says which ones cannot be read
                    found.append(self.view(name, limit_s).run)
        return found

    def _changed_s(self, name: str) -> float:
        for file in (LEDGER_FILE, SPEC_FILE):
            try:
                return os.stat(self.runs / name / file).st_mtime
            except OSError:
                continue
        return 0.0

    def find_folder(self, name: str) -> Path:
        """The folder of a run; raises UserError if there is none of exactly that name."""
        is_name = name.isprintable() and name not in ("", ".", "..") and os.sep not in name
        if not is_name or not os.path.lexists(self.runs / name / SPEC_FILE):
            raise UserError(f"there is no run {clean(name)!r} here: it was never here, or was deleted")
        return self.runs / name

    def view(self, name: str, limit_s: float = READ_S) -> RunView:
        """A run, read on for at most that many seconds; raises UserError if there is none or it cannot be read."""
        folder = self.find_folder(name)
        with self._lock:
            view = self._views.get(name)
        if view is None:
            view = RunView(folder)
        try:
            view.refresh(limit_s)
        except UserError:
            with self._lock:
                self._views.pop(name, None)
            raise
        with self._lock:
            view = self._views.setdefault(name, view)
            self._views.move_to_end(name)
            while len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)
        return view

    def stamp(self, name: str) -> Stamp:
        """What changes whenever the run does; None in place of what is missing."""
        folder = self.runs / name
        return (is_locked(folder), *(_stamp_file(folder / file) for file in (LEDGER_FILE, ANNOTATIONS_FILE, SPEC_FILE)))

    def stamp_all(self) -> Stamp:
        """What changes whenever one of the runs does."""
        return tuple((name, self.stamp(name)) for name in self.list_names())

    def list_runs(self, limit_s: float = READ_S) -> RunList:
        """The runs whose ledgers could be read in that many seconds, and how many are still to be read."""
        until_s, entries, num_unread = time.monotonic() + limit_s, [], 0
        for name in self.list_names():
            stamp, known = self.stamp(name), self._entries.get(name)
            if known is not None and known[0] == stamp:
                entries.append(known[1])
                continue
            if (left_s := until_s - time.monotonic()) <= 0:
                num_unread += 1
                entries += [known[1]] if known is not None else []
                continue
            try:
                view = self.view(name, left_s)
                entry, is_complete = view.entry(), view.is_complete
            except UserError as error:
                entry, is_complete = RunEntry(name=clean(name), error=clean(str(error)), text=name.lower()), True
            entries.append(entry)
            num_unread += not is_complete
            if is_complete:
                self._entries[name] = (stamp, entry)
        return RunList(entries, num_unread)


def _stamp_file(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
