"""Counts what a running search spends, and asks it to stop at a limit or the deadline."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from cclsearch.core.processes import boot_clock_s
from cclsearch.core.values import Provenance
from cclsearch.nightly.share import Spent
from cclsearch.propose.events import LlmTurn
from cclsearch.record.event import EndKind, Event, TrialProposed, TrialRevised
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
    seconds = (trial.finished_s or now_s) - max(trial.proposed_s, since_s)
    return count_nodes(spec, trial) * max(seconds, 0.0) / 3600


def count_nodes(spec: RunSpec, trial: Trial) -> int:
    """Number of nodes of a trial; 0 if nothing is measured."""
    if spec.provenance is not Provenance.MEASURED:
        return 0
    return math.ceil(count_ranks(trial.config) / max(spec.card.hardware.accelerators_per_node, 1))


def _hours_since(moment_s: float) -> float:
    """Hours since a moment of the boot clock, which nothing sets: only the deadline is a time of day."""
    return (boot_clock_s() - moment_s) / 3600


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
        self._begun_s = boot_clock_s()
        self._done_node_hours = 0.0
        self._running: dict[int, tuple[float, int]] = {}
        """Running trial -> since when, by the boot clock, and its number of nodes."""
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
        return _hours_since(self._begun_s)

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
        since_s, nodes = self._running.pop(trial.number, (first_s, count_nodes(self._spec, trial)))
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
        with self._mutex:
            running = sum(nodes * _hours_since(since_s) for since_s, nodes in self._running.values())
            node_hours, tokens, usd = self._done_node_hours + running, self._tokens, self._usd
        if limit.deadline_s is not None and time.time() >= limit.deadline_s:
            return "the night's deadline is reached", EndKind.TIME_LIMIT
        pairs = (
            ("hours", self.hours, limit.hours),
            ("node-hours", node_hours, limit.node_hours),
            ("tokens", tokens, limit.tokens),
            ("dollars", usd, limit.usd),
        )
        used = next((name for name, value, most in pairs if most is not None and value >= most), None)
        return (f"its part of the night's {used} is used up", EndKind.SHARE_USED) if used else None
