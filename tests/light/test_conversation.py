"""One conversation a search: what a turn sends is what the turns before it sent and got, and then its own prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llm.cases import SPACE, Search, plain_table, run_trial
from llm.turns import FakeClock, Reaction, Scripted, call, submit

from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.conversation import write_notes
from cclsearch.propose.agent.memory.replay import replay_turns
from cclsearch.propose.agent.options import AgentOptions
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    ErrorKind,
    Message,
    ProviderError,
    Role,
    ToolCall,
)


def think(answer: Answer, number: int) -> Answer:
    """The same answer with blocks of its provider: a signed thought, and the call."""
    one = answer.calls[0].model_copy(update={"id": f"id{number}"})
    blocks = (
        {"type": "thinking", "thinking": f"thought {number}", "signature": f"s{number}"},
        {"type": "tool_use", "id": one.id, "name": one.name, "input": one.arguments},
    )
    return answer.model_copy(update={"calls": (one,), "kept": blocks, "text": f"word {number}"})


def config(row: int) -> dict[str, Any]:
    return dict(SPACE.config(row))


def take_turns(agent: Agent, count: int) -> Search:
    search = Search()
    for row in range(count):
        search.observations.append(run_trial(row + 1, SPACE.config(row)))
        outcome = agent.run_turn(search.view, 1, max_submitted=1, overrules_left=1)
        search.events.append(outcome.event)
    return search


def make(*script: Reaction, folder: Path | None = None, **options: Any) -> tuple[Agent, Scripted]:
    provider = Scripted(*script)
    table = plain_table()
    agent = Agent(provider, AgentOptions(**options), folder, make_table=lambda view: table, clock=FakeClock())
    return agent, provider


SCRIPT = [
    *(think(call("trial", {"trial": 1}), 1), think(submit(config(20)), 2)),
    *(think(submit(config(21)), 3), think(submit(config(22)), 4)),
]


def test_each_request_begins_with_the_one_before_it_and_ends_with_the_results_and_the_prompt(tmp_path):
    agent, provider = make(*SCRIPT, folder=tmp_path)
    take_turns(agent, 3)
    for before, after in zip(provider.requests, provider.requests[1:], strict=False):
        assert (after.system, after.tools) == (before.system, before.tools)
        assert after.messages[: len(before.messages)] == before.messages
    second = provider.requests[2].messages
    assert [message.role for message in second] == [Role.USER, Role.ASSISTANT] * 2 + [Role.USER]
    assert second[3].kept == SCRIPT[1].kept
    assert second[4].results[0].id == "id2"
    assert second[4].results[0].text == "accepted"
    assert "2 trials seen" in second[4].text
    assert all(turn.is_same and turn.same_prompt for turn in replay_turns(tmp_path))


@pytest.mark.parametrize("tokens", [1, 12_000, 13_000])
def test_a_full_conversation_begins_anew_with_the_models_own_words(tokens, tmp_path):
    agent, provider = make(*SCRIPT, folder=tmp_path, max_context=tokens)
    take_turns(agent, 3)
    last = provider.requests[-1].messages
    assert not any(message.kept for message in last)
    assert len(last) == (3 if tokens > 12_000 else 1)
    assert ("word" in last[0].text) == (tokens > 12_000)
    assert all(turn.is_same and turn.same_prompt for turn in replay_turns(tmp_path))


def test_a_resumed_search_continues_from_notes_and_replays(tmp_path):
    take_turns(make(*SCRIPT[:2], folder=tmp_path)[0], 1)
    agent, provider = make(*SCRIPT[2:], folder=tmp_path)
    take_turns(agent, 2)
    first, answer, prompt = provider.requests[0].messages
    assert first.text.startswith("Earlier in this search you wrote, shortened:\n\nword 1 thought 1\ntrial {")
    assert "word 2 thought 2" in first.text
    assert (answer.role, "1 trials seen" in prompt.text) == (Role.ASSISTANT, True)
    assert all(turn.is_same and turn.same_prompt for turn in replay_turns(tmp_path))


def test_a_server_that_refuses_the_conversation_gets_the_turn_alone(tmp_path):
    def refuse(request: CompletionRequest) -> Reaction:
        return ProviderError(ErrorKind.BAD_REQUEST, "maximum context length is 4096 tokens")

    agent, provider = make(*SCRIPT[:2], refuse, *SCRIPT[2:], folder=tmp_path)
    search = take_turns(agent, 3)
    assert [len(request.messages) for request in provider.requests] == [1, 3, 5, 1, 1]
    assert [event.decision for event in search.events] == ["submit"] * 3
    assert all(turn.is_same for turn in replay_turns(tmp_path))


def test_a_turn_without_a_decision_leaves_no_trace_in_the_conversation():
    agent, provider = make(SCRIPT[1], *[call("nonsense")] * 3, SCRIPT[2])
    take_turns(agent, 3)
    assert "nonsense" not in str(provider.requests[-1].messages)
    assert len(provider.requests[-1].messages) == 3


def test_notes_keep_the_latest_words_within_their_bound_and_no_secret(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-value")
    calls = (ToolCall(id="c", name="submit", arguments={"x": "y" * 2000}),)
    long = [Message(role=Role.ASSISTANT, text=f"word {n} hush-hush-value " + "z" * 5000, calls=calls) for n in range(9)]
    text = write_notes(long, 4000)[0].text
    assert "word 8" in text
    assert "word 0" not in text
    assert "hush" not in text
    assert len(text.encode()) < 4200
