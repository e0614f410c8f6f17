"""Every turn ends, for any answers of the model: with a valid new decision, or with the reason for its absence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from llm.cases import SPACE, Search, plain_table, run_trial
from llm.turns import GOOD, ILLEGAL, TRIED, FakeClock, Scripted, call, run_turn, submit

from cclsearch.core.values import Config
from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.providers.types import (
    Answer,
    ErrorKind,
    ProviderError,
    StopReason,
)
from cclsearch.propose.events import Correction


def test_new_configuration_of_the_space_becomes_a_proposal():
    outcome = run_turn(Scripted(submit(GOOD, insight="dp is slow")))
    (proposal,) = outcome.proposals
    assert dict(proposal.config) == GOOD
    assert (proposal.proposer, proposal.turn, proposal.rationale) == ("llm", 1, "why not")
    assert proposal.expects.metrics == {"step_time_s": 9.5, "peak_memory_gib": 30.0}
    assert outcome.event.insight == "dp is slow"


def test_valid_corrections_reach_the_ledger_and_the_others_are_named_with_the_reason():
    corrections = [
        {"part": "pipeline bubble", "factor": 2},
        {"part": "__class__", "factor": 2},
        {"part": "optimizer"},
        7,
    ]
    event = run_turn(Scripted(submit(GOOD, corrections=corrections))).event
    assert (event.num_seen, event.last_seen) == (1, 1)
    assert event.corrections == (Correction(part="pipeline bubble", factor=2.0),)
    assert ["__class__" in why for why in event.refused] == [True, False, False]
    assert "give part and factor" in event.refused[1]
    assert run_turn(Scripted(submit(GOOD, corrections="all is slow"))).event.corrections == ()
    many = [{"part": "all", "factor": 1.0 + n / 10} for n in range(1, 9)]
    assert len(run_turn(Scripted(submit(GOOD, corrections=many))).event.corrections) == 4


def test_numbers_may_be_text_but_booleans_are_strict():
    as_text = {knob: str(value) for knob, value in GOOD.items()}
    assert dict(run_turn(Scripted(submit(as_text))).proposals[0].config) == GOOD
    outcome = run_turn(Scripted(submit({**GOOD, "tp": True})))
    assert outcome.stall is not None


@pytest.mark.parametrize(
    ("answer", "cause", "words"),
    [
        (submit(TRIED), "duplicate", "three proposals in a row were duplicates"),
        (submit(ILLEGAL), "illegal", "not in the search space"),
        (submit({"tp": 2}), "malformed", "malformed"),
        (submit({**GOOD, "LD_PRELOAD": "x"}), "malformed", "malformed"),
        (call("submit", {"configurations": "all"}), "malformed", "malformed"),
        (call("submit", "text"), "malformed", "malformed"),
        (call("rm_rf", {}), "unknown tool", "unknown tool"),
        (call("finish", {"reason": "tired"}), "finish refused", "refused"),
        (Answer(text="I would rather chat", stop=StopReason.DONE), "no call", "called no tool"),
        (Answer(stop=StopReason.DONE), "empty", "empty"),
        (Answer(text="x", stop=StopReason.TRUNCATED), "truncated", "cut off"),
        (Answer(text="no", stop=StopReason.REFUSED), "refusal", "refusals"),
        (Answer(text="x", stop=StopReason.FILTERED), "content filter", "content filter"),
    ],
)
def test_two_corrections_then_the_turn_stalls_with_the_reason(answer, cause, words):
    provider = Scripted(answer)
    outcome = run_turn(provider)
    assert outcome.stall is not None
    assert outcome.stall.cause == cause
    assert words in outcome.stall.text
    assert outcome.stall.is_temporary
    assert len(provider.requests) == (1 if cause == "content filter" else 3)


def test_correction_contains_the_reason_and_can_succeed():
    provider = Scripted(submit(TRIED), submit(ILLEGAL), submit(GOOD))
    assert run_turn(provider).proposals
    replies = [result.text for message in provider.requests[-1].messages for result in message.results]
    assert "a duplicate: trial 1" in replies[0]
    assert "not in the search space" in replies[1]
    assert "Nearest untried configurations: tp=" in replies[1]


def test_a_truncated_decision_is_never_used():
    cut = submit(GOOD).model_copy(update={"stop": StopReason.TRUNCATED})
    assert run_turn(Scripted(cut)).proposals == ()


def test_a_cut_answer_doubles_the_limit_for_the_rest_of_the_search():
    search = Search(observations=[run_trial(1, Config(TRIED))])
    provider = Scripted(Answer(text="x", stop=StopReason.TRUNCATED))
    agent = Agent(provider, make_table=lambda view: plain_table(), clock=FakeClock())
    for _ in range(2):
        agent.run_turn(search.view, 1, max_submitted=1, overrules_left=1)
    assert [request.max_output_tokens for request in provider.requests] == [16_384, 32_768, *[65_536] * 4]


def test_one_bad_generation_costs_one_request_and_a_filtered_prompt_one_turn():
    provider = Scripted(ProviderError(ErrorKind.BAD_GENERATION, "tool_use_failed"), submit(GOOD))
    assert run_turn(provider).proposals
    outcome = run_turn(Scripted(ProviderError(ErrorKind.FILTERED, "content policy"), submit(GOOD)))
    assert outcome.stall is not None
    assert (outcome.stall.cause, outcome.stall.is_temporary) == ("content filter", True)


def test_an_interrupted_answer_is_sent_back_and_continued():
    part = ({"type": "text", "text": "let me see"},)
    provider = Scripted(Answer(text="let me see", stop=StopReason.PAUSED, kept=part), submit(GOOD))
    assert run_turn(provider).proposals
    assert provider.requests[1].messages[-1].kept == part


def test_the_model_s_own_blocks_come_back_with_the_results_of_its_look_ups_unless_its_answer_was_cut():
    part = ({"type": "thinking", "thinking": "hm", "signature": "s"},)
    looked = call("candidates").model_copy(update={"kept": part})
    provider = Scripted(looked, looked, Answer(text="x", stop=StopReason.TRUNCATED, kept=part), submit(GOOD))
    run_turn(provider)
    kept = [[message.kept for message in request.messages[1::2]] for request in provider.requests]
    assert kept[1] == [part]
    assert kept[-1][-1] == ()


def test_decision_written_as_text_is_parsed():
    text = "Here: " + json.dumps({"tool": "submit", "arguments": {"configurations": [{"config": GOOD}]}})
    assert dict(run_turn(Scripted(Answer(text=text, stop=StopReason.DONE))).proposals[0].config) == GOOD


@pytest.mark.parametrize(
    ("kind", "is_temporary"),
    [(ErrorKind.OVERLOADED, True), (ErrorKind.AUTHENTICATION, False), (ErrorKind.BAD_REQUEST, False)],
)
def test_a_failing_provider_stalls_the_turn(kind, is_temporary):
    outcome = run_turn(Scripted(ProviderError(kind, "down")))
    assert outcome.stall is not None
    assert (outcome.stall.cause, outcome.stall.is_temporary) == ("provider", is_temporary)


def test_unreadable_answers_are_corrected_like_others():
    provider = Scripted(
        ProviderError(ErrorKind.TOO_LARGE, "10 MB"), ProviderError(ErrorKind.MALFORMED, "html"), submit(GOOD)
    )
    assert run_turn(provider).proposals


def test_implausible_choice_needs_an_overrule():
    table = plain_table()
    table.fits_N[20] = 0.001
    assert [item.is_overrule for item in run_turn(Scripted(submit(GOOD)), table=table).event.submitted] == [True]
    search = Search(observations=[run_trial(1, Config(TRIED))])
    agent = Agent(Scripted(submit(GOOD)), make_table=lambda view: table, clock=FakeClock())
    outcome = agent.run_turn(search.view, 1, max_submitted=1, overrules_left=0)
    assert outcome.stall is not None
    assert outcome.stall.cause == "implausible"


def test_without_overrules_the_choice_is_among_the_most_promising():
    search = Search(observations=[run_trial(1, Config(TRIED))])
    good = search.view.space.row(Config(GOOD))
    assert good is not None
    others = [row for row in plain_table().order if row != good]
    for place, is_taken in ((0, True), (4, True), (5, False)):
        order = (*others[:place], good, *others[place:])
        table = replace(plain_table(), order=order)
        agent = Agent(Scripted(submit(GOOD)), make_table=lambda view, table=table: table, clock=FakeClock())  # type: ignore[misc]
        outcome = agent.run_turn(search.view, 1, max_submitted=1, overrules_left=0)
        assert [proposal.config for proposal in outcome.proposals] == ([Config(GOOD)] if is_taken else [])
        assert (outcome.stall.cause if outcome.stall else "") == ("" if is_taken else "implausible")


def test_what_a_turn_submits_beyond_its_limit_is_named():
    search = Search(observations=[run_trial(1, Config(TRIED))])
    more = [dict(search.view.space.config(row)) for row in (21, 22)]
    agent = Agent(Scripted(submit(GOOD, *more)), make_table=lambda view: plain_table(), clock=FakeClock())
    outcome = agent.run_turn(search.view, 1, max_submitted=1, overrules_left=1)
    assert [proposal.config for proposal in outcome.proposals] == [Config(GOOD)]
    [why] = outcome.event.refused
    assert why == f"not considered: 2 of 3 configurations, from {more[0]} on: this turn may submit 1"
    assert why in outcome.event.text


def test_finish_is_granted_when_nothing_is_left():
    done = replace(plain_table(), nothing_left=True)
    outcome = run_turn(Scripted(call("finish", {"reason": "all neighbours are slower"})), table=done)
    assert outcome.finish == "all neighbours are slower"


def test_several_configurations_fill_several_slots():
    other = dict(SPACE.config(3))
    outcome = run_turn(Scripted(submit(GOOD, TRIED, other, GOOD)), slots=4)
    assert [dict(proposal.config) for proposal in outcome.proposals] == [GOOD, other]


def test_policy_program_decides_and_a_bad_one_gets_the_reason():
    def policy(body: str) -> Answer:
        program = f"def generate_config(workload, environment):\n    {body}\n"
        return call("submit_policy", {"program": program, "rationale": "r", "expected_step_time_s": 1.0})

    provider = Scripted(policy("yield 1"), policy(f"return {TRIED}"), policy(f"return {GOOD}"))
    outcome = run_turn(provider, mode="policy")
    assert dict(outcome.proposals[0].config) == GOOD
    assert outcome.proposals[0].proposer == "policy"
    replies = [result.text for message in provider.requests[-1].messages for result in message.results]
    assert "yield" in replies[0]
    assert "duplicate" in replies[1]
    assert "def generate_config" in provider.requests[0].messages[0].text


def test_a_trial_that_is_doubted_may_be_submitted_once_more():
    outcome = run_turn(Scripted(submit(TRIED, doubts=[1])), can_repeat=True)
    (proposal,) = outcome.proposals
    assert (dict(proposal.config), proposal.is_repeat, outcome.event.doubts) == (TRIED, True, (1,))
    assert not outcome.event.submitted[0].is_overrule


@pytest.mark.parametrize(("doubts", "can_repeat"), [([], True), ([2], True), ([1], False), (["1"], True)])
def test_other_trials_are_not_repeated(doubts, can_repeat):
    outcome = run_turn(Scripted(submit(TRIED, doubts=doubts), submit(GOOD)), can_repeat=can_repeat)
    assert [dict(proposal.config) for proposal in outcome.proposals] == [GOOD]


def test_what_was_refused_beside_an_accepted_configuration_is_recorded_and_shown():
    outcome = run_turn(Scripted(submit(GOOD, TRIED)), slots=2)
    (why,) = outcome.event.refused
    assert why.startswith("a duplicate: trial 1")
    assert "refused: a duplicate: trial 1" in outcome.event.text
