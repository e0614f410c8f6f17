"""Keeps a search within its limit of node-hours: no trial starts whose estimate passes what is left."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Config, Provenance
from cclsearch.loop.meter import Allowance, Meter
from cclsearch.loop.session import Session
from cclsearch.plan.cost import start_seconds
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.usage import count_nodes, find_node_hour_limit, sum_node_hours
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.base import task_of

RECENT = 8
"""Number of the latest finished trials whose times correct the estimate."""


class NodeHours:
    """The limit of one search, what it used, and estimates of what a further trial will use."""

    def __init__(self, session: Session, limit: float, used_before: float, meter: Meter) -> None:
        self._spec, self._space = session.spec, session.space
        self._limit, self._used_before, self._meter = limit, used_before, meter
        self._expected: dict[int, float] = {}
        self.ending: str | None = None
        """Why no further trial may start; None while one may."""

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
