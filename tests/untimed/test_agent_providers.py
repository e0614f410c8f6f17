"""Both protocols through the real SDKs, against a server that refuses what the providers refuse."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator

import pytest
from llm.server import (
    KEY,
    MODEL,
    Cut,
    Drip,
    Hang,
    ProviderServer,
    Raw,
    Say,
    Status,
    answer_from_files,
    answer_once,
    one_by_one,
    serve,
)

from cclsearch.propose.agent.providers.anthropic_api import AnthropicProvider
from cclsearch.propose.agent.providers.http import to_provider_error
from cclsearch.propose.agent.providers.openai_api import OpenAIProvider
from cclsearch.propose.agent.providers.parse import find_call_in_text
from cclsearch.propose.agent.providers.retry import RetrySettings, ask_with_retries
from cclsearch.propose.agent.providers.types import (
    CompletionRequest,
    ErrorKind,
    Message,
    Provider,
    ProviderError,
    Role,
    StopReason,
    ToolCall,
    ToolResult,
    ToolSpec,
)

TOOL = ToolSpec(name="submit", description="decide", parameters={"type": "object", "properties": {}})
ASK = CompletionRequest(system="be brief", messages=(Message(role=Role.USER, text="go"),), tools=(TOOL,))
PROTOCOLS = ("anthropic", "compatible")


class ManualClock:
    """A clock that only `sleep` advances, and that records the waits."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.waits: list[float] = []

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.time_s += seconds


@pytest.fixture
def server() -> Iterator[ProviderServer]:
    with serve(one_by_one(Say())) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def provider(request: pytest.FixtureRequest, server: ProviderServer) -> Provider:
    return connect(request.param, server)


def connect(
    protocol: str, server: ProviderServer, *, key: str = KEY, model: str = MODEL, timeout_s: float = 30.0
) -> Provider:
    if protocol == "anthropic":
        return AnthropicProvider(model, api_key=key, base_url=server.url, timeout_s=timeout_s)
    return OpenAIProvider(model, api_key=key, base_url=f"{server.url}/v1", timeout_s=timeout_s)


def retrying(provider: Provider, clock: ManualClock, **settings: float) -> Callable[[], object]:
    return lambda: ask_with_retries(
        provider,
        ASK,
        clock=clock,
        settings=RetrySettings(**settings),
        jitter=random.Random(0),  # type: ignore[arg-type]
    )


def test_tool_calls_text_stop_and_usage_come_through(provider, server):
    server.script = one_by_one(Say((("submit", {"tp": 2}), ("submit", {})), text="so", usage=(900, 40), cached=100))
    answer = provider.ask(ASK)
    assert [(call.name, call.arguments) for call in answer.calls] == [("submit", {"tp": 2}), ("submit", {})]
    assert (answer.text, answer.stop) == ("so", StopReason.TOOL)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens) == (900, 40, 100)
    assert server.requests[0].system == "be brief"
    assert server.requests[0].tools[0].name == "submit"


def test_a_conversation_with_tool_results_is_accepted(provider, server):
    calls = (ToolCall(id="a", name="submit", arguments={}), ToolCall(id="b", name="submit", arguments=None))
    results = (ToolResult(id="a", text="1"), ToolResult(id="b", text="bad", is_error=True))
    talk = (
        *ASK.messages,
        Message(role=Role.ASSISTANT, calls=calls),
        Message(role=Role.USER, text="now", results=results),
    )
    provider.ask(ASK.model_copy(update={"messages": talk}))
    assert server.refused == []
    assert [result.text for result in server.requests[0].messages[-1].results] == ["1", "bad"]


@pytest.mark.parametrize(
    ("word", "stop"), [("truncated", StopReason.TRUNCATED), ("refused", StopReason.REFUSED), ("", StopReason.DONE)]
)
def test_stop_reasons_are_distinguished(provider, server, word, stop):
    server.script = one_by_one(Say(text="x", stop=word))
    assert provider.ask(ASK).stop is stop


def test_a_content_filter_is_not_a_refusal(server):
    server.script = one_by_one(Say(text="x", stop="filtered"))
    assert connect("compatible", server).ask(ASK).stop is StopReason.FILTERED


def test_constant_parts_are_marked_for_the_prompt_cache(server):
    more = (Message(role=Role.ASSISTANT, text="hm"), Message(role=Role.USER, text="well?"))
    connect("anthropic", server).ask(ASK.model_copy(update={"messages": (*ASK.messages, *more)}))
    body = server.bodies[0]
    assert body["system"][-1]["cache_control"] == {"type": "ephemeral"}
    assert ["cache_control" in message["content"][-1] for message in body["messages"]] == [True, False, False]


@pytest.mark.parametrize(
    ("reaction", "kind"),
    [
        (Status(429, {"retry-after": "7"}), ErrorKind.RATE_LIMIT),
        (Status(529), ErrorKind.OVERLOADED),
        (Status(500), ErrorKind.SERVER),
        (Status(400), ErrorKind.BAD_REQUEST),
        (Status(403), ErrorKind.AUTHENTICATION),
        (Cut(), ErrorKind.CONNECTION),
        (Raw(b"<html>"), ErrorKind.MALFORMED),
        (Raw(b"[1]"), ErrorKind.MALFORMED),
        (Raw(b'"' + b"x" * 10_000_000 + b'"'), ErrorKind.TOO_LARGE),
        (Raw(b"{}", {"content-encoding": "gzip"}), ErrorKind.MALFORMED),
        (Raw(b"{}", {"content-encoding": "br"}), ErrorKind.MALFORMED),
        (Raw(gzip.compress(b" " * 10_000_000), {"content-encoding": "gzip"}), ErrorKind.TOO_LARGE),
        (Raw(b""), ErrorKind.MALFORMED),
        (Raw(b'{"error": {"message": "upstream is busy", "code": 429}}'), ErrorKind.RATE_LIMIT),
        (Raw(b'{"error": {"message": "no", "type": "insufficient_quota"}}', code=429), ErrorKind.AUTHENTICATION),
        (Status(402), ErrorKind.AUTHENTICATION),
        (Status(408), ErrorKind.TIMEOUT),
        (Status(409), ErrorKind.TIMEOUT),
        (Status(413), ErrorKind.BAD_REQUEST),
        (Status(422), ErrorKind.BAD_REQUEST),
        (Status(302, {"location": "http://127.0.0.1:1/v1/messages"}), ErrorKind.BAD_REQUEST),
    ],
)
def test_every_failure_has_its_kind(provider, server, reaction, kind):
    server.script = one_by_one(reaction)
    with pytest.raises(ProviderError) as caught:
        provider.ask(ASK)
    assert caught.value.kind is kind
    assert KEY not in caught.value.message
    assert server.url not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": "no tools, said LM Studio"}', "no tools, said LM Studio"),
        (b'{"object": "error", "message": "said vLLM"}', "said vLLM"),
        (b'{"detail": [{"loc": ["body"], "msg": "said FastAPI"}]}', "said FastAPI"),
        (b"<html>said a gateway</html>", "said a gateway"),
    ],
)
def test_error_contains_the_message_of_the_server(provider, server, body, words):
    server.script = one_by_one(Raw(body, code=418))
    with pytest.raises(ProviderError, match=f"HTTP 418: .*{words}"):
        provider.ask(ASK)


def test_wrong_address_is_distinguished_from_an_unknown_model(provider, server):
    server.script = one_by_one(Raw(b'{"detail": "Not Found"}', code=404), Status(404, message="model m not found"))
    with pytest.raises(ProviderError, match="is the address right"):
        provider.ask(ASK)
    with pytest.raises(ProviderError) as caught:
        provider.ask(ASK)
    assert "address" not in caught.value.message


def test_request_is_retried_after_a_gateway_error(server):
    choice = {"message": {"content": ""}, "finish_reason": "error", "error": {"code": 502, "message": "gone"}}
    server.script = one_by_one(Raw(json.dumps({"choices": [choice]}).encode()), Say(text="back"))
    clock = ManualClock()
    retrying(connect("compatible", server), clock)()
    assert len(clock.waits) == 1


def test_a_failed_connection_says_why():
    provider = OpenAIProvider(MODEL, api_key=KEY, base_url="http://127.0.0.1:1/v1")
    with pytest.raises(ProviderError, match=r"cut: .+") as caught:
        provider.ask(ASK)
    assert caught.value.kind is ErrorKind.CONNECTION


class APIConnectionError(Exception):
    """Has the name of both SDKs' error."""


@pytest.mark.parametrize("kind", [APIConnectionError, ValueError])
def test_a_chain_of_errors_shows_no_key_of_headers_addresses_and_proxies(kind, monkeypatch):
    word = "Zq3vT8mK1xW5bN7cR2dL9f"
    monkeypatch.setenv("HTTPS_PROXY", "http://me:p@ss-w0rd@proxy:3128")
    texts = [f"{{'authorization': 'Bearer {word}', 'x-api-key': '{word}'}}", f"https://h/v1?key={word} refused"]
    texts += ["407 from http://me:p@ss-w0rd@proxy:3128", "user me, password p@ss-w0rd"]
    for text in texts:
        error = kind(f"failed: {text}")
        error.__cause__ = OSError(f"cannot reach it: {text}")
        message = to_provider_error(error).message
        assert "[secret]" in message
        assert word not in message
        assert "w0rd" not in message


def test_a_compressed_answer_is_read(provider, server):
    body = b'{"content": [{"type": "text", "text": "yes"}], "choices": [{"message": {"content": "yes"}}]}'
    server.script = one_by_one(Raw(gzip.compress(body), {"content-encoding": "gzip"}))
    assert provider.ask(ASK).text == "yes"


@pytest.mark.parametrize("reaction", [Hang(1.5), Drip(3.0)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_silence_is_a_timeout(server, protocol, reaction):
    server.script = one_by_one(reaction)
    with pytest.raises(ProviderError) as caught:
        connect(protocol, server, timeout_s=0.4).ask(ASK)
    assert caught.value.kind is ErrorKind.TIMEOUT


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_wrong_key_and_unknown_model_are_not_retried(server, protocol):
    for wrong, kind in (
        ({"key": "sk-wrong"}, ErrorKind.AUTHENTICATION),
        ({"model": "no-such"}, ErrorKind.UNKNOWN_MODEL),
    ):
        clock = ManualClock()
        with pytest.raises(ProviderError) as caught:
            retrying(connect(protocol, server, **wrong), clock)()  # type: ignore[arg-type]
        assert caught.value.kind is kind
        assert clock.waits == []


def test_waits_honor_retry_after_and_grow_with_jitter(provider, server):
    clock = ManualClock()
    server.script = one_by_one(Status(500), Status(429, {"retry-after": "30"}), Status(529), Say(text="at last"))
    retrying(provider, clock)()
    assert len(clock.waits) == 3
    assert 0.5 <= clock.waits[0] <= 1.0
    assert clock.waits[1] >= 30
    assert 2.0 <= clock.waits[2] <= 4.0


def test_waiting_ends_within_the_total_limit(provider, server):
    clock = ManualClock()
    server.script = one_by_one(Status(429, {"retry-after": "3600"}))
    with pytest.raises(ProviderError):
        retrying(provider, clock, total_s=180)()
    assert clock.waits == []
    server.script = one_by_one(Status(503))
    with pytest.raises(ProviderError):
        retrying(provider, clock, total_s=20, max_tries=50)()
    assert sum(clock.waits) <= 20


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"content": 3, "choices": {"0": 1}, "usage": "many"}',
        b'{"content": [1, {"type": "tool_use"}], "choices": [{"message": {"tool_calls": [7, {"function": 1}]}}]}',
        b'{"content": [{"type": "text", "text": "\\ud800"}], "choices": [{"message": {"content": "\\ud800"}}]}',
        b'{"usage": {"input_tokens": -5, "output_tokens": 1e999, "prompt_tokens": true, "completion_tokens": "7"}}',
        b'{"choices": [' + b"[" * 30 + b"]" * 30 + b"]}",
    ],
)
def test_wrong_shapes_give_an_answer_that_can_be_recorded(provider, server, body):
    server.script = one_by_one(Raw(body))
    answer = provider.ask(ASK)
    assert answer.model_dump_json()
    assert answer.usage.is_estimated


def test_malformed_arguments_are_a_fault_of_the_call(server):
    server.script = one_by_one(
        Say((("submit", '{"tp": '), ("submit", "[1]"), ("submit", '{"a": "' + "x" * 50_000 + '"}')))
    )
    calls = connect("compatible", server).ask(ASK).calls
    assert [call.arguments for call in calls] == [None, None, None]
    assert all(call.fault for call in calls)


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [{"id": "", "function": {"name": "submit", "arguments": '{"tp": 2}'}}]},
        {"content": "", "tool_calls": [{"id": None, "function": {"name": "submit", "arguments": {"tp": 2}}}]},
        {"content": None, "tool_calls": [{"function": {"name": "submit", "arguments": '"{\\"tp\\": 2}"'}}]},
        {"tool_calls": [], "function_call": {"name": "submit", "arguments": '{"tp": 2}'}, "reasoning_content": "hm"},
    ],
)
def test_calls_are_read_as_compatible_servers_write_them(server, message):
    for finish in ("tool_calls", "stop", "eos_token", None):
        server.script = one_by_one(
            Raw(json.dumps({"choices": [{"message": message, "finish_reason": finish}]}).encode())
        )
        (call,) = connect("compatible", server).ask(ASK).calls
        assert (call.name, call.arguments) == ("submit", {"tp": 2})
        assert call.id


@pytest.mark.parametrize(
    "text",
    [
        '<think>{"tp"} or {"tp": 1}?</think><tool_call>{"name": "submit", "arguments": {"tp": 2}}</tool_call>',
        'So:\n```json\n{"tool": "submit", "arguments": "{\\"tp\\": 2}"}\n```',
        '[{"type": "function", "function": {"name": "submit", "parameters": {"tp": 2}}}]',
    ],
)
def test_call_is_found_in_reasoning_text(text):
    call = find_call_in_text(text, {"submit"})
    assert call is not None
    assert call.arguments == {"tp": 2}


def test_request_changes_to_the_form_that_the_server_accepts(server):
    server.script = one_by_one(
        Status(400, message="'max_tokens' is not supported with this model: use 'max_completion_tokens'"),
        Raw(b'{"error": "this model does not support tools"}', code=400),
        Status(422, message="response_format of type json_schema is unavailable"),
        Say((("submit", {"tp": 1}),)),
    )
    provider = connect("compatible", server)
    assert provider.ask(ASK).calls
    assert len(server.bodies) == 4
    last = server.bodies[-1]
    assert "max_completion_tokens" in last
    assert not {"max_tokens", "tools", "response_format"} & set(last)
    assert '{"tool": NAME' in last["messages"][0]["content"]
    server.script = one_by_one(Status(400, message="no tools, no schema, no format"))
    with pytest.raises(ProviderError):
        provider.ask(ASK)
    assert len(server.bodies) == 5


def test_a_server_without_tools_is_asked_for_json(server):
    server.script = one_by_one(Status(400, message="this model does not support tools"), Say((("submit", {"tp": 1}),)))
    provider = connect("compatible", server)
    assert '"tool": "submit"' in provider.ask(ASK).text
    assert server.bodies[-1]["response_format"]["type"] == "json_schema"
    provider.ask(ASK)
    assert "tools" not in server.bodies[-1]


def test_repeated_request_gets_its_answer_from_the_file(server, tmp_path):
    server.script = answer_once(answer_from_files(tmp_path, poll_s=0.02, wait_s=60))
    impatient = connect("compatible", server, timeout_s=0.3)
    with pytest.raises(ProviderError) as caught:
        impatient.ask(ASK)
    assert caught.value.kind is ErrorKind.TIMEOUT
    part = tmp_path / "part"
    part.write_text('{"calls": [{"name": "submit", "arguments": {"tp": 4}}]}')
    part.rename(tmp_path / "0001.answer.json")
    (call,) = connect("compatible", server).ask(ASK).calls
    assert call.arguments == {"tp": 4}
    assert [path.name for path in tmp_path.glob("*.request.json")] == ["0001.request.json"]


def test_streaming_is_refused(server):
    import openai

    client = openai.OpenAI(api_key=KEY, base_url=f"{server.url}/v1", max_retries=0)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True)
