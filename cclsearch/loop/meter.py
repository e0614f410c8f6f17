"""Count a running search's consumption, and stop the search at a limit or a deadline."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.processes import boot_clock_s
from cclsearch.core.values import Config, Provenance
from cclsearch.loop.jobs import StopSignal
from cclsearch.loop.session import Session
from cclsearch.plan.forecast import start_seconds
from cclsearch.propose.events import LlmTurn
from cclsearch.record.event import EndKind, Event, TrialProposed, TrialRevised
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.spec import RunSpec
from cclsearch.run.usage import count_nodes, find_node_hour_limit, sum_node_hours
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.base import task_of

CHECK_INTERVAL_S = 1.0


def _hours_since(moment_s: float) -> float:
    """Hours since a moment of the boot clock; clock changes do not affect it (only the deadline is a time of day)."""
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
    """Message of a stop, with a place for the limit's name."""
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


RECENT = 8
"""Number of the latest finished trials whose times correct the estimate."""


class NodeHours:
    """The limit of one search, its consumption, and estimates for a further trial."""

    def __init__(self, session: Session, limit: float, used_before: float, meter: Meter) -> None:
        self._spec, self._space = session.spec, session.space
        self._limit, self._used_before, self._meter = limit, used_before, meter
        self._expected: dict[int, float] = {}
        self.ending: str | None = None
        """Reason why no further trial may start; None while one may."""

    def allows(self, state: RunState, config: Config) -> bool:
        """Return whether a trial of that configuration may start; once one may not, none may."""
        if self.ending is None:
            for trial in state.unfinished:
                self._expected.setdefault(trial.number, self.estimate(state, trial.config))
            needed = self.estimate(state, config)
            left = self._limit - self._used_before - self._meter.node_hours(self._expected)
            if needed > left:
                self.ending = (
                    f"the next trial would use about {needed:.2g} node-hours, and {max(left, 0.0):.2g} of the limit of"
                    f" {self._limit:g} are left; `ccl-search resume {self._spec.run_id} --max-node-hours N` raises it"
                )
        return self.ending is None

    def estimate(self, state: RunState, config: Config) -> float:
        """Return the expected node-hours of a trial: predicted, corrected by the latest measured trials."""
        recent = [state.trials[n] for n in reversed(state.trials.finish_order[-RECENT:])]
        timed = [
            (self._work_s(t.config), self._measured_s(t), sum(end - start for start, end in t.spans)) for t in recent
        ]
        known = [(predicted, work, whole) for predicted, work, whole in timed if predicted and work]
        ratio = statistics.median(work / predicted for predicted, work, _ in known) if known else 1.0
        start_s = (
            statistics.median(max(whole - work, 0.0) for _, work, whole in known)
            if known
            else start_seconds(self._spec.card)
        )
        seconds = start_s + ratio * self._work_s(config)
        return count_nodes(self._spec, config) * min(seconds, self._spec.limits.trial_timeout_s) / 3600

    def _units(self, config: Config) -> int:
        """Return the steps of a trial; 0 if its task does not count any."""
        task = task_of(self._spec.card)
        payload = task.make_input(self._spec.card, config, is_measured=True, run_id=self._spec.run_id, trial=1)
        return task.count_units(payload) or 0

    def _work_s(self, config: Config) -> float:
        """Return the predicted seconds of a trial's steps; 0 if nothing predicts them."""
        row = self._space.row(config)
        return (
            self._units(config) * float(self._unit_s_N[row]) if self._unit_s_N is not None and row is not None else 0.0
        )

    def _measured_s(self, trial: Trial) -> float:
        """Return the measured seconds of a trial's steps; 0 if it measured none."""
        metrics = trial.outcome.metrics if trial.outcome else {}
        return self._units(trial.config) * metrics.get(task_of(self._spec.card).primary, 0.0)

    @cached_property
    def _unit_s_N(self) -> NDArray[np.float64] | None:
        prediction = predict_space(self._spec.card, self._space)
        return None if prediction is None else prediction.value_N


@contextlib.contextmanager
def keep_node_hours(writer: RunWriter, session: Session) -> Iterator[Session]:
    """Within this context the session keeps its limit of node-hours; nothing changes if it has none."""
    limit = find_node_hour_limit(session.spec, writer.state)
    if limit is None or session.spec.provenance is not Provenance.MEASURED:
        yield session
        return
    used = sum_node_hours(session.spec, writer.state, session.now_s())
    reached = f"the limit of {limit:g} node-hours is reached"
    with Meter(session.spec, Allowance(node_hours=max(limit - used, 0.0), reached=reached), session.stop) as meter:
        meter.adopt(writer.state.unfinished)
        writer.watch(meter.watch)
        yield replace(session, node_hours=NodeHours(session, limit, used, meter))
