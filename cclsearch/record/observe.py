"""Observations for proposers from the trials of the ledger."""

from __future__ import annotations

from cclsearch.propose.observations import Observation, Observations, ObservationStore
from cclsearch.record.event import Purpose
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.space.table import Space


class Observer:
    """Converts finished trials to observations, each only once."""

    def __init__(self, space: Space | None = None) -> None:
        self._space = space
        self._store = ObservationStore(space)
        self._num_taken = 0

    def observe(self, state: RunState) -> Observations:
        """Finished trials in order of their numbers, without infrastructure failures."""
        for number in state.finish_order[self._num_taken :]:
            observation = observe_trial(state.trials[number], self._space)
            if observation is not None:
                self._store.add(observation)
        self._num_taken = len(state.finish_order)
        return self._store.snapshot()


def observe_trial(trial: Trial, space: Space | None = None) -> Observation | None:
    """The trial as an observation; None while it runs and for an infrastructure failure."""
    outcome = trial.outcome
    if outcome is None or (outcome.failure and outcome.failure.kind.is_infrastructure):
        return None
    return Observation(
        trial=trial.number,
        config=trial.config,
        row=space.row(trial.config) if space else None,
        loss=trial.loss,
        failure=outcome.failure,
        spread=outcome.spread,
        metrics=outcome.metrics,
        violation=outcome.violation,
        is_confirmation=trial.purpose is Purpose.CONFIRMATION,
    )
