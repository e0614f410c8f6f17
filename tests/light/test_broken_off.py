"""A turn of several configurations is broken off at a trial that misses: the LLM chooses the rest of it anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from llm.cases import SPACE, Search, invented_time_s, plain_table
from llm.turns import FakeClock, call

from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.arbiter.proposer import Arbiter
from cclsearch.propose.agent.arbiter.rules import ArbiterSettings, find_llm_trials
from cclsearch.propose.agent.broken_off import find_broken_off
from cclsearch.propose.agent.history import past_turns
from cclsearch.propose.agent.providers.types import Answer, CompletionRequest
from cclsearch.propose.base import Proposal, Proposer, SearchView

TIMED = sorted((time_s, row) for row in range(len(SPACE)) if (time_s := invented_time_s(SPACE.config(row))) is not None)
FAST = [row for _, row in TIMED]
OOM = [row for row in range(len(SPACE)) if row not in FAST]
BETTER, WORSE = 0.5, 2.0
"""`refuted_at` over the true time: the trial is refuted, or it is not."""


class Fastest(Proposer):
    """Takes the fastest open row: after its seed nothing improves."""

    name = "default"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        rows = [row for row in FAST if not view.taken_N[row]]
        return [Proposal(SPACE.config(row), self.name) for row in rows[:count]]


class Stating:
    """A model that submits these rows, one item per turn, and states at which share of its time each is refuted."""

    name = "openai:gpt-5"

    def __init__(self, *turns: Sequence[tuple[int, float]]) -> None:
        self._turns = list(turns)
        self.requests: list[CompletionRequest] = []

    def ask(self, request: CompletionRequest) -> Answer:
        self.requests.append(request)
        turn = self._turns.pop(0) if len(self._turns) > 1 else self._turns[0]
        items: list[dict[str, Any]] = [
            {
                **{"config": dict(SPACE.config(row)), "rationale": "r", "expected_step_time_s": 1.0},
                **{"refuted_at": share * (invented_time_s(SPACE.config(row)) or 1.0)},
            }
            for row, share in turn
        ]
        return call("submit", {"configurations": items})


def play(model: Stating, budget: int) -> Search:
    agent = Agent(model, make_table=lambda view: plain_table(), clock=FakeClock())
    search = Search(budget=budget)
    search.run(Arbiter(agent, Fastest(), rules=ArbiterSettings(num_seeds=1, overrules=9)))
    return search


def list_rows(search: Search) -> list[int | None]:
    return [SPACE.row(proposal.config) for proposal in search.proposals]


def most_submitted(request: CompletionRequest) -> int:
    schema = next(tool.parameters for tool in request.tools if tool.name == "submit")
    return int(schema["properties"]["configurations"]["maxItems"])


@pytest.mark.parametrize("first", [(OOM[0], WORSE), (FAST[30], BETTER)], ids=["failed", "refuted"])
def test_after_a_trial_that_misses_the_llm_chooses_the_rest_of_its_turn_anew(first):
    model = Stating([first, (FAST[20], WORSE), (FAST[21], WORSE)], [(FAST[2], WORSE), (FAST[1], WORSE)])
    search = play(model, budget=4)
    assert list_rows(search)[1:] == [first[0], FAST[2], FAST[1]]
    assert [most_submitted(request) for request in model.requests] == [3, 2]
    assert "choose the rest of turn 1 anew, up to 2; its queue was" in model.requests[1].messages[0].text
    assert [turn.root for turn in past_turns(search.events)] == [1, 1]
    assert {trial.turn for trial in find_llm_trials(search.view)} == {1}


def test_a_turn_whose_trials_do_as_stated_runs_to_its_end():
    model = Stating([(FAST[3], WORSE), (FAST[2], WORSE), (FAST[1], WORSE)])
    search = play(model, budget=4)
    assert list_rows(search)[1:] == [FAST[3], FAST[2], FAST[1]]
    assert len(model.requests) == 1


def test_choosing_anew_gives_no_more_trials_than_were_submitted():
    slow = [(row, BETTER) for row in FAST[10:30]]
    search = play(Stating(slow[0:3], slow[3:5], slow[5:6], slow[6:9]), budget=6)
    assert [proposal.proposer for proposal in search.proposals] == ["seed", *["llm"] * 3, *["default"] * 2]
    assert "stall: 3 trials in turns that did not improve the best beyond the noise" in search.moves()[1]


def test_nothing_is_broken_off_once_the_arbiter_has_moved():
    slow = [(row, BETTER) for row in FAST[10:30]]
    search = play(Stating(slow[0:2], slow[2:3]), budget=5)
    assert [proposal.proposer for proposal in search.proposals][3] == "default"
    assert find_broken_off(search.view) is None
