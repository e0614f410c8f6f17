"""Follows the ledger of a search and writes its finished trials into trackers, each in a thread of its own.

Nothing here ends, delays or changes a search: the search only puts values into a queue. What a tracker has is noted in
`tracking.jsonl` of the run folder, so that a search that is resumed writes what is missing; without the file, all
trials are written again in place of what is there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import orjson

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.record.event import Event, TrialFinished, TrialRevised
from cclsearch.record.state import RunState
from cclsearch.run.spec import RunSpec
from cclsearch.tracking.base import TrackedSearch, TrackedTrial, describe_search, describe_trial
from cclsearch.tracking.targets import LogTarget

WRITTEN_FILE = "tracking.jsonl"
CLOSE_WAIT_S = 60.0
"""Time after the search for trackers to write the rest."""


class TrackingView:
    """The trackers of a run; `watch` is called after each event of its ledger."""

    def __init__(self, folder: Path, spec: RunSpec, targets: Sequence[LogTarget], tell: Callable[[str], None]) -> None:
        self._spec = spec
        self._folder = folder
        self._tell = tell
        search = describe_search(spec)
        self._writers = [TargetWriter(folder, search, target, tell) for target in targets]

    def open(self, state: RunState) -> None:
        """Begin with the trials that are finished already."""
        if not self._writers:
            return
        finished = [self._describe(state, number) for number, trial in state.trials.items() if trial.is_finished]
        for writer in self._writers:
            writer.start(finished)

    def watch(self, event: Event, state: RunState) -> None:
        """Hand on a trial that finished, or whose verdict changed."""
        if self._writers and isinstance(event, TrialFinished | TrialRevised):
            trial = self._describe(state, event.trial)
            for writer in self._writers:
                writer.put(trial)

    def close(self, state: RunState, *, wait_s: float | None = CLOSE_WAIT_S) -> None:
        """Let the trackers write the rest, at most `wait_s` together (None: as long as it takes)."""
        best = state.best
        summary = f"best: trial {best.number}, {dict(best.config)}" if best else "no trial was admitted"
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        for writer in self._writers:
            writer.finish(is_finished=state.ended is not None, summary=one_line(redact(summary), 500))
        for writer in self._writers:
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            if not writer.wait(left_s):
                self._tell(
                    f"{writer.name} has not written everything after {wait_s:.0f} s; later:"
                    f" ccl-search export {self._folder.name} --log-to {writer.name}"
                )

    @property
    def problems(self) -> list[str]:
        """Return why trackers were given up, one line each."""
        return [writer.problem for writer in self._writers if writer.problem]

    def _describe(self, state: RunState, number: int) -> TrackedTrial:
        return describe_trial(self._spec, state.trials[number], state.best)


class TargetWriter:
    """Writes into one tracker, in a thread that dies with the process."""

    def __init__(self, folder: Path, search: TrackedSearch, target: LogTarget, tell: Callable[[str], None]) -> None:
        self.name = target.name
        self.problem = ""
        """Why the tracker was given up; empty while it works."""
        self._written = WrittenTrials(folder / WRITTEN_FILE, target.text)
        self._search = search
        self._tracker = target.tracker
        self._tell = tell
        self._queue: SimpleQueue[TrackedTrial | tuple[bool, str]] = SimpleQueue()
        self._finished: list[TrackedTrial] = []
        self._thread = threading.Thread(target=self._run, name=f"log-to {self.name}", daemon=True)

    def start(self, finished: list[TrackedTrial]) -> None:
        """Begin; `finished` are the trials until now."""
        self._finished = finished
        self._thread.start()

    def put(self, trial: TrackedTrial) -> None:
        """Write a trial soon."""
        self._queue.put(trial)

    def finish(self, *, is_finished: bool, summary: str) -> None:
        """End after what was put before."""
        self._queue.put((is_finished, summary))

    def wait(self, wait_s: float | None) -> bool:
        """Return whether everything is written, or given up, within that time."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            known = self._written.read() if self._tracker.begin(self._search) else {}
            for trial in self._finished:
                if known.get(trial.number) != trial.sha256:
                    self._log(trial)
            while isinstance(item := self._queue.get(), TrackedTrial):
                self._log(item)
            is_finished, summary = item
            self._tracker.end(is_finished=is_finished, summary=summary)
        except (Exception, SystemExit) as error:  # a tracker's package may raise anything
            reason = one_line(redact(f"{type(error).__name__}: {error}"), 200)
            self.problem = f"--log-to {self.name} writes no more ({reason}); the search is not affected"
            self._tell(self.problem)

    def _log(self, trial: TrackedTrial) -> None:
        self._tracker.log_trial(trial)
        self._written.add(trial)


class WrittenTrials:
    """The trials that a target has, as `tracking.jsonl` says: one line per trial that was written."""

    def __init__(self, path: Path, target: str) -> None:
        self._path = path
        self._target = redact(target)

    def read(self) -> dict[int, str]:
        """Return trial -> hash of what was written last; lines that cannot be read do not count."""
        found: dict[int, str] = {}
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return found
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = orjson.loads(line)
                if entry["target"] == self._target:
                    found[int(entry["trial"])] = str(entry["sha256"])
        return found

    def add(self, trial: TrackedTrial) -> None:
        """Note that the tracker has a trial as it is; without the note, it is only written again."""
        line = orjson.dumps({"target": self._target, "trial": trial.number, "sha256": trial.sha256})
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(line + b"\n")


def write_run(folder: Path, spec: RunSpec, state: RunState, targets: Sequence[LogTarget]) -> list[str]:
    """Write the finished trials of a run into trackers, however long that takes; returns what went wrong."""
    view = TrackingView(folder, spec, targets, lambda text: None)
    view.open(state)
    view.close(state, wait_s=None)
    return view.problems
