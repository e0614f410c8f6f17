"""The interface of a tracker, the frozen values with masked texts that it gets of a search, and `--log-to`.

Each tracker follows the ledger of a search in a thread of its own. Nothing here ends, delays or changes a search: the
search only puts values into a queue. `tracking.jsonl` of the run folder notes each written trial, so that a resumed
search writes the missing ones; without the file, all trials are written again in place of the earlier ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import orjson

from cclsearch.core.errors import UserError
from cclsearch.core.registry import Registry
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Value
from cclsearch.record.event import Event, TrialFinished, TrialRevised
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, find_state
from cclsearch.run.spec import RunSpec

MAX_TEXT = 500
"""Length of a tag's text that all trackers keep whole."""


@dataclass(frozen=True)
class TrackedSearch:
    """A search as trackers show it."""

    run_id: str
    workload: str
    metric: str
    """The metric that the curve of the best shows: the objective's first, or `NAME loss` of a weighted one."""
    tags: Mapping[str, str]
    """Framework, hardware, objective, provenance and who proposes."""


@dataclass(frozen=True)
class TrackedTrial:
    """A finished trial as trackers show it."""

    number: int
    params: Mapping[str, Value]
    """The configuration."""
    metrics: Mapping[str, float]
    """Everything that was measured, in the units of the ledger, and `loss` if the trial is ranked."""
    tags: Mapping[str, str]
    """State, proposer, purpose, provenance, and the reason of a trial that failed or was not admitted."""
    value: float | None
    """The objective's figure if the trial is ranked."""
    best: float | None
    """The figure of the best trial when this one had finished; None before the first ranked trial."""
    started_s: float
    """Seconds since the epoch."""
    finished_s: float

    @property
    def sha256(self) -> str:
        """Hash of the shown fields, to write a trial again only if it changed."""
        # `best` is left out: other trials change it.
        shown = [self.number, dict(self.params), dict(self.metrics), dict(self.tags), self.value]
        return hashlib.sha256(orjson.dumps(shown, option=orjson.OPT_SORT_KEYS)).hexdigest()


class Tracker(ABC):
    """Writes one search into a tracker: `begin`, any number of `log_trial`, `end`, all in one thread.

    Each may raise any exception and take any time: the search continues meanwhile.
    """

    @classmethod
    @abstractmethod
    def from_place(cls, place: str) -> Tracker:
        """Return a tracker that writes to `place`: the text after the colon of `--log-to NAME:PLACE`, else "".

        Raises UserError if the package or the place is missing or unusable. Writes and connects to nothing.
        """

    @abstractmethod
    def begin(self, search: TrackedSearch) -> bool:
        """Open the search; return whether the tracker has it already, and it is continued."""

    @abstractmethod
    def log_trial(self, trial: TrackedTrial) -> None:
        """Write a finished trial, in place of its number's earlier record."""

    @abstractmethod
    def end(self, *, is_finished: bool, summary: str) -> None:
        """Write the end of this process's part: `is_finished` is False if the search can be resumed."""


def describe_search(spec: RunSpec) -> TrackedSearch:
    """Return the search as trackers show it."""
    objective = spec.objective
    tags = {
        "workload": spec.workload,
        "framework": spec.framework,
        "hardware": f"{spec.card.hardware.num_accelerators} x {spec.card.hardware.accelerator}",
        "objective": objective.spec,
        "provenance": spec.provenance.value,
        "proposers": spec.proposers,
        "engine_version": spec.engine_version,
        "created": spec.created,
    }
    metric = f"{objective.name} loss" if objective.is_weighted else objective.metrics[0]
    return TrackedSearch(spec.run_id, spec.workload, metric, _mask(tags))


def describe_trial(spec: RunSpec, trial: Trial, best: Trial | None) -> TrackedTrial:
    """Return a finished trial as trackers show it; `best` is the best trial now."""
    outcome, state = trial.outcome, find_state(trial.outcome)
    assert outcome is not None
    tags = {
        "state": state.value,
        "proposer": trial.proposer,
        "purpose": trial.purpose.value,
        "provenance": spec.provenance.value,
        "rationale": trial.rationale,
        "failure": outcome.failure.kind.value if outcome.failure is not None else "",
        "reason": trial.reason,
    }
    metrics = dict(outcome.metrics) | ({"loss": trial.loss} if trial.loss is not None else {})
    return TrackedTrial(
        number=trial.number,
        params={name: redact(value) if isinstance(value, str) else value for name, value in trial.config.items()},
        metrics=metrics,
        tags=_mask({name: text for name, text in tags.items() if text}),
        value=_value_of(spec, trial),
        best=_value_of(spec, best),
        started_s=trial.proposed_s,
        finished_s=trial.finished_s or trial.proposed_s,
    )


def _value_of(spec: RunSpec, trial: Trial | None) -> float | None:
    objective = spec.objective
    if trial is None or trial.outcome is None or trial.loss is None:
        return None
    if objective.is_weighted:
        return trial.loss
    value = trial.outcome.metrics.get(objective.metrics[0])
    return None if value is None else value * objective.terms[0].scale


def _mask(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: one_line(redact(text), MAX_TEXT) for name, text in tags.items()}


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker",
    {word: f"cclsearch.tracking.{word}_tracker" for word in ("mlflow", "tensorboard", "wandb")},
    needs=("from_place", "log_trial"),
)
"""word of `--log-to WORD:PLACE` -> subclass of `Tracker`."""


@dataclass(frozen=True)
class LogTarget:
    """One tracker that was asked for, and checked."""

    text: str
    """Text that the user typed."""
    tracker: Tracker

    @property
    def name(self) -> str:
        """The tracker's name."""
        return self.text.partition(":")[0]


def open_targets(texts: Iterable[str]) -> tuple[LogTarget, ...]:
    """Return the targets, each once; raises UserError for one that is unknown, lacks its package or cannot be used."""
    return tuple(LogTarget(text, _open(text)) for text in dict.fromkeys(texts))


def _open(text: str) -> Tracker:
    name, _, place = text.partition(":")
    try:
        return TRACKERS.get(name).from_place(place)
    except UserError as error:
        raise UserError(f"--log-to {name}: {error}") from None


def require_package(module: str, extra: str) -> None:
    """Raise UserError that says how to install the package of a tracker, if it is missing."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {module!r} is not installed: pip install 'ccl-search[{extra}]'")


WRITTEN_FILE = "tracking.jsonl"
CLOSE_WAIT_S = 60.0
"""Time after the search for trackers to write the rest."""


class TrackingView:
    """The trackers of a run; `watch` is called after each event of its ledger."""

    def __init__(self, folder: Path, spec: RunSpec, targets: Sequence[LogTarget], tell: Callable[[str], None]) -> None:
        self._folder, self._spec, self._targets, self._tell = folder, spec, targets, tell
        self._writers: list[TargetWriter] = []

    def open(self, state: RunState) -> None:
        """Begin with the trials that are finished already."""
        if not self._targets:
            return
        search = describe_search(self._spec)
        finished = [self._describe(state, number) for number, trial in state.trials.items() if trial.is_finished]
        self._writers = [TargetWriter(self._folder, search, target, finished, self._tell) for target in self._targets]
        for writer in self._writers:
            writer.start()

    def watch(self, event: Event, state: RunState) -> None:
        """Hand on a trial that finished, or whose verdict changed."""
        if self._writers and isinstance(event, TrialFinished | TrialRevised):
            trial = self._describe(state, event.trial)
            for writer in self._writers:
                writer.queue.put(trial)

    def close(self, state: RunState, *, wait_s: float | None = CLOSE_WAIT_S) -> None:
        """Let the trackers write the rest, at most `wait_s` together (None: as long as it takes)."""
        best = state.best
        summary = f"best: trial {best.number}, {dict(best.config)}" if best else "no trial was admitted"
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        for writer in self._writers:
            writer.queue.put((state.ended is not None, one_line(redact(summary), 500)))
        for writer in self._writers:
            writer.join(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0))
            if writer.is_alive():
                self._tell(
                    f"{writer.target.name} has not written everything after {wait_s:.0f} s; later:"
                    f" ccl-search export {self._folder.name} --log-to {writer.target.name}"
                )

    @property
    def problems(self) -> list[str]:
        """Return why trackers were given up, one line each."""
        return [writer.problem for writer in self._writers if writer.problem]

    def _describe(self, state: RunState, number: int) -> TrackedTrial:
        return describe_trial(self._spec, state.trials[number], state.best)


class TargetWriter(threading.Thread):
    """Writes into one tracker, in a thread that dies with the process; `tracking.jsonl` has a line per written trial.

    Begins with the trials that are `finished` already, unless the tracker has them as they are.
    """

    def __init__(
        self,
        folder: Path,
        search: TrackedSearch,
        target: LogTarget,
        finished: Sequence[TrackedTrial],
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"log-to {target.name}", daemon=True)
        self.target, self.problem = target, ""
        self.queue: SimpleQueue[TrackedTrial | tuple[bool, str]] = SimpleQueue()
        """Trials to write; last, whether the search has ended, and a summary."""
        self._search, self._finished, self._tell = search, finished, tell
        self._path = folder / WRITTEN_FILE

    def run(self) -> None:
        """Write until the queue says that the search has ended; a tracker that raises is given up."""
        tracker = self.target.tracker
        try:
            known = self._read_written() if tracker.begin(self._search) else {}
            for trial in self._finished:
                if known.get(trial.number) != trial.sha256:
                    self._log(trial)
            while isinstance(item := self.queue.get(), TrackedTrial):
                self._log(item)
            tracker.end(is_finished=item[0], summary=item[1])
        except (Exception, SystemExit) as error:  # a tracker's package may raise anything
            reason = one_line(redact(f"{type(error).__name__}: {error}"), 200)
            self.problem = f"--log-to {self.target.name} writes no more ({reason}); the search is not affected"
            self._tell(self.problem)

    def _read_written(self) -> dict[int, str]:
        """Return trial -> hash of its record in the tracker; unreadable lines do not count."""
        found: dict[int, str] = {}
        with contextlib.suppress(OSError):
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    entry = orjson.loads(line)
                    if entry["target"] == redact(self.target.text):
                        found[int(entry["trial"])] = str(entry["sha256"])
        return found

    def _log(self, trial: TrackedTrial) -> None:
        """Write a trial, then note its hash; without the note, it is only written again."""
        self.target.tracker.log_trial(trial)
        note = {"target": redact(self.target.text), "trial": trial.number, "sha256": trial.sha256}
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(orjson.dumps(note, option=orjson.OPT_APPEND_NEWLINE))


def write_run(folder: Path, spec: RunSpec, state: RunState, targets: Sequence[LogTarget]) -> list[str]:
    """Write the finished trials of a run into trackers, without a limit of time; returns the errors."""
    view = TrackingView(folder, spec, targets, lambda text: None)
    view.open(state)
    view.close(state, wait_s=None)
    return view.problems
