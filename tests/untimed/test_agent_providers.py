"""Both protocols through the real SDKs, against a server that refuses what the providers refuse."""

from __future__ import annotations

import contextlib
import gzip
import json
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
    Reaction,
    Say,
    Status,
    answer_from_files,
    answer_once,
    anthropic_answer,
    connect,
    one_by_one,
    serve,
)
from llm.streams import stream_anthropic

from cclsearch.propose.agent.providers.forms import Api, CallForm, Form, Thinking
from cclsearch.propose.agent.providers.http import to_provider_error
from cclsearch.propose.agent.providers.kind import PROVIDERS
from cclsearch.propose.agent.providers.parse import find_call_in_text, settle_calls
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

NEEDS_TP = ToolSpec(
    name="submit",
    description="decide",
    parameters={"type": "object", "properties": {"tp": {"type": "integer"}}, "required": ["tp"]},
)
TOOL = ToolSpec(name="submit", description="decide", parameters={"type": "object", "properties": {}})
ASK = CompletionRequest(system="be brief", messages=(Message(role=Role.USER, text="go"),), tools=(TOOL,))
PROTOCOLS = ("anthropic", "compatible", "responses")


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


def retrying(provider: Provider, clock: ManualClock, **settings: float) -> Callable[[], object]:
    return lambda: ask_with_retries(
        provider,
        ASK,
        clock=clock,
        settings=RetrySettings(**settings),
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
    one, bad = server.requests[0].messages[-1].results
    assert (one.text, bad.text.splitlines()[0]) == ("1", "bad")
    assert "now" in server.requests[0].messages[-1].model_dump_json()


def test_thinking_comes_back_unchanged_with_the_results_of_its_calls(provider, server):
    server.script = one_by_one(Say((("submit", {"tp": 2}),), text="so", thinking="two is enough"))
    answer = provider.ask(ASK)
    assert answer.kept
    result = Message(role=Role.USER, results=(ToolResult(id=answer.calls[0].id, text="1"),))
    asked = Message(role=Role.ASSISTANT, text=answer.text, calls=answer.calls, kept=answer.kept)
    provider.ask(ASK.model_copy(update={"messages": (*ASK.messages, asked, result)}))
    assert server.refused == []
    assert "two is enough" in json.dumps(server.bodies[-1])
    assert provider.take_notes() == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stream_and_a_whole_answer_say_the_same(server, protocol, is_streamed):
    calls = (("submit", {"tp": 2, "why": "a \u00fc \u2713"}), ("submit", {"tp": 4}))
    server.script = one_by_one(Say(calls, text="two", thinking="hm", cached=7))
    client = connect(protocol, server)
    client.form = client.form.model_copy(update={"streams": is_streamed})
    answer = client.ask(ASK)
    assert [call.arguments for call in answer.calls] == [arguments for _, arguments in calls]
    assert (answer.text, answer.stop, answer.usage.total) == ("two", StopReason.TOOL, 1107)
    assert "hm" in json.dumps(answer.kept)


def test_a_stream_that_ends_in_the_middle_is_a_cut_connection(server):
    whole = stream_anthropic(anthropic_answer(Say((("submit", {"tp": 2}),))))
    server.script = one_by_one(Raw(whole[: whole.index(b"event: message_stop")], {"content-type": "text/event-stream"}))
    with pytest.raises(ProviderError) as caught:
        connect("anthropic", server).ask(ASK)
    assert caught.value.kind is ErrorKind.CONNECTION


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [{"delta": {"tool_calls": true}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"index": [1], "function": {"name": "submit"}}]}}]}',
        b'{"choices": [{"delta": 7, "finish_reason": ["x"]}], "usage": 3}',
    ],
)
def test_a_stream_of_another_shape_is_an_error_or_decides_nothing(server, body):
    server.script = one_by_one(Raw(b"data: " + body + b"\n\ndata: [DONE]\n\n", {"content-type": "text/event-stream"}))
    with contextlib.suppress(ProviderError):  # any other exception fails the test
        assert all(not call.arguments for call in connect("compatible", server).ask(ASK).calls)


@pytest.mark.parametrize("ends", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n"])
def test_streams_are_read_with_any_line_end_and_deltas_without_an_index(server, ends):
    parts = [
        {"id": "a", "function": {"name": "submit", "arguments": ""}},
        {"function": {"arguments": '{"why": "\u2028"'}},
        {"function": {"arguments": ', "tp": 2}'}},
    ]
    chunks = [{"choices": [{"delta": {"tool_calls": [part]}}]} for part in parts]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    written = [b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + ends for chunk in chunks]
    body = b"".join([b": keep-alive" + ends, *written, b"data: [DONE]" + ends])
    server.script = one_by_one(Raw(body, {"content-type": "text/event-stream"}))
    (call,) = connect("compatible", server).ask(ASK).calls
    assert (call.name, call.arguments) == ("submit", {"why": "\u2028", "tp": 2})


def test_a_long_thought_before_a_call_in_text_does_not_hide_it(server):
    text = f"<think>{'hm ' * 20_000}</think>" + json.dumps({"tool": "submit", "arguments": {"tp": 2}})
    server.script = one_by_one(Say(text=text))
    assert find_call_in_text(connect("compatible", server).ask(ASK).text, (NEEDS_TP,)) is not None


def test_a_rate_limit_that_asks_for_no_wait_ends_too(provider, server):
    clock = ManualClock()
    server.script = one_by_one(Status(429, {"retry-after": "0"}))
    with pytest.raises(ProviderError):
        retrying(provider, clock, total_s=10)()
    assert len(clock.waits) <= 10


def test_an_error_in_a_stream_is_the_error_of_its_kind(server):
    body = b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}\n\n'
    server.script = one_by_one(Raw(body, {"content-type": "text/event-stream"}))
    with pytest.raises(ProviderError) as caught:
        connect("anthropic", server).ask(ASK)
    assert caught.value.kind is ErrorKind.OVERLOADED


def test_an_interrupted_answer_is_marked_and_can_be_sent_back(server):
    body = anthropic_answer(Say(text="let me"))
    server.script = one_by_one(Raw(json.dumps({**body, "stop_reason": "pause_turn"}).encode()), Say(text="done"))
    client = connect("anthropic", server)
    answer = client.ask(ASK)
    assert answer.stop is StopReason.PAUSED
    more = Message(role=Role.ASSISTANT, kept=answer.kept)
    assert client.ask(ASK.model_copy(update={"messages": (*ASK.messages, more)})).text == "done"


@pytest.mark.parametrize(
    ("word", "stop"), [("truncated", StopReason.TRUNCATED), ("refused", StopReason.REFUSED), ("", StopReason.DONE)]
)
def test_stop_reasons_are_distinguished(provider, server, word, stop):
    server.script = one_by_one(Say(text="x", stop=word))
    assert provider.ask(ASK).stop is stop


def test_a_content_filter_is_not_a_refusal(server):
    server.script = one_by_one(Say(text="x", stop="filtered"))
    assert connect("compatible", server).ask(ASK).stop is StopReason.FILTERED


def test_tools_and_system_are_marked_for_the_prompt_cache_and_nothing_that_changes(server):
    connect("anthropic", server).ask(ASK)
    body = server.bodies[0]
    assert body["system"][-1]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert "cache_control" not in str(body["messages"])


@pytest.mark.parametrize(
    ("reaction", "kind"),
    [
        (Status(429, {"retry-after": "7"}), ErrorKind.RATE_LIMIT),
        (Status(529), ErrorKind.OVERLOADED),
        (Status(500), ErrorKind.SERVER),
        (Status(400), ErrorKind.BAD_REQUEST),
        (Status(403), ErrorKind.AUTHENTICATION),
        (Cut(), ErrorKind.CONNECTION),
        (Raw(b"<html>"), ErrorKind.NOT_AN_API),
        (Raw(b"[1]"), ErrorKind.MALFORMED),
        (Raw(b'"' + b"x" * 10_000_000 + b'"'), ErrorKind.TOO_LARGE),
        (Raw(b"{}", {"content-encoding": "gzip"}), ErrorKind.MALFORMED),
        (Raw(b"{}", {"content-encoding": "br"}), ErrorKind.MALFORMED),
        (Raw(gzip.compress(b" " * 10_000_000), {"content-encoding": "gzip"}), ErrorKind.TOO_LARGE),
        (Raw(b""), ErrorKind.MALFORMED),
        (Raw(b'{"error": {"message": "upstream is busy", "code": 429}}'), ErrorKind.RATE_LIMIT),
        (Raw(b'{"error": {"message": "no", "type": "insufficient_quota"}}', code=429), ErrorKind.EMPTY_ACCOUNT),
        (Status(402), ErrorKind.EMPTY_ACCOUNT),
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
        (b"<html><title>said a gateway</title></html>", "said a gateway"),
    ],
)
def test_error_contains_the_message_of_the_server(provider, server, body, words):
    server.script = one_by_one(Raw(body, code=418))
    with pytest.raises(ProviderError, match=f"HTTP 418: .*{words}"):
        provider.ask(ASK)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_wrong_address_is_distinguished_from_an_unknown_model(server, protocol):
    for body, kind in (
        (b'{"detail": "Not Found"}', ErrorKind.NOT_AN_API),
        (b'"model m not found"', ErrorKind.UNKNOWN_MODEL),
    ):
        server.script = one_by_one(Raw(body, code=404))
        with pytest.raises(ProviderError) as caught:
            connect(protocol, server).ask(ASK)
        assert caught.value.kind is kind


def test_request_is_retried_after_a_gateway_error(server):
    choice = {"message": {"content": ""}, "finish_reason": "error", "error": {"code": 502, "message": "gone"}}
    server.script = one_by_one(Raw(json.dumps({"choices": [choice]}).encode()), Say(text="back"))
    clock = ManualClock()
    retrying(connect("compatible", server), clock)()
    assert len(clock.waits) == 1


def test_a_failed_connection_says_why():
    make = PROVIDERS.get("compatible")().make_provider
    provider = make(MODEL, api_key=KEY, base_url="http://127.0.0.1:1/v1", timeout_s=30.0)
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
    body = b'{"content": [{"type": "text", "text": "yes"}], "choices": [{"message": {"content": "yes"}}],'
    body += b'"output": [{"type": "message", "content": [{"type": "output_text", "text": "yes"}]}]}'
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


def test_a_rate_limit_waits_as_long_as_it_says_and_another_failure_is_tried_once_more(provider, server):
    clock = ManualClock()
    server.script = one_by_one(Status(429, {"retry-after": "30"}), Status(500), Say(text="at last"))
    retrying(provider, clock)()
    assert clock.waits == [30.0, 1.0]


@pytest.mark.parametrize(
    "reaction", [Status(429, {"retry-after": "61"}), Status(429), Status(408), Status(401), Raw(b"<html>")]
)
def test_other_waits_are_for_the_search_to_decide(provider, server, reaction):
    clock = ManualClock()
    server.script = one_by_one(reaction)
    with pytest.raises(ProviderError):
        retrying(provider, clock)()
    assert clock.waits == []


def test_waiting_for_rate_limits_ends_within_its_limit(provider, server):
    clock = ManualClock()
    server.script = one_by_one(Status(429, {"retry-after": "50"}))
    with pytest.raises(ProviderError):
        retrying(provider, clock, total_s=180)()
    assert sum(clock.waits) <= 180


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
        '{"function_call": {"name": "functions.submit", "args": {"tp": 2}}}',
        "<function=submit>\n<parameter=tp>\n2\n</parameter>\n</function>",
        '<function=submit>{"tp": 2}</function>',
        "<tool_call>submit\n<arg_key>tp</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        '<invoke name="submit"><parameter name="tp">2</parameter></invoke>',
        '[TOOL_CALLS]submit{"tp": 2}',
        '<|channel|>commentary to=functions.submit <|constrain|>json<|message|>{"tp": 2}<|call|>',
        'submit({"tp": 2})',
    ],
)
def test_a_call_is_found_in_the_text_of_every_chat_template(text):
    call = find_call_in_text(text, (NEEDS_TP,))
    assert call is not None
    assert (call.name, call.arguments) == ("submit", {"tp": 2})


@pytest.mark.parametrize(
    "text", ["I would submit tp 2.", 'As in submit: {"pp": 2}', "<function=other>{}</function>", ""]
)
def test_prose_about_a_tool_is_no_call(text):
    assert find_call_in_text(text, (NEEDS_TP,)) is None


@pytest.mark.parametrize(
    "name", ["submit", "functions.submit", "submit:0", "default_api:submit", "mcp__us__submit", "Submit"]
)
def test_a_decorated_name_is_the_tool_s(name):
    nested = {"configurations": '[{"config": "{\\"tp\\": 2}"}]', "note": '{"kept": "as text"}'}
    item = {"type": "object", "properties": {"config": {"type": "object"}}}
    schema = {"configurations": {"type": "array", "items": item}, "note": {"type": "string"}}
    tool = ToolSpec(name="submit", description="", parameters={"type": "object", "properties": schema})
    (call,) = settle_calls((ToolCall(id="a", name=name, arguments=nested),), (tool,))
    assert call.name == "submit"
    assert call.arguments == {"configurations": [{"config": {"tp": 2}}], "note": '{"kept": "as text"}'}


def test_request_changes_to_the_form_that_the_server_accepts(server):
    server.script = one_by_one(
        Status(400, message="'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."),
        Raw(b'{"error": "this model does not support tools"}', code=400),
        Status(422, message="response_format of type json_schema is unavailable"),
        Say((("submit", {"tp": 1}),)),
    )
    provider = connect("compatible", server)
    assert "submit" in str(provider.ask(ASK))
    assert len(server.bodies) == len(provider.take_notes()) + 1 == 4
    last = server.bodies[-1]
    assert "max_completion_tokens" in last
    assert not {"max_tokens", "tools", "response_format"} & set(last)
    assert '{"tool": NAME' in last["messages"][0]["content"]
    assert provider.ask(ASK)
    assert len(server.bodies) == 5, "the form is kept"
    server.script = one_by_one(Status(400, message="no tools, no schema, no format"))
    with pytest.raises(ProviderError):
        provider.ask(ASK)


def test_a_server_without_tools_is_asked_for_json(server):
    server.script = one_by_one(Status(400, message="this model does not support tools"), Say((("submit", {"tp": 1}),)))
    provider = connect("compatible", server)
    assert '"tool": "submit"' in provider.ask(ASK).text
    assert server.bodies[-1]["response_format"]["type"] == "json_schema"
    provider.ask(ASK)
    assert "tools" not in server.bodies[-1]


def test_a_model_that_refuses_tools_in_chat_completions_is_asked_by_the_responses_api(server):
    def answer(request: CompletionRequest) -> Say | Status:
        text = (
            "Function tools with reasoning_effort are not supported for gpt-5.6-sol. Please use /v1/responses instead."
        )
        is_chat = "messages" in server.bodies[-1]
        return Status(400, message=text) if is_chat else Say((("submit", {"tp": 1}),))

    server.script = answer
    provider = connect("compatible", server)
    assert provider.ask(ASK).calls
    assert "instructions" in server.bodies[-1]


ADAPTIVE = Form(api=Api.MESSAGES, call=CallForm.AUTO, thinking=Thinking.ADAPTIVE, effort="max", marks_cache=True)
RESPONSES = Form(api=Api.RESPONSES, effort="max", streams=True)
DOCUMENTED: dict[str, tuple[Form, dict[str, Callable[[dict], bool]]]] = {
    "claude-opus-5-5": (
        ADAPTIVE,
        {
            'tool_choice: type "tool" and "any" are not supported for this model.': lambda b: is_forced(b),
            '"thinking.type.enabled" is not supported for this model.': lambda b: thinks(b, "enabled"),
            "messages: thinking blocks are bound": lambda b: "cache_control" in str(b["messages"]),
        },
    ),
    "claude-sonnet-4-6": (
        ADAPTIVE.model_copy(update={"effort": "xhigh"}),
        {
            "This model does not support effort level 'xhigh'. Supported levels: high, low, max, medium.": lambda b: (
                b.get("output_config") == {"effort": "xhigh"}
            )
        },
    ),
    "claude-haiku-4-5": (
        ADAPTIVE,
        {
            "adaptive thinking is not supported on this model": lambda b: thinks(b, "adaptive"),
            "This model does not support the effort parameter.": lambda b: "output_config" in b,
            "Thinking may not be enabled when tool_choice forces tool use.": lambda b: thinks(b) and is_forced(b),
        },
    ),
    "gpt-5.5": (
        RESPONSES,
        {
            "Unsupported value: 'max' is not supported with the 'gpt-5.5' model. Supported values are: 'none', 'low', "
            "'medium', 'high', and 'xhigh'.": lambda b: b.get("reasoning") == {"effort": "max"}
        },
    ),
    "gpt-4.1": (
        RESPONSES,
        {
            "Unsupported parameter: 'reasoning.effort' is not supported with this model.": lambda b: "reasoning" in b,
            "Encrypted content is not supported with this model.": lambda b: "include" in b,
        },
    ),
    "an organization that may not stream": (
        RESPONSES,
        {"Your organization must be verified to stream this model.": lambda b: bool(b.get("stream"))},
    ),
    "gpt-5.6-sol by chat completions": (
        Form(api=Api.CHAT),
        {
            "Function tools with reasoning_effort are not supported for gpt-5.6-sol in /v1/chat/completions. To use "
            "function tools, use /v1/responses or set reasoning_effort to none.": lambda b: "messages" in b
        },
    ),
    "deepseek-v4 by chat completions": (
        Form(api=Api.CHAT),
        {"Thinking mode does not support this tool_choice": lambda b: b.get("tool_choice") == "required"},
    ),
}


def is_forced(body: dict) -> bool:
    return body.get("tool_choice", {}).get("type") in {"any", "tool"}


def thinks(body: dict, kind: str = "") -> bool:
    given = body.get("thinking", {}).get("type", "")
    return given == kind if kind else given in {"adaptive", "enabled"}


@pytest.mark.parametrize("model", DOCUMENTED)
def test_what_current_models_refuse_by_their_documentation_is_cured_within_three_requests(server, model):
    form, refusals = DOCUMENTED[model]

    def script(request: CompletionRequest) -> Reaction:
        body = server.bodies[-1]
        refused = next((text for text, is_wrong in refusals.items() if is_wrong(body)), None)
        return Status(400, message=refused) if refused else Say((("submit", {"tp": 2}),), thinking="hm")

    server.script = script
    client = connect("anthropic" if form.api is Api.MESSAGES else "compatible", server)
    client.form = form
    answer = client.ask(ASK)
    assert [call.name for call in answer.calls] == ["submit"]
    assert len(server.bodies) <= 3
    result = Message(role=Role.USER, results=(ToolResult(id=answer.calls[0].id, text="1"),))
    asked = Message(role=Role.ASSISTANT, calls=answer.calls, kept=answer.kept)
    assert client.ask(ASK.model_copy(update={"messages": (*ASK.messages, asked, result)})).calls
    assert client.form.call in {CallForm.FORCED, CallForm.AUTO}, "it still has tools"


def test_a_gateway_that_does_not_wait_is_read_as_a_stream(server):
    server.script = one_by_one(Raw(b"<html><title>504 Gateway Time-out</title>", code=504), Say(text="at last"))
    client = connect("compatible", server)
    with pytest.raises(ProviderError) as caught:
        client.ask(ASK)
    assert caught.value.may_have_cost, "the search counts it before it asks again"
    assert client.ask(ASK).text == "at last"
    assert server.bodies[-1]["stream"] is True


def test_an_address_without_v1_is_completed(server):
    make = PROVIDERS.get("compatible")().make_provider
    for address in (server.url, f"{server.url}/", f"{server.url}/v1/chat/completions", f"{server.url}/v1/"):
        assert make(MODEL, api_key=KEY, base_url=address, timeout_s=30.0).ask(ASK).stop is StopReason.DONE


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
