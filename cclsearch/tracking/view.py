"""Follow the ledger of a search and write its finished trials into trackers, each in a thread of its own.

Nothing here ends, delays or changes a search: the search only puts values into a queue. `tracking.jsonl` of the run
folder notes each written trial, so that a resumed search writes the missing ones; without the file, all trials are
written again in place of the earlier ones.
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
from cclsearch.tracking.base import LogTarget, TrackedSearch, TrackedTrial, describe_search, describe_trial

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
