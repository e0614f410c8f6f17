"""The arbiter suspends the LLM when it stalls, lets it return if the cause is temporary, and never gets stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llm.cases import SPACE, Search, plain_table, run_trial
from llm.players import Stubborn

from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.arbiter.proposer import Arbiter, NoLlmProposer
from cclsearch.propose.agent.arbiter.rules import ArbiterSettings, find_standing
from cclsearch.propose.agent.arbiter.states import ALLOWED, read_state, write_move
from cclsearch.propose.agent.memory.history import limits_event, past_turns
from cclsearch.propose.agent.options import AgentOptions
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable, make_surrogate_table
from cclsearch.propose.agent.providers.cost import LlmLimits
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    ErrorKind,
    Provider,
    ProviderError,
    StopReason,
    ToolCall,
    Usage,
)
from cclsearch.propose.agent.server import PROBE
from cclsearch.propose.base import Proposal, Proposer, SearchView
from cclsearch.propose.events import ArbiterMove, ArbiterPhase, ArbiterState, LlmTurn, SubmittedConfig


class FakeClock:
    """A clock that only `sleep` advances."""

    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


class TrialClock(FakeClock):
    """A clock that every look advances, as trials do."""

    def now_s(self) -> float:
        self.time_s += 6.0
        return self.time_s


class FirstOpen(Proposer):
    """A fallback that takes the first open row: deterministic, without a model."""

    name = "default"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        rows = (~view.taken_N).nonzero()[0][:count]
        return [Proposal(SPACE.config(int(row)), self.name) for row in rows]


class ScriptedModel:
    """A model that submits these rows, one item per turn; errors are raised, text is a `finish`."""

    name = "openai:gpt-5"

    def __init__(self, *rows: int | Sequence[int] | ProviderError | str) -> None:
        self._rows = list(rows)
        self.num_asked = 0

    def ask(self, request: CompletionRequest) -> Answer:
        self.num_asked += 1
        if request is PROBE and not isinstance(self._rows[0], ProviderError):
            return Answer(text="ok", stop=StopReason.DONE, usage=Usage(input_tokens=10, output_tokens=1))
        item = self._rows.pop(0) if len(self._rows) > 1 else self._rows[0]
        if isinstance(item, ProviderError):
            raise item
        if isinstance(item, str):
            return _answer("finish", {"reason": item})
        rows = [item] if isinstance(item, int) else item
        configs = [{"config": dict(SPACE.config(row)), "rationale": "r"} for row in rows]
        return _answer("submit", {"configurations": configs})


def _answer(name: str, arguments: dict[str, Any]) -> Answer:
    call = ToolCall(id="c", name=name, arguments=arguments)
    return Answer(calls=(call,), stop=StopReason.TOOL, usage=Usage(input_tokens=1000, output_tokens=100))


def rows_by_time() -> list[int]:
    """Rows that run, the fastest first."""
    from llm.cases import invented_time_s

    timed = [(invented_time_s(SPACE.config(row)), row) for row in range(len(SPACE))]
    return [row for time_s, row in sorted((t, r) for t, r in timed if t is not None)]


FAST = rows_by_time()
OOM = [row for row in range(len(SPACE)) if row not in FAST]


def open_table(view: SearchView) -> SurrogateTable:
    free = ~view.taken_N
    return replace(plain_table(), order=tuple(int(row) for row in free.nonzero()[0]))


def make(
    provider: Provider,
    fallback: Proposer | None = None,
    *,
    parallel: int = 1,
    rules: ArbiterSettings | None = None,
    clock: FakeClock | None = None,
    **options: Any,
) -> Arbiter:
    agent = Agent(provider, options=AgentOptions(**options), make_table=open_table, clock=clock or FakeClock())
    return Arbiter(agent, fallback or FirstOpen(), parallel=parallel, rules=rules or ArbiterSettings(num_seeds=1))


def list_proposers(search: Search) -> list[str]:
    return [proposal.proposer for proposal in search.proposals]


def test_seeds_come_first_and_then_the_llm_decides():
    search = Search(budget=3)
    search.run(make(ScriptedModel(*FAST[4::-1])))
    assert list_proposers(search) == ["seed", "llm", "llm"]
    assert search.moves() == ["llm since trial 2: the seeds are chosen"]


def test_a_safe_default_follows_a_seed_that_failed():
    class Doomed(FirstOpen):
        def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
            return [Proposal(SPACE.config(OOM[0]), "default")]

    search = Search(budget=2)
    search.run(make(ScriptedModel(FAST[0]), Doomed(), rules=ArbiterSettings(num_seeds=2)))
    assert list_proposers(search) == ["seed", "seed"]
    assert "safe default" in search.proposals[1].rationale


def test_duplicates_suspend_the_llm_until_there_is_new_evidence():
    search = Search(budget=12)
    ending = search.run(make(Stubborn(), rules=ArbiterSettings(num_seeds=1, explore=2, patience=3)))
    assert ending is None
    moves = search.moves()
    assert moves[1].startswith("fallback since trial 3: three proposals in a row were duplicates")
    assert moves[2] == "llm since trial 5: the fallback chose 2 trials"
    assert moves[3].startswith("fallback since trial 5")
    assert "llm since trial 7: the fallback chose 2 trials" in moves[4], (
        "a quarter of the eight trials left, not the four that it would be"
    )


@pytest.mark.parametrize(("first", "count"), [(FAST[:1], 6), ([], 3)], ids=["after a gain", "at the start"])
def test_a_stall_counts_trials_and_more_of_them_after_an_improvement(first, count):
    search = Search(budget=12)
    rules = ArbiterSettings(num_seeds=1, overrules=20)
    search.run(make(ScriptedModel(*first, *FAST[:10:-1]), rules=rules))
    assert f"stall: {count} trials in turns that did not improve the best beyond the noise" in search.moves()[1]
    assert list_proposers(search)[: len(first) + count + 2] == ["seed", *["llm"] * (len(first) + count), "default"]


def test_after_a_stall_the_llm_chooses_among_the_first_candidates_until_it_improves():
    search = Search(budget=12)
    search.run(make(ScriptedModel(FAST[-1]), rules=ArbiterSettings(num_seeds=1, patience=1)))
    before = [event.after for event in search.events if isinstance(event, ArbiterMove)]
    stalled, back = before[1], before[2]
    assert (stalled.phase, back.phase) == (ArbiterPhase.FALLBACK, ArbiterPhase.LLM)
    assert not find_standing(search.view, before[0], ArbiterSettings()).is_limited
    assert find_standing(search.view, back, ArbiterSettings()).is_limited
    limited = replace(make_surrogate_table(search.view), first_only=True)
    free = [row for row in range(len(SPACE)) if limited.is_free(row)]
    assert sorted(free) == sorted({*limited.order[:5], *limited.likeliest[:5]})


def test_what_keeps_the_search_from_being_finished_is_free_also_after_a_stall():
    wins_N = np.zeros(len(SPACE))
    table = replace(plain_table(), first_only=True, wins_N=wins_N)
    rows = table.order[8:14]
    wins_N[list(rows)] = 0.08, 0.07, 0.06, 0.05, 0.04, 0.03
    assert [table.is_free(row) for row in rows] == [True] * 5 + [False]
    assert replace(table, first_only=False).is_free(rows[5])
    wins_N[rows[5]] = 0.01
    assert not replace(table, first_only=False).is_free(rows[5])


@pytest.mark.parametrize(("budget_left", "stalls", "explore"), [(100, 0, 2), (100, 9, 8), (12, 1, 3), (6, 0, 1)])
def test_exploring_is_short_and_depends_on_the_budget_left(budget_left, stalls, explore):
    assert ArbiterSettings().find_explore(stalls, budget_left) == explore


def test_improvement_within_the_noise_does_not_count():
    from cclsearch.propose.agent.arbiter.rules import find_llm_trials

    search = Search()
    search.ask(make(ScriptedModel(FAST[3]), rules=ArbiterSettings(num_seeds=1)))
    search.finish_trial()
    first = search.observations[0]
    items = tuple(SubmittedConfig(SPACE.config(row)) for row in FAST[:2])
    search.events.append(LlmTurn(turn=1, decision="submit", submitted=items, text="t"))
    assert first.loss is not None
    for trial, (row, ratio) in enumerate(((FAST[0], 0.995), (FAST[1], 0.9)), 2):
        loss = first.loss * ratio
        search.observations.append(replace(first, trial=trial, config=SPACE.config(row), row=row, loss=loss))
    assert [trial.improved for trial in find_llm_trials(search.view)] == [False, True]


def test_same_failure_twice_suspends_the_llm():
    search = Search(budget=5)
    own_ideas = OOM[::-1]  # not among the surrogate's first choices
    search.run(make(ScriptedModel(*own_ideas), rules=ArbiterSettings(num_seeds=1, explore_share=1.0, overrules=2)))
    assert list_proposers(search) == ["seed", "llm", "llm", "default", "default"]
    assert "stall: 2 trials failed in the same way (out of memory)" in search.moves()[1]


def test_unavailable_provider_is_retried_later_and_a_wrong_key_is_not():
    down = ProviderError(ErrorKind.OVERLOADED, "busy")
    search = Search(budget=6)
    script = ScriptedModel(down, down, down, *FAST)
    search.run(make(script, clock=TrialClock()))
    # the turn and its second try, one small request in vain, one that is answered
    assert list_proposers(search)[:3] == ["seed", "default", "default"]
    assert list_proposers(search)[-1] == "llm"
    assert any(move.endswith("the server answers") for move in search.moves())
    dead = ScriptedModel(down)
    search = Search(budget=40)
    search.run(make(dead, clock=TrialClock()))
    assert "asked again for three minutes in vain" in search.moves()[-1]
    assert dead.num_asked == 2 + 5
    wrong = ScriptedModel(ProviderError(ErrorKind.AUTHENTICATION, "invalid key"))
    search = Search(budget=6)
    search.run(make(wrong))
    assert list_proposers(search) == ["seed", *["default"] * 5]
    assert search.moves()[-1].startswith("LLM off since trial 2: the provider failed (authentication")
    assert wrong.num_asked == 1


def test_limit_applies_to_the_whole_run():
    search = Search(budget=8)
    provider = ScriptedModel(*FAST[6::-1])
    search.run(make(provider, limits=LlmLimits(max_tokens=2200)))
    assert provider.num_asked == 2
    assert list_proposers(search) == ["seed", "llm", "llm", *["default"] * 5]
    assert "a limit is reached: 2,200 of 2,200 tokens are used" in search.moves()[-1]


def test_finish_ends_the_search_only_when_nothing_plausible_is_left():
    search = Search(budget=10)
    assert search.run(make(ScriptedModel("done"))) is None
    assert len(search.proposals) == 10
    agent = Agent(
        ScriptedModel("done"), make_table=lambda view: replace(plain_table(), nothing_left=True), clock=FakeClock()
    )
    search = Search(budget=10)
    ending = search.run(Arbiter(agent, FirstOpen(), rules=ArbiterSettings(num_seeds=1)))
    assert ending == "the LLM ended the search, and the surrogate expects too little of the trials left: done"
    assert len(search.proposals) == 1
    assert search.moves()[-1] == "finished since trial 2: done"


def test_state_is_rebuilt_from_the_ledger_alone():
    def fresh() -> Arbiter:
        return make(Stubborn(), rules=ArbiterSettings(num_seeds=1, explore=2))

    whole, parts = Search(budget=9), Search(budget=9)
    whole.run(fresh())
    while len(parts.proposals) < 9:
        killed_after_each_trial = fresh()
        killed_after_each_trial._agent.provider.first_choice = {"config": dict(SPACE.config(1))}  # type: ignore[attr-defined]
        parts.ask(killed_after_each_trial)
        parts.finish_trial()
    assert [p.config for p in parts.proposals] == [p.config for p in whole.proposals]
    assert parts.moves() == whole.moves()


def test_a_slow_turn_never_leaves_slots_empty():
    release, asked, answered = threading.Event(), threading.Event(), threading.Event()

    class Slow(ScriptedModel):
        def ask(self, request: CompletionRequest) -> Answer:
            asked.set()
            release.wait(60)
            answered.set()
            return super().ask(request)

    search = Search(budget=12)
    arbiter = make(Slow(FAST[0]), parallel=4, rules=ArbiterSettings(num_seeds=1))
    while len(search.running) < 4:
        assert search.ask(arbiter, 4 - len(search.running))
    assert not answered.is_set(), "no slot waited for the answer"
    assert asked.wait(60)
    assert "llm" not in list_proposers(search)
    release.set()
    deadline = time.monotonic() + 60
    while "llm" not in list_proposers(search) and time.monotonic() < deadline and len(search.proposals) < 12:
        search.finish_trial()
        time.sleep(0.05)
        search.ask(arbiter, 1)
    assert "llm" in list_proposers(search)


def test_late_answer_is_not_launched_twice():
    search = Search(budget=8)
    arbiter = make(ScriptedModel(1), parallel=2, rules=ArbiterSettings(num_seeds=1))
    deadline = time.monotonic() + 60
    while len(search.proposals) < 8 and time.monotonic() < deadline:
        if not search.ask(arbiter, 1):
            break
        time.sleep(0.02)
        search.finish_trial()
    rows = [SPACE.row(proposal.config) for proposal in search.proposals]
    assert len(rows) == len(set(rows)) == 8


class BlockedModel(ScriptedModel):
    """A model that answers only after `release` is set."""

    def __init__(self, *rows: int) -> None:
        super().__init__(*rows)
        self.asked, self.release = threading.Event(), threading.Event()

    def ask(self, request: CompletionRequest) -> Answer:
        self.asked.set()
        assert self.release.wait(60)
        return super().ask(request)


def wait_for_background(arbiter: Arbiter) -> None:
    background = arbiter._background
    assert background is not None
    assert background.result(60) is not None


def llm_turns(search: Search) -> list[LlmTurn]:
    return past_turns(search.events)


def test_turn_during_a_stall_is_charged_and_not_used():
    search = Search(budget=20)
    provider = BlockedModel(FAST[0])
    arbiter = make(provider, parallel=2, rules=ArbiterSettings(num_seeds=0, explore=2))
    search.ask(arbiter, 1)
    assert provider.asked.wait(60)
    # Meanwhile two of its earlier trials finish, and both failed in the same way.
    items = tuple(SubmittedConfig(SPACE.config(row)) for row in OOM[:2])
    search.events.append(LlmTurn(turn=1, decision="submit", submitted=items, text="t"))
    for item in items:
        search.proposals.append(Proposal(item.config, "llm"))
        search.observations.append(run_trial(len(search.proposals), item.config))
    search.ask(arbiter, 1)
    assert "failed in the same way" in search.moves()[-1]
    provider.release.set()
    wait_for_background(arbiter)
    search.ask(arbiter, 1)
    late = llm_turns(search)[-1]
    assert (late.decision, late.submitted, late.cost.usage.total) == ("none", (), 1100)
    assert list_proposers(search) == ["default", "llm", "llm", "default", "default"]
    search.ask(arbiter, 1)
    assert search.moves()[-1].startswith("llm since trial 6")
    assert "the LLM was suspended meanwhile" in search.events[-2].text + search.events[-3].text


def test_turn_at_the_end_of_the_search_is_charged():
    search = Search(budget=4)
    provider = BlockedModel(FAST[0])
    arbiter = make(provider, parallel=2, rules=ArbiterSettings(num_seeds=0))
    search.ask(arbiter, 1)
    assert provider.asked.wait(60)
    provider.release.set()
    wait_for_background(arbiter)
    arbiter.close()
    (event,) = arbiter.take_events()
    (turn,) = past_turns((event,))
    assert (turn.decision, turn.submitted, turn.cost.usage.total) == ("none", (), 1100)
    arbiter.close()
    assert arbiter.take_events() == []


def test_turn_without_an_answer_does_not_delay_the_end(monkeypatch):
    monkeypatch.setattr("cclsearch.propose.agent.arbiter.proposer.CLOSE_S", 0.01)
    search = Search(budget=4)
    provider = BlockedModel(FAST[0])
    arbiter = make(provider, parallel=2, rules=ArbiterSettings(num_seeds=0))
    search.ask(arbiter, 1)
    assert provider.asked.wait(60)
    arbiter.close()
    (event,) = arbiter.take_events()
    assert "the search ended before this turn did" in event.text
    provider.release.set()


def test_resume_retries_after_a_wrong_key_or_a_raised_limit():
    search = Search(budget=3)
    search.run(make(ScriptedModel(ProviderError(ErrorKind.AUTHENTICATION, "invalid key"))))
    assert list_proposers(search) == ["seed", "default", "default"]
    search.budget = 6
    search.run(make(ScriptedModel(*FAST[6::-1]), limits=LlmLimits(max_tokens=1000)))
    assert search.moves()[-2].startswith("llm since trial 4: the search was resumed")
    assert list_proposers(search)[3:] == ["llm", "default", "default"]
    search.budget = 8
    search.run(make(ScriptedModel(*FAST[4::-1]), limits=LlmLimits(max_tokens=1000)))
    assert list_proposers(search)[6:] == ["default", "default"]
    search.events.append(limits_event(LlmLimits(max_tokens=5000)))
    search.budget = 9
    search.run(make(ScriptedModel(*FAST[2::-1]), limits=LlmLimits(max_tokens=1000)))
    assert list_proposers(search)[8:] == ["llm"]


def test_only_allowed_moves_are_written():
    with pytest.raises(ValueError, match="cannot move"):
        write_move(ArbiterState(ArbiterPhase.OFF, 1), ArbiterState(ArbiterPhase.FALLBACK, 2))
    for phase in ArbiterPhase:
        for after in ALLOWED[phase]:
            event = write_move(ArbiterState(phase, 1), ArbiterState(after, 7, "cause", "reason", 2, 1))
            view = replace(Search().view, events=(event,))
            assert read_state(view) == ArbiterState(after, 7, "cause", "reason", 2, 1)


def test_missing_key_is_reported_once_and_may_be_set_later():
    search = Search(budget=3)
    search.run(NoLlmProposer(FirstOpen(), "OPENAI_API_KEY is not set"))
    assert search.moves() == ["LLM off since trial 1: OPENAI_API_KEY is not set"]
    search.budget = 5
    search.run(make(ScriptedModel(*FAST)))
    assert list_proposers(search)[3:] == ["llm", "llm"]
