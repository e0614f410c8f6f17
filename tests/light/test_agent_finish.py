"""A request to finish is judged with the beliefs that it brings, and says what happened to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from llm.cases import SPACE, Search, plain_table, run_trial
from llm.turns import GOOD, FakeClock, Scripted, call, submit

from cclsearch.propose.agent.agent import Agent, TurnOutcome
from cclsearch.propose.agent.arbiter.proposer import Arbiter
from cclsearch.propose.agent.replay import replay_turns
from cclsearch.propose.agent.surrogate_table import SurrogateTable
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.prior_hints import collect_hints
from cclsearch.propose.events import DecisionKind, LlmTurn
from cclsearch.propose.study.choose import make_sampler

BELIEFS = [{"part": "pp=1", "is": "much_more"}]
FINISH = call("finish", {"reason": "nothing is left", "beliefs": BELIEFS})


def searched() -> SearchView:
    return replace(Search(observations=[run_trial(1, SPACE.config(0))]).view, next_trial=2)


def left_without_beliefs(view: SearchView) -> SurrogateTable:
    """A table by which something is left until the model says what it believes."""
    believes = bool(collect_hints(view))
    return replace(plain_table(), nothing_left=believes, why="nothing is left" if believes else "something may win")


def left_with_beliefs(view: SearchView) -> SurrogateTable:
    believes = bool(collect_hints(view))
    return replace(plain_table(), nothing_left=not believes, why="by the beliefs something may win")


def take_turn(provider: Scripted, make_table: object, *, folder: Path | None = None, **more: object) -> TurnOutcome:
    agent = Agent(provider, make_table=make_table, clock=FakeClock(), folder=folder)  # type: ignore[arg-type]
    return agent.run_turn(searched(), 1, max_submitted=1, overrules_left=1, **more)  # type: ignore[arg-type]


def test_finish_is_granted_if_nothing_is_left_by_the_beliefs_that_come_with_it():
    outcome = take_turn(Scripted(FINISH), left_without_beliefs)
    assert outcome.finish == "nothing is left"
    assert outcome.event.beliefs == {"pp=1": "much_more"}
    refused = take_turn(Scripted(call("finish", {"reason": "nothing is left"})), left_without_beliefs)
    assert refused.finish is None


def test_a_refused_finish_keeps_its_beliefs_and_the_next_request_says_so():
    provider = Scripted(FINISH, submit(GOOD))
    arbiter = Arbiter(Agent(provider, make_table=left_with_beliefs, clock=FakeClock()), make_sampler("default"))
    proposals = arbiter.propose(replace(searched(), next_trial=3), 1)
    turns = [event for event in arbiter.take_events() if isinstance(event, LlmTurn)]
    assert [turn.decision for turn in turns] == [DecisionKind.REVISE, DecisionKind.SUBMIT]
    assert turns[0].beliefs == {"pp=1": "much_more"}
    assert [dict(proposal.config) for proposal in proposals] == [GOOD]
    second = provider.requests[1].messages[0].text
    assert "finish refused: by the beliefs something may win. What you sent with it is kept" in second
    assert "pp=1: much more" in second


def test_a_belief_about_a_value_that_no_trial_had_does_not_end_the_search():
    guess = call("finish", {"reason": "nothing is left", "beliefs": [{"part": "pp=2", "is": "much_more"}]})
    provider = Scripted(guess)
    outcome = take_turn(provider, left_without_beliefs)
    assert outcome.finish is None
    assert outcome.event.beliefs == {"pp=2": "much_more"}
    assert "something may win. This is without your beliefs about values that no trial had" in outcome.event.refused[0]


def test_the_arbiter_ends_the_search_by_the_same_beliefs():
    agent = Agent(Scripted(FINISH), make_table=left_without_beliefs, clock=FakeClock())
    arbiter = Arbiter(agent, make_sampler("default"))
    assert arbiter.propose(replace(searched(), next_trial=3), 1) == []
    assert "the LLM ended the search" in (arbiter.ending() or "")


def revised() -> SearchView:
    return replace(searched(), events=(LlmTurn(turn=1, decision=DecisionKind.REVISE, insight="x", num_seen=1),))


@pytest.mark.parametrize(
    ("view", "is_stalled", "words"),
    [
        (searched(), True, "they are not kept, because after a stall you choose without them"),
        (revised(), False, "does not count, and is not kept: beliefs change once between two trials"),
    ],
)
def test_a_refusal_says_why_the_beliefs_are_not_kept(view, is_stalled, words):
    provider = Scripted(FINISH, submit(GOOD))
    agent = Agent(provider, make_table=lambda view: plain_table(), clock=FakeClock())
    outcome = agent.run_turn(view, 1, max_submitted=1, overrules_left=1, first_only=is_stalled)
    answer = provider.requests[1].messages[-1].results[0]
    assert answer.is_error
    assert words in answer.text
    assert outcome.event.beliefs == {}


def test_after_a_stall_the_beliefs_of_a_request_to_finish_count_too(tmp_path):
    outcome = take_turn(Scripted(FINISH), left_without_beliefs, first_only=True, folder=tmp_path)
    assert (outcome.finish, outcome.event.beliefs) == ("nothing is left", {"pp=1": "much_more"})
    assert [turn.is_same for turn in replay_turns(tmp_path)] == [True]


def test_after_a_stall_only_the_beliefs_of_the_first_request_of_a_turn_count():
    other = call("finish", {"reason": "nothing is left", "beliefs": [{"part": "tp=1", "is": "much_more"}]})

    def left_unless_tp(view: SearchView) -> SurrogateTable:
        return replace(plain_table(), nothing_left="tp=1" in collect_hints(view), why="something may win")

    assert take_turn(Scripted(other), left_unless_tp, first_only=True).finish is not None
    assert take_turn(Scripted(FINISH, other, submit(GOOD)), left_unless_tp, first_only=True).finish is None


def test_a_replay_judges_by_the_recorded_figures(tmp_path):
    take_turn(Scripted(FINISH), left_without_beliefs, folder=tmp_path)

    def never(view: SearchView) -> SurrogateTable:
        raise AssertionError("the record has the table")

    assert [(turn.decision, turn.is_same) for turn in replay_turns(tmp_path, never)] == [
        ("finish: nothing is left", True)
    ]
