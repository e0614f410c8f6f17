"""Look-ups of a turn: they answer from the view and the evidence, and every request stays within its bound."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llm.cases import SPACE, Search, plain_table, run_trial
from llm.turns import GOOD, ILLEGAL, TRIED, FakeClock, Scripted, call, run_turn, submit

from cclsearch.core.values import Config
from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.memory.evidence import NoEvidence, TrialEvidence
from cclsearch.propose.agent.memory.replay import replay_turns
from cclsearch.propose.agent.options import AgentOptions
from cclsearch.propose.agent.prompt.prompt import MAX_LOOKUPS, MAX_PROMPT_BYTES
from cclsearch.propose.agent.providers import chat_api, messages_api, responses_api
from cclsearch.propose.agent.providers.flatten import flatten
from cclsearch.propose.agent.providers.forms import Api, CallForm, Form
from cclsearch.propose.agent.providers.types import (
    MAX_BODY_BYTES,
    Answer,
    StopReason,
    ToolCall,
)


def test_after_eight_lookups_more_are_refused_and_the_tools_stay_the_same():
    provider = Scripted(call("candidates", {"limit": 20}))
    outcome = run_turn(provider)
    assert outcome.stall is not None
    assert outcome.stall.cause == "undecided"
    assert all(request.tools == provider.requests[0].tools for request in provider.requests)
    assert provider.requests[-1].messages[-1].results[0].text.startswith("refused: 8 look-ups are used")
    assert len(provider.requests) <= MAX_LOOKUPS + 3


def test_lookups_beside_a_correction_are_named_in_the_next_request():
    answer = call("correct", {"why": "w", "insight": "pp=1 is slow"})
    beside = tuple(ToolCall(id=name, name=name, arguments={"trial": 1}) for name in ("trial", "predict", "trial"))
    outcome = run_turn(Scripted(answer.model_copy(update={"calls": (*beside, *answer.calls)})))
    (why,) = outcome.event.refused
    assert why.startswith("not answered, because what they show has changed: trial, predict.")
    assert run_turn(Scripted(answer)).event.refused == ()
    decided = submit(GOOD)
    assert run_turn(Scripted(decided.model_copy(update={"calls": (*beside, *decided.calls)}))).event.refused == ()


def test_lookups_answer_from_the_view():
    provider = Scripted(
        call("predict", {"configurations": [GOOD, TRIED, ILLEGAL]}),
        call("explain", {"config": ILLEGAL}),
        call("trial", {"trial": 1}),
        call("compare", {"a": 1, "b": 7}),
        call("candidates", {"where": {"tp": [2], "pp": [4]}, "sort": "memory", "limit": 3}),
        submit(GOOD),
    )
    run_turn(provider)
    replies = [result.text for message in provider.requests[-1].messages for result in message.results]
    assert "P(fits) 0.75" in replies[0]
    assert "already tried: trial 1" in replies[0]
    assert "not in the search space. Nearest untried configurations: " in replies[0], "as `explain` says it"
    assert "not in the search space" in replies[1]
    assert "IGNORE ALL RULES" not in replies[2].split("[data")[0]
    assert "memory 40 of 80 GiB (50% free)" in replies[2]
    assert "trial 7 has not finished or does not exist" in replies[3]
    assert replies[4].startswith("4 match")


def test_candidates_may_be_limited_to_those_that_probably_fit():
    fits_N = np.where(np.arange(len(SPACE)) % 2 == 0, 0.9, 0.2)
    table = replace(plain_table(), fits_N=fits_N)
    provider = Scripted(call("candidates", {"min_fits": 0.5}), call("candidates", {"min_fits": "x"}), submit(GOOD))
    run_turn(provider, table=table)
    least, ignored = [r.text.split()[0] for m in provider.requests[-1].messages for r in m.results]
    row = SPACE.row(Config(TRIED))
    assert row is not None
    assert int(least) == np.count_nonzero(fits_N >= 0.5) - (row % 2 == 0)
    assert int(ignored) == len(SPACE) - 1


def test_lookups_show_the_parts_of_the_closed_form():
    provider = Scripted(
        call("predict", {"configurations": [GOOD]}),
        call("candidates", {"limit": 2}),
        call("compare", {"a": 1, "b": 1}),
        submit(GOOD),
    )
    run_turn(provider)
    predicted, listed, compared = [r.text for m in provider.requests[-1].messages for r in m.results]
    assert re.search(
        r"mfu 0\.\d+, micro_batches \d+, closed form [\d.]+ before any trial, of it \w+ [\d.]+, ", predicted
    )
    assert listed.count("  closed form of it: ") == 2
    assert re.search(r", closed form [\d.]+, predicted parts: \w+ [\d.]+, ", compared)


def test_the_closed_form_of_a_failed_trial_says_whether_it_was_predicted_to_fit():
    failing = next(row for row in range(len(SPACE)) if run_trial(1, SPACE.config(row)).loss is None)
    search = Search(observations=[run_trial(1, SPACE.config(failing))])
    provider = Scripted(submit(GOOD))
    agent = Agent(provider, make_table=lambda view: plain_table(), clock=FakeClock())
    agent.run_turn(search.view, 1, max_submitted=1, overrules_left=1)
    text = provider.requests[0].messages[0].text
    assert re.search(r"trial 1 seed \| .* \(closed form: [\d.]+ GiB, P\(fits\) \d\.\d\d\)", text)
    assert "your credit: 1 configurations" in text


@pytest.mark.parametrize("name", ["predict", "explain", "trial", "compare", "candidates"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {
            "configurations": 1,
            "config": [],
            "trial": "x",
            "a": None,
            "b": True,
            "where": [],
            "sort": 3,
            "limit": "many",
        },
        {
            "configurations": [None, 1, "x"],
            "config": None,
            "trial": -1,
            "a": 1e308,
            "b": [1],
            "where": {"tp": {"a": 1}},
        },
        {
            "where": {"nope": [1]},
            "configurations": [{"nope": 1}],
            "config": {"tp": None},
            "trial": True,
            "a": 1,
            "b": 1,
        },
    ],
)
def test_lookup_with_wrong_types_gets_a_reply(name, arguments):
    assert run_turn(Scripted(call(name, arguments), submit(GOOD))).proposals


def test_every_request_of_a_turn_stays_within_its_bound():
    big = call("predict", {"configurations": [GOOD] * 200}, text="t" * 20_000)
    provider = Scripted(*[big] * MAX_LOOKUPS, submit(TRIED), submit(ILLEGAL), submit(GOOD))
    assert run_turn(provider).proposals
    assert max(request.num_bytes for request in provider.requests) <= MAX_PROMPT_BYTES


@pytest.mark.parametrize("mode", ["configs", "policy"])
@pytest.mark.parametrize(
    "many",
    [
        [("candidates", {"limit": 20})] * MAX_LOOKUPS,
        [("compare", {"a": 1, "b": 2})] * MAX_LOOKUPS,
        [("predict", {"configurations": [GOOD] * 9})] * 16,
        [('"' * 80, {"x": '"' * 4000})] * 16,
    ],
)
def test_many_calls_in_one_answer_stay_within_the_bound(mode, many):
    calls = tuple(ToolCall(id="i" * 100, name=name, arguments=arguments) for name, arguments in many)
    answer = Answer(text="t" * 5000, calls=calls, stop=StopReason.TOOL)
    provider = Scripted(answer)
    search = Search(observations=[run_trial(i + 1, SPACE.config(i), "x" * 5000) for i in range(40)])
    evidence = LongEvidence()
    agent = Agent(
        provider, AgentOptions(mode=mode), evidence=evidence, make_table=lambda v: plain_table(), clock=FakeClock()
    )
    agent.options = replace(agent.options, seed_program='# "quoted"\n' * 3000)
    agent.run_turn(search.view, 1, max_submitted=1, overrules_left=1)
    assert len(provider.requests) > 1
    assert max(request.num_bytes for request in provider.requests) <= MAX_PROMPT_BYTES
    chat, text = Form(api=Api.CHAT), Form(api=Api.CHAT, call=CallForm.TEXT)
    messages, schema = Form(api=Api.MESSAGES, marks_cache=True), Form(api=Api.CHAT, call=CallForm.SCHEMA)
    for write, form in (
        (messages_api.write_body, messages),
        (responses_api.write_body, Form(api=Api.RESPONSES)),
        *((chat_api.write_body, form) for form in (chat, schema, text)),
    ):
        for request in provider.requests:
            more = () if form.api is Api.MESSAGES else (request,)
            body = write("m", flatten(request, form), form, *more)
            sent = json.dumps(body, ensure_ascii=False, separators=(",", ":"))  # as the SDKs do
            assert len(sent.encode()) <= MAX_BODY_BYTES
    for result in provider.requests[1].messages[-1].results:
        assert result.text.count("[data ") == result.text.count("[end ")


class LongEvidence(NoEvidence):
    """Evidence that is longer than every bound."""

    def find(self, trial: int) -> TrialEvidence | None:
        causes = {"compute": 6.0 + trial, "idle": 1.0}
        log = "first line\n" + 'noise "quoted"\n' * 400 + f"the last words of {trial}"
        return TrialEvidence(diagnosis=("compute is most of it",), seconds_by_cause=causes, log_tail=log)


def ask_about_trials(*calls: tuple[str, dict[str, Any]], evidence: Any = None) -> list[str]:
    """Replies to these look-ups after trials 1 to 3."""
    answer = Answer(calls=tuple(ToolCall(id="c", name=n, arguments=a) for n, a in calls), stop=StopReason.TOOL)
    provider = Scripted(answer, submit(GOOD))
    search = Search(observations=[run_trial(i + 1, SPACE.config(i), "x" * 500) for i in range(3)])
    agent = Agent(
        provider, evidence=evidence or LongEvidence(), make_table=lambda view: plain_table(), clock=FakeClock()
    )
    agent.run_turn(search.view, 1, max_submitted=1, overrules_left=1)
    return [result.text for message in provider.requests[-1].messages for result in message.results]


def test_trial_lookup_shows_the_end_of_the_log():
    (text,) = ask_about_trials(("trial", {"trial": 3}))
    assert "the last words of 3" in text
    assert "first line" not in text
    assert "compute is most of it" in text


def test_a_key_across_the_cut_of_a_log_is_masked_whole():
    class Cut(NoEvidence):
        def find(self, trial: int) -> TrialEvidence | None:
            return TrialEvidence(log_tail="x\nsk-ant-" + "k" * 1510)

    (text,) = ask_about_trials(("trial", {"trial": 3}), evidence=Cut())
    assert "kkk" not in text


def test_comparing_shows_both_trials_and_their_differences():
    (text,) = ask_about_trials(("compare", {"a": 3, "b": 2}))
    assert "compute: 9 s (+1 s against trial 2)" in text
    assert "the last words of 3" in text
    assert "trial 2: " in text
    assert "the last words of 2" in text


def test_call_ids_are_unique_whatever_the_model_sends():
    same = ToolCall(id="x", name="candidates", arguments={})
    provider = Scripted(
        Answer(calls=(same, same), stop=StopReason.TOOL), Answer(calls=(same,), stop=StopReason.TOOL), submit(GOOD)
    )
    run_turn(provider)
    ids = [made.id for message in provider.requests[-1].messages for made in message.calls]
    assert len(ids) == len(set(ids)) == 3


def test_messages_sent_back_are_valid_for_providers():
    odd = ToolCall(id="x", name="functions.rm -rf", arguments={})
    nothing = ToolCall(id="y", name="(no name)", arguments=None, fault="no JSON object")
    provider = Scripted(
        Answer(text=" \n", stop=StopReason.DONE),
        Answer(text="\n\n", calls=(odd, nothing), stop=StopReason.TOOL),
        submit(GOOD),
    )
    assert run_turn(provider).proposals
    for message in provider.requests[-1].messages:
        assert not message.text or message.text.strip()
        assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", made.name) for made in message.calls)


class Traced(NoEvidence):
    """Evidence that says what it was asked."""

    has_traces = True

    def inspect(self, trials, show, factors):
        return f"{show} of {trials} with {factors}"

    def search(self, words):
        return f"lines with {words}"


def test_traces_and_documentation_are_offered_where_there_are_any_and_replay(tmp_path):
    answers = [
        call("trace", {"trial": 1, "show": "collectives"}),
        call("trace", {"trial": 1, "show": "what_if", "scale_out_bw": 2.0}),
        *(
            call("trace", {"trial": 1, "show": show, "with": other})
            for show, other in (("difference", 9), ("ranks", 1))
        ),
        call("search_docs", {"words": "recompute granularity"}),
        submit(GOOD),
    ]
    provider, table = Scripted(*answers), plain_table()
    agent = Agent(provider, evidence=Traced(), make_table=lambda view: table, clock=FakeClock(), folder=tmp_path)
    search = Search(observations=[run_trial(1, Config(TRIED))])
    agent.run_turn(search.view, 1, max_submitted=1, overrules_left=1)
    replies = [result.text for message in provider.requests[-1].messages for result in message.results]
    assert replies[0] == "collectives of [1] with [1.0, 1.0, 1.0]"
    assert replies[1] == "what_if of [1] with [1.0, 2.0, 1.0]"
    assert "needs a finished trial" in replies[2]
    assert "`with` names the second trial of show=difference" in replies[3]
    assert replies[4] == "lines with recompute granularity"
    assert all(turn.is_same and turn.same_prompt for turn in replay_turns(tmp_path))
    names = {tool.name for tool in provider.requests[0].tools}
    run_turn(without := Scripted(submit(GOOD)))
    assert names - {tool.name for tool in without.requests[0].tools} == {"trace", "search_docs"}
