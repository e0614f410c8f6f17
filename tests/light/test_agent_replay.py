"""Turn records hold no secret and replay to the same decisions."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from llm.cases import Search, plain_table, run_trial
from llm.turns import GOOD, ILLEGAL, TRIED, FakeClock, Scripted, call, run_turn, submit

from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.memory.replay import replay_turns
from cclsearch.propose.agent.memory.turn_records import read_turns
from cclsearch.propose.agent.options import AgentOptions
from cclsearch.propose.agent.providers.cost import LlmLimits
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    ErrorKind,
    ProviderError,
)


def test_program_cannot_read_the_origin_of_an_anonymous_workload(tmp_path):
    fields = "workload['name'], workload['model_family'], environment['framework'], 'layers', workload['num_layers']"
    body = f"raise ValueError(str([{fields}]))"
    program = f"def generate_config(workload, environment):\n    {body}\n"
    answer = call("submit_policy", {"program": program, "rationale": "r", "expected_step_time_s": 1.0})
    for anonymous in (True, False):
        provider = Scripted(answer)
        run_turn(provider, mode="policy", anonymous=anonymous, folder=tmp_path / str(anonymous))
        sent = provider.requests[-1].model_dump_json()
        assert "'layers', 32" in sent
        assert ("secret-" in sent) is not anonymous
    replayed = replay_turns(tmp_path / "True")
    assert all(turn.is_same and turn.same_prompt for turn in replayed)


def test_turn_records_are_redacted_and_replay_to_the_same_decisions(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-value")
    scripts = [
        (submit(TRIED), call("trial", {"trial": 1}), submit(GOOD, insight="key hush-hush-value")),
        (submit(ILLEGAL),),
        (ProviderError(ErrorKind.OVERLOADED, "hush-hush-value"),),
        (call("candidates"),),
    ]
    for script in scripts:
        run_turn(Scripted(*script), folder=tmp_path)
    kept = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "hush-hush" not in kept
    assert [record.result.kind for record in read_turns(tmp_path)] == ["submit", "none", "none", "none"]
    replayed = replay_turns(tmp_path)
    assert [turn.turn for turn in replayed] == [1, 2, 3, 4]
    assert all(turn.is_same and turn.same_prompt for turn in replayed)


def test_a_repeat_of_a_doubted_trial_replays_as_it_was_decided(tmp_path):
    outcome = run_turn(Scripted(submit(TRIED, doubts=[1])), folder=tmp_path, can_repeat=True)
    assert [proposal.is_repeat for proposal in outcome.proposals] == [True]
    (replayed,) = replay_turns(tmp_path)
    assert replayed.is_same
    assert replayed.same_prompt


def test_turn_ended_by_its_cost_replays_with_other_prices(tmp_path, monkeypatch):
    outcome = run_turn(Scripted(call("candidates")), folder=tmp_path, limits=LlmLimits(max_usd=0.003))
    assert outcome.stall is not None
    now = tmp_path / "prices.yaml"
    now.write_text("as_of: '2027-01'\nprices: [{model: 'openai:*', input_usd: 0, output_usd: 0}]\n")
    monkeypatch.setenv("CCL_SEARCH_PRICES", str(now))
    assert all(turn.is_same for turn in replay_turns(tmp_path))


def test_slow_model_gets_its_time_and_replays(tmp_path):
    clock = FakeClock()

    def delay(answer: Answer) -> Callable[[CompletionRequest], Answer]:
        def answer_late(request: CompletionRequest) -> Answer:
            clock.time_s += 400.0
            return answer

        return answer_late

    search = Search(observations=[run_trial(1, Config(TRIED))])
    for seconds, decision in ((2000.0, "submit"), (600.0, "none")):
        provider = Scripted(*[delay(call("candidates"))] * 3, delay(submit(GOOD)))
        options = AgentOptions(max_turn_s=seconds)
        agent = Agent(provider, options, tmp_path, make_table=lambda view: plain_table(), clock=clock)
        outcome = agent.run_turn(search.view, 1, max_submitted=1, overrules_left=1)
        assert outcome.event.decision == decision
    assert all(turn.is_same for turn in replay_turns(tmp_path))


def test_program_with_a_secret_runs_as_it_is_recorded(tmp_path):
    program = f"api_key = 'sk-ant-{'a' * 30}'\ndef generate_config(workload, environment):\n    return {GOOD}\n"
    answer = call("submit_policy", {"program": program, "rationale": "r", "expected_step_time_s": 1.0})
    assert run_turn(Scripted(answer), mode="policy", folder=tmp_path).proposals
    assert all(turn.is_same for turn in replay_turns(tmp_path))


def test_a_replay_needs_no_surrogate(tmp_path, monkeypatch):
    table = plain_table()
    table.fits_N[20] = 0.001
    for answers in ((submit(GOOD),), (call("candidates", {"sort": "fits"}), submit(ILLEGAL), submit(GOOD))):
        run_turn(Scripted(*answers), folder=tmp_path, table=table)

    def refuse(view):
        raise AssertionError("the surrogate was fitted again")

    monkeypatch.setattr("cclsearch.propose.agent.prompt.surrogate_table.fit_posterior", refuse)
    assert all(turn.is_same and turn.same_prompt for turn in replay_turns(tmp_path))
    path = tmp_path / "turns" / "0001.json"
    path.write_text(path.read_text().replace('"value_N": "', '"value_N": "x'))
    with pytest.raises(UserError, match="the numbers of a turn record cannot be read"):
        replay_turns(tmp_path)


def test_a_tampered_turn_is_noticed(tmp_path):
    run_turn(Scripted(submit(GOOD)), folder=tmp_path)
    path = tmp_path / "turns" / "0001.json"
    record = json.loads(path.read_text())
    record["result"]["decision"] = None
    path.write_text(json.dumps(record))
    assert not replay_turns(tmp_path)[0].is_same
