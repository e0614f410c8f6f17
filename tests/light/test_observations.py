"""The table of trials returns each observation as it was measured, and its snapshots do not change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cclsearch.core.values import Config, Failure, FailureKind, Provenance, Stage
from cclsearch.propose.observations import Observation, observed_rows
from cclsearch.record.event import Purpose, TrialFinished, TrialProposed, TrialRevised, decode_line
from cclsearch.record.ledger import Ledger, fold_ledger
from cclsearch.record.state import RunState
from cclsearch.record.trial_table import TrialTable
from cclsearch.scoring.outcome import Admission, Outcome
from cclsearch.space.table import Knob, Space, space_from_rows

KNOBS = (Knob("tp", (1, 2, 4)), Knob("overlap", (False, True)), Knob("bucket", (0.5, 1.0)))
OOM = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory", rank=3)


@pytest.fixture
def space() -> Space:
    configs = [{"tp": tp, "overlap": overlap, "bucket": 0.5} for tp in (1, 2, 4) for overlap in (False, True)]
    return space_from_rows(KNOBS, configs)


@pytest.mark.parametrize(("single_run", "best"), [(0.995, 1), (0.95, 2)])
def test_one_run_beats_a_configuration_with_more_runs_only_if_it_is_clearly_lower(tmp_path, single_run, best):
    """The winner's curse: the best of many single runs is lower than its mean."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for number, (tp, loss) in enumerate([(1, 1.00), (1, 1.02), (1, 0.98), (2, single_run)], 1):
        ledger.append(TrialProposed(time_s=1, trial=number, config=Config(tp=tp), proposer="random"))
        admission = Admission(admitted=True, verdicts=())
        outcome = Outcome(provenance=Provenance.MEASURED, loss=loss, admission=admission)
        ledger.append(TrialFinished(time_s=2, trial=number, attempt=1, outcome=outcome))
    ledger.close()
    state = fold_ledger(ledger.path)
    assert state.best.config == Config(tp=best)


def some_observations(space: Space) -> list[Observation]:
    metrics = {"step_time_s": 2.5, "peak_memory_gib": 60.0, "mfu": 0.4}
    return [
        Observation(1, space.config(0), 0, 2.5, spread=0.01, metrics=metrics | {"peak_memory_gib": 60.0}),
        Observation(2, space.config(1), 1, None, failure=OOM, metrics={"peak_memory_gib": 80.0}),
        Observation(3, Config(bucket=0.5, overlap=True, tp=2), 3, 0.0, metrics={"mfu": 0.4, "step_time_s": 2.5}),
        Observation(4, Config(tp=8), None, 3.0, is_confirmation=True),
        Observation(
            5, Config(tp=4.0, overlap=0, bucket=0.5), None, None, violation=0.25, metrics={"peak_memory_gib": 1.0}
        ),
    ]


def record(path: Path, observations: list[Observation]) -> TrialTable:
    """Write trials that were measured like that to a ledger, in this order of finishing; return its table."""
    ledger = Ledger(path)
    for o in observations:
        purpose = Purpose.CONFIRMATION if o.is_confirmation else Purpose.SEARCH
        ledger.append(TrialProposed(trial=o.trial, config=o.config, proposer="test", purpose=purpose))
    for o in observations:
        outcome = Outcome(
            provenance=Provenance.MEASURED,
            failure=o.failure,
            admission=Admission(admitted=o.loss is not None, verdicts=()),
            loss=o.loss,
            metrics=dict(o.metrics),
            spread=o.spread,
            violation=o.violation,
        )
        ledger.append(TrialFinished(trial=o.trial, attempt=1, outcome=outcome))
    ledger.close()
    return fold_ledger(path).trials


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_each_observation_is_read_back_unchanged(space, path):
    added = some_observations(space)
    seen = record(path, added).observe(space)
    assert seen == tuple(added)
    assert observed_rows(seen).tolist() == [0, 1, 3], (
        "the first row of the space is one, a configuration outside it is none"
    )
    assert [(list(o.config.items()), list(o.metrics)) for o in seen] == [
        (list(o.config.items()), list(o.metrics)) for o in added
    ], "knobs and metrics keep their order, so that a prompt prints them alike"
    assert [type(o.config["tp"]) for o in seen] == [int, int, int, int, float]


def test_a_snapshot_is_sorted_by_trial_and_does_not_change(space, path):
    first = [Observation(trial, space.config(trial), trial, float(trial)) for trial in (2, 5, 1)]
    later = [Observation(3, space.config(3), 3, None, failure=OOM), Observation(4, Config(tp=16), None, 4.0)]
    record(path, [*first, *later])
    state = RunState(path)
    offset, before = 0, None
    finished = 0
    for line in path.read_bytes().splitlines(keepends=True):
        state.apply(decode_line(line), offset)
        offset += len(line)
        finished += b"trial_finished" in line
        before = state.trials.observe(space) if finished == 3 and before is None else before
    assert before is not None
    assert [o.trial for o in before] == [1, 2, 5]
    assert sorted(observed_rows(before).tolist()) == [1, 2, 5]
    after = state.trials.observe(space)
    assert [o.trial for o in after] == [1, 2, 3, 4, 5]
    assert sorted(observed_rows(after).tolist()) == [1, 2, 3, 5]


def test_an_empty_table_and_one_without_a_space_work(space, path):
    assert TrialTable(None).observe(space) == ()
    assert observed_rows(()).dtype == np.int64
    table = record(path, [Observation(1, space.config(2), 2, 1.0)])
    assert (table.observe()[0].config, table.observe()[0].row) == (space.config(2), None)
    assert table.observe(space)[0].row == 2, "the rows are those of the last space"


def test_infrastructure_failures_are_not_observed(space, path):
    lost = Failure(stage=Stage.RUN, kind=FailureKind.NODE_FAILED, message="gone")
    table = record(path, [Observation(1, space.config(2), 2, None, failure=lost), *some_observations(space)[1:2]])
    assert [o.trial for o in table.observe(space)] == [2]
    assert list(table.finish_order) == [1, 2]


def test_a_revised_trial_is_observed_with_its_new_outcome(space, path):
    record(path, some_observations(space))
    state = fold_ledger(path)
    assert [o.loss for o in state.trials.observe(space)][:3] == [2.5, None, 0.0]
    ledger = Ledger(path)
    outcome = Outcome(provenance=Provenance.MEASURED, admission=Admission(admitted=False, verdicts=()))
    revised = TrialRevised(trial=3, outcome=outcome)
    state.apply(revised, ledger.append(revised))
    ledger.close()
    assert [(o.trial, o.loss) for o in state.trials.observe(space)][:3] == [(1, 2.5), (2, None), (3, None)]
    assert state.trials.observe(space)[2].metrics == {}


def test_more_trials_than_are_cached_are_read_again(space, path):
    added = [
        Observation(n, space.config(n % 6), n % 6, float(n), metrics={"step_time_s": n / 3}) for n in range(1, 700)
    ]
    table = record(path, added)
    assert list(table.observe(space)) == added
    assert [trial.config for trial in table.values()] == [o.config for o in added]
