"""How an LLM ends a search or a turn: limits, finishing, and turns that end early."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llm.cases import SPACE, Search, invented_time_s, plain_table, run_trial
from llm.players import own_turn
from llm.turns import GOOD, FakeClock, Scripted, call, run_turn, submit

from cclsearch.core.errors import UserError
from cclsearch.propose.agent.agent import Agent, TurnOutcome
from cclsearch.propose.agent.arbiter.proposer import Arbiter
from cclsearch.propose.agent.arbiter.rules import ArbiterSettings
from cclsearch.propose.agent.memory.history import limits_event, read_limits
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
from cclsearch.propose.events import LlmTurn

TIMED = sorted((time_s, row) for row in range(len(SPACE)) if (time_s := invented_time_s(SPACE.config(row))) is not None)
FAST = [row for _, row in TIMED]
OOM = [row for row in range(len(SPACE)) if row not in FAST]
RIVAL = FAST[20]
FINISH = call("finish", {"reason": "nothing is left", "insight": "x"})


def searched(count: int = 3) -> SearchView:
    trials = [run_trial(n, SPACE.config(row)) for n, row in enumerate(FAST[10 : 10 + count], 1)]
    return replace(Search(observations=trials).view, next_trial=count + 1)


def rated(gain: float, **more: object) -> SurrogateTable:
    """A table whose strongest rival, and first choice, is `RIVAL`."""
    wins_N = np.zeros(len(SPACE))
    wins_N[RIVAL] = 0.3
    return replace(plain_table(), gain_left=gain, wins_N=wins_N, why="something may win", **more)  # type: ignore[arg-type]


def ask(*answers: Answer, table: SurrogateTable, view: SearchView | None = None, **more: Any) -> TurnOutcome:
    agent = Agent(Scripted(*answers), make_table=lambda view: table, clock=FakeClock(), folder=more.pop("folder", None))
    return agent.run_turn(view or searched(), 1, **{"max_submitted": 1, "overrules_left": 1, **more})


def test_finish_is_granted_if_the_surrogate_expects_nothing_more():
    outcome = ask(FINISH, table=rated(0.001, nothing_left=True))
    assert (outcome.finish, outcome.event.insight, outcome.proposals) == ("nothing is left", "x", ())


def test_finish_at_the_llms_risk_runs_the_strongest_rival_and_replays(tmp_path):
    outcome = ask(FINISH, table=rated(0.04), folder=tmp_path)
    assert outcome.finish is None
    assert [SPACE.row(proposal.config) for proposal in outcome.proposals] == [RIVAL]
    assert outcome.event.bet == "nothing is left"
    assert [turn.is_same for turn in replay_turns(tmp_path)] == [True]


LOST = (LlmTurn(turn=1, bet="sure"),)


@pytest.mark.parametrize(
    ("gain", "count", "events", "first_only", "why"),
    [
        (0.04, 2, (), False, "from 3 measured trials on"),
        (0.06, 3, (), False, "at your own risk below 5%"),
        (0.04, 3, (), True, "you stalled"),
        (0.04, 3, LOST, False, "a rival beat the best"),
    ],
)
def test_finish_is_refused_with_the_reason(gain, count, events, first_only, why):
    view = replace(searched(count), events=events)
    provider = Scripted(FINISH, submit(GOOD))
    agent = Agent(provider, make_table=lambda view: rated(gain), clock=FakeClock())
    outcome = agent.run_turn(view, 1, max_submitted=1, overrules_left=1, first_only=first_only)
    assert outcome.event.bet == ""
    assert why in provider.requests[1].messages[-1].results[0].text


@pytest.mark.parametrize(("rival", "ends"), [(0, False), (-1, True)], ids=["beats the best", "does not"])
def test_the_rival_settles_whether_the_search_ends(rival, ends):
    table = rated(0.04)
    table.wins_N[RIVAL], table.wins_N[FAST[rival]] = 0.0, 0.3
    first, second, last = (submit(dict(SPACE.config(FAST[n]))) for n in (11, 12, 1))
    provider = Scripted(first, second, FINISH, last)
    agent = Agent(provider, make_table=lambda view: table, clock=FakeClock())
    arbiter = Arbiter(agent, Fastest(skip=10), rules=ArbiterSettings(num_seeds=1, overrules=9))
    search = Search(budget=5)
    search.run(arbiter)
    assert list_rows(search) == [*FAST[10:13], FAST[rival], *([] if ends else [FAST[1]])]
    assert ("its strongest rival, trial 4, did not beat the best: nothing is left" in (arbiter.ending() or "")) == ends


def test_the_surrogates_row_is_one_word():
    outcome = ask(call("follow"), table=rated(0.5))
    assert [SPACE.row(proposal.config) for proposal in outcome.proposals] == [0]
    assert not outcome.event.submitted[0].is_overrule


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


BETTER, WORSE = 0.5, 2.0
"""`refuted_at` over the true time: the trial is refuted, or it is not."""


class Fastest(Proposer):
    """Takes the fastest open row but some: after its seed nothing of these improves."""

    name = "default"

    def __init__(self, skip: int = 0) -> None:
        self.skip = skip

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        rows = [row for row in FAST[self.skip :] if not view.taken_N[row]]
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
    found = re.search(r"this turn may submit at most (\d+)", own_turn(request).messages[0].text)
    return int(found[1]) if found else 0
