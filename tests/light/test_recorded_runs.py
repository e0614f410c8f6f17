"""Runs that version 0.3.0 wrote (ledger format 2) stay readable: change these files only with `LEDGER_VERSION`.

`recorded/runs/KIND` has `search.yaml` and `ledger.jsonl` of a search with an LLM (`hybrid`) and of one that measured
(`measured`), with other paths and ports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from paths import TESTS

from cclsearch.core.content import TRIALS_FOLDER
from cclsearch.core.values import FailureKind
from cclsearch.propose.events import ArbiterMove, DecisionKind, LlmTurn
from cclsearch.record.event import EVENT, LEDGER_VERSION, EndKind, RetryKind, encode_line
from cclsearch.record.ledger import LEDGER_FILE, read_events
from cclsearch.record.trial import TrialState
from cclsearch.run.folder import Standing, load_run

RUNS = TESTS / "recorded" / "runs"
KINDS = ("hybrid", "measured")


def fields_of(data: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each field of a JSON object."""
    for name, value in data.items() if isinstance(data, dict) else ():
        yield f"{path}.{name}"
        yield from fields_of(value, f"{path}.{name}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_is_read_and_written_with_the_same_fields(kind):
    lines = (RUNS / kind / LEDGER_FILE).read_bytes().splitlines(keepends=True)
    events = list(read_events(RUNS / kind / LEDGER_FILE))
    assert len(events) == len(lines)
    for line, event in zip(lines, events, strict=True):
        assert EVENT.validate_python(event) == event
        assert set(fields_of(json.loads(line))) <= set(fields_of(json.loads(encode_line(event))))
    assert json.loads(lines[0])["ledger_version"] == LEDGER_VERSION == 2


def test_a_search_with_an_llm_opens_with_its_turns_and_its_best_trial():
    run = load_run(RUNS / "hybrid")
    assert (run.status, run.spec.sampler, run.spec.strategy) == (Standing.ENDED, "surrogate", "hybrid")
    turns = [event for event in run.state.reported if isinstance(event, LlmTurn)]
    assert [turn.turn for turn in turns] == [1, 2, 3, 4, 5, 6, 7]
    assert {turn.decision for turn in turns} == {DecisionKind.SUBMIT}
    assert [event.after.since_trial for event in run.state.reported if isinstance(event, ArbiterMove)] == [2]
    best = run.state.best
    assert (best.number, best.loss, best.config["pp"]) == (1, 8.99, 4)
    assert run.state.trials.counts == {TrialState.ADMITTED: 7, TrialState.FAILED: 1}


def test_a_measured_search_opens_with_its_failures_retries_and_confirmation():
    run = load_run(RUNS / "measured")
    trials = run.state.trials
    outcome = trials[1].outcome
    assert (outcome.failure.kind, outcome.failure.rank) == (FailureKind.OUT_OF_MEMORY, 1)
    assert [retry.kind for retry in trials[6].retries] == [RetryKind.DISTURBED]
    assert trials.counts == {TrialState.ADMITTED: 4, TrialState.FAILED: 2, TrialState.REFUSED: 1}
    assert run.state.runs_of(trials[3].config) == [trials[3], trials[7]]
    assert (run.state.num_spent, run.state.best) == (6, trials[3])
    assert run.state.ended.kind is EndKind.BUDGET_USED
    assert not (run.folder / TRIALS_FOLDER).exists(), "reading a run writes nothing"
