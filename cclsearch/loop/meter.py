"""Counts what a running search spends, and asks it to stop at a limit or a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType

from cclsearch.core.processes import boot_clock_s
from cclsearch.loop.jobs import StopSignal
from cclsearch.propose.events import LlmTurn
from cclsearch.record.event import EndKind, Event, TrialProposed, TrialRevised
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.run.spec import RunSpec
from cclsearch.run.usage import count_nodes

CHECK_INTERVAL_S = 1.0


def _hours_since(moment_s: float) -> float:
    """Hours since a moment of the boot clock, which nothing sets: only the deadline is a time of day."""
    return (boot_clock_s() - moment_s) / 3600


@dataclass(frozen=True)
class Allowance:
    """Limits of one search from here on; None means no limit."""

    deadline_s: float | None = None
    """Seconds since the epoch."""
    hours: float | None = None
    node_hours: float | None = None
    tokens: float | None = None
    usd: float | None = None
    reached: str = "the limit of {} is reached"
    """What a stop says; the limit's name is put into it."""
    kind: EndKind = EndKind.NODE_HOURS


class Meter:
    """Context manager around one search: a watcher of its ledger, and a thread that checks the clocks.

    The thread also calls `heartbeat` every second, which keeps a night's lock fresh.
    """

    def __init__(
        self, spec: RunSpec, allowance: Allowance, stop: StopSignal, heartbeat: Callable[[], None] = lambda: None
    ) -> None:
        self._spec, self._allowance, self._stop, self._heartbeat = spec, allowance, stop, heartbeat
        self._begun_s = boot_clock_s()
        self._done_node_hours = 0.0
        self._running: dict[int, tuple[float, int]] = {}
        """Running trial -> since when, by the boot clock, and its number of nodes."""
        self._tokens = 0.0
        self._usd = 0.0
        self._mutex = threading.Lock()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="meter", daemon=True)

    def __enter__(self) -> Meter:
        self._check()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        self._thread.join(timeout=10)

    @property
    def hours(self) -> float:
        """Wall time so far, hours."""
        return _hours_since(self._begun_s)

    def adopt(self, running: Iterable[Trial]) -> None:
        """Count from now on also these trials, which an earlier process started."""
        with self._mutex:
            for trial in running:
                self._running.setdefault(trial.number, (self._begun_s, count_nodes(self._spec, trial.config)))

    def node_hours(self, expected: Mapping[int, float] | None = None) -> float:
        """Return the node-hours so far; of a running trial at least those that `expected` has for it."""
        with self._mutex:
            running = {n: nodes * _hours_since(since_s) for n, (since_s, nodes) in self._running.items()}
            return self._done_node_hours + sum(max(used, (expected or {}).get(n, 0.0)) for n, used in running.items())

    def watch(self, event: Event, state: RunState) -> None:
        """Count one event of the ledger."""
        with self._mutex:
            if isinstance(event, LlmTurn):
                self._tokens += event.cost.usage.total
                self._usd += event.cost.usd or 0.0
            number = getattr(event, "trial", None)
            if isinstance(number, int) and not isinstance(event, TrialRevised):
                self._update_trial(state.trials[number], is_new=isinstance(event, TrialProposed))
        self._check()

    def _update_trial(self, trial: Trial, *, is_new: bool) -> None:
        """Count a trial from its proposal to its end; from the beginning if an earlier process proposed it."""
        first_s = boot_clock_s() if is_new else self._begun_s
        since_s, nodes = self._running.pop(trial.number, (first_s, count_nodes(self._spec, trial.config)))
        if trial.is_finished:
            self._done_node_hours += nodes * _hours_since(since_s)
        else:
            self._running[trial.number] = since_s, nodes

    def _tick(self) -> None:
        while not self._finished.wait(CHECK_INTERVAL_S):
            self._check()
            self._heartbeat()

    def _check(self) -> None:
        exhausted = self._find_exhausted()
        if exhausted is not None:
            self._stop.request(*exhausted)

    def _find_exhausted(self) -> tuple[str, EndKind] | None:
        limit = self._allowance
        node_hours = self.node_hours()
        with self._mutex:
            tokens, usd = self._tokens, self._usd
        if limit.deadline_s is not None and time.time() >= limit.deadline_s:
            return "the night's deadline is reached", EndKind.TIME_LIMIT
        pairs = (
            ("hours", self.hours, limit.hours),
            ("node-hours", node_hours, limit.node_hours),
            ("tokens", tokens, limit.tokens),
            ("dollars", usd, limit.usd),
        )
        used = next((name for name, value, most in pairs if most is not None and value >= most), None)
        return (limit.reached.format(used), limit.kind) if used else None
