"""The trials of a ledger, read on demand: any numbering and any interleaving of their lines."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cclsearch.core.values import Config, Failure, FailureKind, Provenance, Stage
from cclsearch.launch.base import Handle
from cclsearch.record.event import (
    Event,
    Note,
    Purpose,
    RetryKind,
    SearchResumed,
    TrialFinished,
    TrialProposed,
    TrialRetried,
    TrialSubmitted,
    TrialSubmitting,
)
from cclsearch.record.ledger import Ledger, fold_ledger, read_events
from cclsearch.record.state import RunState
from cclsearch.record.trial import fold_trial
from cclsearch.scoring.outcome import Admission, Outcome


def trial_events(number: int, *, tp: int, purpose: Purpose = Purpose.SEARCH, lost: bool = False) -> list[Event]:
    """All events of one trial, with one retried attempt."""
    failure = Failure(stage=Stage.RUN, kind=FailureKind.NODE_FAILED, message="gone")
    admitted = Admission(admitted=True, verdicts=())
    end = (
        Outcome(provenance=Provenance.MEASURED, failure=failure)
        if lost
        else Outcome(provenance=Provenance.MEASURED, admission=admitted, loss=float(tp), metrics={"step_time_s": tp})
    )
    handle = Handle(launcher="local", job_name=f"t{number}", job_id=str(number), trial_dir=Path(f"trials/{number}"))
    return [
        TrialProposed(time_s=1, trial=number, config=Config(tp=tp), proposer="random", purpose=purpose),
        TrialSubmitting(time_s=2, trial=number, attempt=1),
        TrialSubmitted(time_s=3, trial=number, attempt=1, handle=handle),
        TrialRetried(time_s=4, trial=number, attempt=1, kind=RetryKind.FAILURE, reason="node failed", failure=failure),
        TrialSubmitting(time_s=5, trial=number, attempt=2),
        TrialSubmitted(time_s=6, trial=number, attempt=2, handle=handle),
        TrialFinished(time_s=7, trial=number, attempt=2, outcome=end),
    ]


def write(path: Path, events: list[Event]) -> None:
    ledger = Ledger(path)
    for event in events:
        ledger.append(event)
    ledger.close()


@pytest.mark.parametrize("numbers", [[1, 2, 3, 4, 5, 6], [7, 3, 2, 900, 1, 5]])
def test_trials_are_complete_in_any_interleaving_of_their_lines(tmp_path, numbers):
    rng = random.Random(3)
    waiting = {number: trial_events(number, tp=number) for number in numbers}
    events: list[Event] = [waiting[number].pop(0) for number in numbers]
    while any(waiting.values()):
        if rng.random() < 0.3:
            events.append(Note(time_s=1, topic="test", text="ü between"))
        number = rng.choice([number for number, left in waiting.items() if left])
        for _ in range(min(rng.randint(1, 3), len(waiting[number]))):
            events.append(waiting[number].pop(0))
    path = tmp_path / "ledger.jsonl"
    write(path, events)
    state = fold_ledger(path)
    assert list(state.trials) == numbers
    for number in numbers:
        own = [event for event in read_events(path) if getattr(event, "trial", None) == number]
        assert state.trials[number] == fold_trial(own)
    assert 8 not in state.trials
    with pytest.raises(KeyError):
        state.trials[8]


def test_failures_in_a_row_are_counted_by_kind_and_named_for_this_session_only():
    """A search stops after several in a row, and says which trials of this session the infrastructure lost."""
    state = RunState()

    def propose(number: int) -> None:
        event = TrialProposed(time_s=1, trial=number, config=Config(tp=number), proposer="random")
        state.apply(event, number)

    def finish(number: int, kind: FailureKind | None) -> tuple[int, int]:
        failure = Failure(stage=Stage.RUN, kind=kind, message="") if kind else None
        outcome = Outcome(provenance=Provenance.MEASURED, failure=failure)
        state.apply(TrialFinished(time_s=2, trial=number, attempt=1, outcome=outcome), number)
        return state.num_consecutive_infrastructure_failures, state.num_consecutive_judging_errors

    lost, unjudged = FailureKind.LAUNCHER, FailureKind.JUDGING_ERROR
    kinds = [lost, lost, unjudged, unjudged, unjudged, FailureKind.CRASHED, lost]
    expected = [(1, 0), (2, 0), (0, 1), (0, 2), (0, 3), (0, 0), (1, 0)]
    for number, (kind, counts) in enumerate(zip(kinds, expected, strict=True), 1):
        propose(number)
        assert finish(number, kind) == counts, number
    assert state._infrastructure_failures == [1, 2, 7]
    propose(8)
    state.apply(SearchResumed(time_s=3, engine_version="1", budget=20), 0)
    assert (state.num_consecutive_infrastructure_failures, state._infrastructure_failures) == (0, [])
    propose(9)
    assert (finish(8, lost), finish(9, lost)) == ((1, 0), (2, 0))
    assert state._infrastructure_failures == [9], "trial 8 was proposed before the search was resumed"


def test_runs_of_one_configuration_are_grouped_and_lost_trials_cost_no_budget(tmp_path):
    path = tmp_path / "ledger.jsonl"
    resumed = SearchResumed(time_s=1, engine_version="1", budget=9)
    write(path, [*trial_events(1, tp=9, lost=True), resumed, *trial_events(2, tp=2, lost=True)])
    write(path, [*trial_events(3, tp=4), *trial_events(4, tp=3), *trial_events(5, tp=4, purpose=Purpose.CONFIRMATION)])
    state = fold_ledger(path)
    assert [trial.number for trial in state.infrastructure_failures] == [2], "since it was resumed"
    assert state.num_spent == 2
    assert state.losses_by_trial() == {3: [4.0, 4.0], 4: [3.0]}
    assert [trial.number for trial in state.runs_of(Config(tp=4))] == [3, 5]
    assert state.baseline.number == 3
    assert list(state.trials.finish_order) == [1, 2, 3, 4, 5]
