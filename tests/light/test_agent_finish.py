"""How an LLM ends a search or a turn: limits, finishing, and turns that end early."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llm.cases import SPACE, Search, invented_time_s, plain_table, run_trial
from llm.turns import GOOD, FakeClock, Scripted, call, run_turn, submit

from cclsearch.core.errors import UserError
from cclsearch.propose.agent.abandon import find_abandoned
from cclsearch.propose.agent.agent import Agent, TurnOutcome
from cclsearch.propose.agent.arbiter.proposer import Arbiter
from cclsearch.propose.agent.arbiter.rules import ArbiterSettings, find_llm_trials
from cclsearch.propose.agent.memory.history import limits_event, past_turns, read_limits
from cclsearch.propose.agent.memory.replay import replay_turns
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable
from cclsearch.propose.agent.providers.cost import LlmLimits, cost_of
from cclsearch.propose.agent.providers.spec import find_price, parse_spec, read_timeout_s, refuse_without_price
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    Effort,
    Usage,
)
from cclsearch.propose.base import Proposal, Proposer, SearchView
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


def test_a_replay_judges_by_the_recorded_figures(tmp_path, monkeypatch):
    take_turn(Scripted(FINISH), left_without_beliefs, folder=tmp_path)

    def never(view):
        raise AssertionError("the record has the table")

    monkeypatch.setattr("cclsearch.propose.agent.prompt.surrogate_table.fit_posterior", never)
    assert [(turn.decision, turn.is_same) for turn in replay_turns(tmp_path)] == [("finish: nothing is left", True)]


def test_tokens_money_and_seconds_are_accounted():
    clock = FakeClock()
    provider = Scripted(call("candidates"), submit(GOOD), clock=clock)
    outcome = run_turn(provider)
    assert outcome.event.cost.usage.input_tokens == 2000
    assert outcome.event.cost.requests == 2
    assert outcome.event.cost.usd == pytest.approx(2 * (1000 * 1.0 + 100 * 10.0) / 1e6)


def test_a_limit_ends_the_turn_for_good():
    outcome = run_turn(Scripted(call("candidates")), limits=LlmLimits(max_tokens=2000))
    assert outcome.stall is not None
    assert (outcome.stall.cause, outcome.stall.is_temporary) == ("limit", False)
    assert "2,200 of 2,000 tokens" in outcome.stall.text
    outcome = run_turn(Scripted(call("candidates")), limits=LlmLimits(max_usd=0.003))
    assert outcome.stall is not None
    assert "$0.00" in outcome.stall.text


def test_timeout_of_an_answer_fits_the_effort_or_is_read_from_the_environment(monkeypatch):
    monkeypatch.delenv("CCL_SEARCH_LLM_TIMEOUT_S", raising=False)
    assert read_timeout_s() < read_timeout_s(Effort.HIGH) < read_timeout_s(Effort.MAX)
    monkeypatch.setenv("CCL_SEARCH_LLM_TIMEOUT_S", "900")
    assert read_timeout_s(Effort.LOW) == 900.0
    for wrong in ("0", "nan", "inf", "soon", "-3"):
        monkeypatch.setenv("CCL_SEARCH_LLM_TIMEOUT_S", wrong)
        with pytest.raises(UserError, match="CCL_SEARCH_LLM_TIMEOUT_S must be seconds"):
            read_timeout_s()


def test_remote_server_has_no_price_and_local_server_is_free():
    for url in ("http://127.0.0.1:8000/v1#m", "http://localhost/v1#m", "http://[::1]:1/v1#m"):
        name = parse_spec(url).name
        assert name == "local:m"
        assert cost_of(Usage(input_tokens=10**6), find_price(name)).usd == 0.0
        refuse_without_price(name, {"max_usd": 1.0})
    name = parse_spec("https://llm.example.org/v1#m").name
    assert name == "compatible:m"
    assert find_price(name) is None
    with pytest.raises(UserError, match="--max-usd: the price of compatible:m is unknown"):
        refuse_without_price(name, {"max_usd": 1.0})
    refuse_without_price(name, {"max_usd": 1.0, "price": "4,20"})
    refuse_without_price(name, {})


def test_raised_limit_applies_to_later_turns():
    limits = read_limits((limits_event(LlmLimits(max_usd=2.0)),), LlmLimits(max_tokens=5, max_usd=1.0))
    assert (limits.max_tokens, limits.max_usd) == (5, 2.0)


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
    found = re.search(r"this turn may submit at most (\d+)", request.messages[0].text)
    return int(found[1]) if found else 0


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
    assert find_abandoned(search.view) is None
