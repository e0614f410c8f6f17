"""How far the LLM is from a stall: which of its trials count, how much, and what ends a turn early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llm.cases import SPACE, plain_table
from paths import ROOT

from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.agent.arbiter.rules import ArbiterSettings, StallCount, find_stall, find_standing
from cclsearch.propose.base import ExpectedOutcome, Observation, SearchView
from cclsearch.propose.events import ArbiterPhase, ArbiterState, DecisionKind, LlmTurn, SubmittedConfig
from cclsearch.recording.load import load_recording

RECORDING = load_recording(ROOT / "benchmarks" / "landscapes" / "vtrain-h1024-l12-g8-b16")
ROWS = range(len(RECORDING.space))


def seen(trial: int, row: int, seconds: float) -> Observation:
    return Observation(trial, RECORDING.space.config(row), row, seconds, metrics={"step_time_s": seconds})


def item(row: int, predicted: float = 10.0, **more: Any) -> SubmittedConfig:
    return SubmittedConfig(
        RECORDING.space.config(row),
        predicted=ExpectedOutcome({"step_time_s": predicted}),
        **more,
    )


def view_of(times: list[float], turns: list[tuple[SubmittedConfig, ...]], **more: Any) -> SearchView:
    """Trial 1 is a seed; the others are the LLM's, in the order of the turns."""
    observations = tuple(seen(row + 1, row, seconds) for row, seconds in enumerate(times))
    events = tuple(
        LlmTurn(turn=n, decision=DecisionKind.SUBMIT, submitted=items, num_seen=1) for n, items in enumerate(turns, 1)
    )
    return SearchView(RECORDING.card, RECORDING.space, observations, frozenset(), 9, 0, events=(*events,), **more)


def standing(view: SearchView, stalls: int = 0) -> StallCount:
    return find_standing(view, ArbiterState(ArbiterPhase.LLM, 2, stalls=stalls), ArbiterSettings())


def test_one_turn_of_three_and_three_turns_of_one_are_equally_far_from_a_stall():
    times = [10.0, 12.0, 12.0, 12.0]
    one = standing(view_of(times, [(item(1), item(2), item(3))]))
    many = standing(view_of(times, [(item(1),), (item(2),), (item(3),)]))
    assert one.total == many.total == 3
    assert one.patience == 3


def test_a_gain_doubles_the_patience_and_a_stall_leaves_one_trial():
    view = view_of([10.0, 8.0, 12.0], [(item(1),), (item(2, 7.9),)])
    assert (standing(view).patience, standing(view).total) == (6, 1)
    missed = view_of([10.0, 12.0], [(item(1),)])
    assert standing(missed, stalls=1).patience == 1
    assert "they count 1 of the 1 that make a stall: trial 2 counts 1" in standing(missed, stalls=1).describe()


def test_a_trial_that_was_not_admitted_counts_nothing_and_its_row_is_free_once_more():
    view = view_of([10.0, 12.0], [(item(1),)])
    refused = replace(
        view.observations[1], loss=None, metrics={}, refusals=("load: other processes use 1.5 of 2 cores",)
    )
    once = replace(view, observations=(view.observations[0], refused))
    assert standing(once).total == 0
    assert once.taken_N[:2].tolist() == [True, False]
    assert replace(once, observations=(*once.observations, replace(refused, trial=3))).taken_N[1]


def test_a_choice_that_the_surrogate_would_have_made_counts_half():
    assert standing(view_of([10.0, 12.0], [(item(1, is_own_idea=False),)])).total == 0.5


@pytest.mark.parametrize(("own", "stalls"), [((True, True), True), ((True, False), False), ((False, False), False)])
def test_failures_of_the_surrogates_first_choices_are_no_stall_of_the_llm(own, stalls):
    view = view_of([10.0, 12.0, 12.0], [(item(row, is_own_idea=is_own),) for row, is_own in enumerate(own, 1)])
    failure = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="a crash")
    failed = [replace(o, loss=None, metrics={}, failure=failure) for o in view.observations[1:]]
    view = replace(view, observations=(view.observations[0], *failed))
    found = find_stall(view, ArbiterState(ArbiterPhase.LLM, 2), ArbiterSettings())
    assert (found is not None) == stalls
    if found:
        assert found[0] == "same failure"


def test_lists_are_sorted_by_the_chance_to_win_then_by_the_prediction():
    wins_N, value_N = np.zeros(len(SPACE)), np.full(len(SPACE), 9.0)
    wins_N[[3, 4, 5]] = 0.2, 0.2002, 0.3
    value_N[[3, 4]] = 7.0, 8.0
    table = replace(plain_table(), wins_N=wins_N, value_N=value_N)
    assert table.sort_by_chance([1, 3, 4, 5], 1) == [5, 3, 4, 1]
    assert table.sort_by_chance([1, 3, 4, 5], -1) == [5, 4, 3, 1]
    assert table.sort_by_chance([1, 3], 1) == [3, 1]
    assert replace(table, wins_N=None).sort_by_chance([4, 1, 5], 1) == [4, 1, 5]
