"""Counts what a running search spends, and asks it to stop at a limit or the deadline."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from cclsearch.core.values import Provenance
from cclsearch.nightly.share import Spent
from cclsearch.propose.events import LlmTurn
from cclsearch.record.event import EndKind, Event, Purpose
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.run.spec import RunSpec
from cclsearch.search.jobs import StopSignal
from cclsearch.space.table import count_ranks

CHECK_INTERVAL_S = 1.0


def count_spent(spec: RunSpec, state: RunState, since_s: float, now_s: float) -> Spent:
    """What a search spent since a moment; wall time is not in a ledger and stays 0.

    A trial that started earlier and was interrupted counts for the night in which it finished.
    """
    trials = [trial for trial in state.trials.values() if (trial.finished_s or now_s) >= since_s]
    turns = [event for event in state.reported if isinstance(event, LlmTurn) and event.time_s >= since_s]
    started = [trial for trial in trials if trial.proposed_s >= since_s or trial.is_finished]
    return Spent(
        trials=sum(trial.costs_budget for trial in started),
        node_hours=sum(count_node_hours(spec, trial, since_s, now_s) for trial in trials),
        tokens=sum(turn.cost.usage.total for turn in turns),
        usd=sum(turn.cost.usd or 0.0 for turn in turns),
    )


def count_node_hours(spec: RunSpec, trial: Trial, since_s: float, now_s: float) -> float:
    """Nodes times hours from the proposal to the end (or now), after `since_s`; 0 if nothing was measured."""
    if spec.provenance is not Provenance.MEASURED:
        return 0.0
    nodes = math.ceil(count_ranks(trial.config) / max(spec.card.hardware.accelerators_per_node, 1))
    seconds = (trial.finished_s or now_s) - max(trial.proposed_s, since_s)
    return nodes * max(seconds, 0.0) / 3600


@dataclass(frozen=True)
class Allowance:
    """Limits of one search in its present turn; None means no limit."""

    deadline_s: float | None = None
    """Seconds since the epoch."""
    hours: float | None = None
    node_hours: float | None = None
    tokens: float | None = None
    usd: float | None = None


class Meter:
    """Context manager around one search: a watcher of its ledger, and a thread that checks the clocks.

    The thread also calls `heartbeat` every second, which keeps the night's lock fresh.
    """

    def __init__(self, spec: RunSpec, allowance: Allowance, stop: StopSignal, heartbeat: Callable[[], None]) -> None:
        self._spec, self._allowance, self._stop, self._heartbeat = spec, allowance, stop, heartbeat
        self._begun_s = time.time()
        self._begun_monotonic_s = time.monotonic()
        self._done_node_hours = 0.0
        self._node_rates: dict[int, float] = {}
        """Running trial -> node-hours per hour."""
        self._since: dict[int, float] = {}
        self._tokens = 0.0
        self._usd = 0.0
        self._mutex = threading.Lock()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="nightly-meter", daemon=True)

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
        return (time.monotonic() - self._begun_monotonic_s) / 3600

    def watch(self, event: Event, state: RunState) -> None:
        """Count one event of the ledger."""
        with self._mutex:
            if isinstance(event, LlmTurn):
                self._tokens += event.cost.usage.total
                self._usd += event.cost.usd or 0.0
            number = getattr(event, "trial", None)
            if isinstance(number, int):
                self._update_trial(state.trials[number])
        self._check()

    def _update_trial(self, trial: Trial) -> None:
        if trial.is_finished:
            self._node_rates.pop(trial.number, None)
            self._done_node_hours += count_node_hours(self._spec, trial, self._begun_s, time.time())
        elif trial.purpose in (Purpose.SEARCH, Purpose.CONFIRMATION, Purpose.REFERENCE, Purpose.CONTROL):
            hour_later = max(trial.proposed_s, self._begun_s) + 3600
            self._node_rates[trial.number] = count_node_hours(self._spec, trial, self._begun_s, hour_later)
            self._since[trial.number] = max(trial.proposed_s, self._begun_s)

    def _tick(self) -> None:
        while not self._finished.wait(CHECK_INTERVAL_S):
            self._check()
            self._heartbeat()

    def _check(self) -> None:
        exhausted = self._find_exhausted()
        if exhausted is not None:
            self._stop.request(*exhausted)

    def _find_exhausted(self) -> tuple[str, EndKind] | None:
        now_s, limit = time.time(), self._allowance
        with self._mutex:
            running = sum(n * max(now_s - self._since[t], 0.0) / 3600 for t, n in self._node_rates.items())
            node_hours, tokens, usd = self._done_node_hours + running, self._tokens, self._usd
        if limit.deadline_s is not None and now_s >= limit.deadline_s:
            return "the night's deadline is reached", EndKind.TIME_LIMIT
        pairs = (
            ("hours", self.hours, limit.hours),
            ("node-hours", node_hours, limit.node_hours),
            ("tokens", tokens, limit.tokens),
            ("dollars", usd, limit.usd),
        )
        used = next((name for name, value, most in pairs if most is not None and value >= most), None)
        return (f"its part of the night's {used} is used up", EndKind.SHARE_USED) if used else None
