"""The runs of a folder as the pages read them: each ledger once, then only the lines it gained."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from cclsearch.core.errors import UserError
from cclsearch.core.values import Provenance
from cclsearch.record.event import Event
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.lock import is_locked
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, describe_counts
from cclsearch.report.figures import ObjectiveFigure, find_figure
from cclsearch.report.gather import describe_work
from cclsearch.report.rows import TrialRow, make_row
from cclsearch.run.annotations import ANNOTATIONS_FILE, read_annotations
from cclsearch.run.folder import Run, RunFollower, Standing
from cclsearch.run.spec import SPEC_FILE, RunSpec
from cclsearch.tasks.base import task_of
from cclsearch.ui.guard import clean

MAX_VIEWS = 8
"""Number of runs whose rows stay in memory; of the others only the entry in the list does."""
# A page must be answered; it says how many ledgers are unread.
READ_S = 0.25
"""Seconds for which one request reads ledgers."""

I = TypeVar("I")  # noqa: E741
T = TypeVar("T")
Stamp = tuple[object, ...]
"""Equal as long as nothing changes that a page shows of a run."""


@dataclass(frozen=True)
class RunEntry:
    """One run in the list of runs. Its text is as the run has it: the templates make it safe."""

    folder: Path
    spec: RunSpec
    status: Standing
    ending: str
    """Reason why the search ended; empty while it runs."""
    counts: str
    num_trials: int
    num_spent: int
    budget: int
    best: Trial | None
    started_s: float
    last_s: float
    tags: tuple[str, ...]
    damage: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def provenance(self) -> Provenance:
        return self.spec.provenance

    @property
    def origin(self) -> str:
        """The provenance, or the simulated cluster: figures of two clusters are not comparable."""
        return self.spec.simulated_cluster or self.provenance.value

    @property
    def hardware(self) -> str:
        return f"{self.spec.card.hardware.num_accelerators} x {self.spec.card.hardware.accelerator}"

    @cached_property
    def work(self) -> str:
        """Model, work and precision: two runs are compared only if these are equal."""
        return describe_work(self.spec)

    @cached_property
    def figure(self) -> ObjectiveFigure:
        """The figure that the search optimizes."""
        return find_figure(self.spec)

    @property
    def best_text(self) -> str:
        """The figure of the best trial with its unit; empty without one."""
        return self.figure.format(self.best) + self.provenance.mark if self.best else ""

    @cached_property
    def text(self) -> str:
        """Text that a search of the list looks in, in lower case."""
        spec = self.spec
        words = (self.name, spec.card.title, spec.workload, spec.framework, self.hardware, spec.objective.spec)
        return " ".join((*words, self.status, self.provenance, *(f"#{tag}" for tag in self.tags))).lower()


class RunView:
    """One run, followed: its state and the rows of its trials. A caller that reads them holds `lock`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.rows: dict[int, TrialRow] = {}
        self._follower = RunFollower(folder)
        self._state: RunState | None = None
        self.run = self.refresh(0.0)

    @property
    def is_complete(self) -> bool:
        """Whether the ledger was read to its end."""
        return self._follower.is_complete

    @property
    def share_read(self) -> float:
        """The part of the ledger that was read, 0 to 1."""
        try:
            return min(1.0, self._follower.offset / max((self.folder / LEDGER_FILE).stat().st_size, 1))
        except OSError:
            return 1.0

    def refresh(self, limit_s: float) -> Run:
        """Read on for at most that many seconds; raises UserError if the run is gone or cannot be read."""
        with self.lock:
            touched: dict[int, None] = {}

            def take(event: Event) -> None:
                number = getattr(event, "trial", None)
                if number is not None:
                    touched[number] = None

            self.run = run = self._follower.read(take, limit_s=limit_s)
            if run.state is not self._state:  # the ledger was replaced
                self._state = run.state
                self.rows.clear()
            figure, primary = find_figure(run.spec), task_of(run.spec.card).primary
            self.rows |= {number: make_row(run.state.trials[number], figure, primary, clean) for number in touched}
            return run

    def find_trial(self, number: int) -> Trial:
        """A trial of the run; raises UserError if it has none of that number."""
        with self.lock:
            return self.run.find_trial(number)

    def entry(self) -> RunEntry:
        """The run in the list of runs, from the read part of its ledger."""
        with self.lock:
            run, spec, state = self.run, self.run.spec, self.run.state
            end = state.ended or state.stopped
            return RunEntry(
                folder=self.folder,
                spec=spec,
                status=run.status,
                ending=end.reason if end is not None and not run.is_running else "",
                counts=describe_counts(Counter(row.state for row in self.rows.values())),
                num_trials=len(self.rows),
                num_spent=state.num_spent,
                budget=max(spec.limits.budget, state.budget_raised_to),
                best=state.best,
                started_s=state.started_s,
                last_s=state.last_s,
                tags=read_annotations(self.folder).tags,
                damage=tuple(state.damage),
            )


@dataclass(frozen=True)
class RunList:
    """The runs by the read parts of their ledgers, the latest first."""

    entries: Sequence[RunEntry]
    errors: Mapping[str, str]
    """Name of a run that cannot be read -> why."""
    num_unread: int


class RunIndex:
    """All runs of a folder; safe to use from several threads."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._views: OrderedDict[str, RunView] = OrderedDict()
        self._entries: dict[str, tuple[Stamp, RunEntry]] = {}
        self._lock = threading.Lock()

    def list_names(self) -> list[str]:
        """The names of the run folders, the latest changed first."""
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
                with contextlib.suppress(Exception):  # the list of runs says which ones cannot be read
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
        is_name, folder = name.isprintable() and name not in ("", ".", "..") and os.sep not in name, self.runs / name
        if not is_name or not os.path.lexists(folder / SPEC_FILE):
            raise UserError(f"there is no run {clean(name)!r} here: it was never here, or was deleted")
        if folder.is_symlink():
            raise UserError(
                f"{clean(name)!r} is a link to another folder: show that with `ccl-search ui --runs FOLDER`"
            )
        return folder

    def view(self, name: str, limit_s: float = READ_S) -> RunView:
        """A run, read on for at most that many seconds; raises UserError if there is none or it cannot be read."""
        folder = self.find_folder(name)
        with self._lock:
            view = self._views.get(name)
        if view is None:
            view = RunView(folder)
        try:
            view.refresh(limit_s)
        except Exception:
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
        """Cache key of a run; None for a missing file."""
        folder = self.runs / name
        return (is_locked(folder), *(_stamp_file(folder / file) for file in (LEDGER_FILE, ANNOTATIONS_FILE, SPEC_FILE)))

    def stamp_all(self) -> Stamp:
        """Cache key of all runs."""
        return tuple((name, self.stamp(name)) for name in self.list_names())

    def list_runs(self, limit_s: float = READ_S) -> RunList:
        """The runs whose ledgers could be read in that many seconds, and the number of unread ones."""
        until_s, entries, num_unread = time.monotonic() + limit_s, [], 0
        errors: dict[str, str] = {}
        for name in self.list_names():
            stamp, (known_stamp, entry) = self.stamp(name), self._entries.get(name, (None, None))
            if stamp != known_stamp and (left_s := until_s - time.monotonic()) <= 0:
                num_unread += 1
            elif stamp != known_stamp:
                try:
                    view = self.view(name, left_s)
                    entry = view.entry()
                except Exception as error:  # whatever a run holds, the others are shown
                    errors[name] = explain(error)
                    continue
                if view.is_complete:
                    self._entries[name] = (stamp, entry)
                num_unread += not view.is_complete
            entries += [entry] if entry is not None else []
        return RunList(entries, errors, num_unread)


def explain(error: Exception) -> str:
    """The reason why a run cannot be shown, in one line; the traceback of an error of ours is printed."""
    if isinstance(error, UserError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def use_sound(items: Sequence[I], use: Callable[[list[I]], T]) -> tuple[T, list[tuple[I, str]]]:
    """What `use` makes of the items, without those with which it fails even alone, and why each of these does."""
    try:
        return use([*items]), []
    except UserError:
        raise
    except Exception:
        sound, bad = [], []
        for item in items:
            try:
                use([item])
                sound.append(item)
            except Exception as error:
                bad.append((item, explain(error)))
        return use(sound), bad


def _stamp_file(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
