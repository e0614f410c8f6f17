"""The chat completions API: OpenAI, vLLM, Ollama, SGLang, llama.cpp, gateways and others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cclsearch.propose.agent.providers.errors import find_error
from cclsearch.propose.agent.providers.flatten import NOTHING, decision_schema, to_json
from cclsearch.propose.agent.providers.forms import CallForm, Form
from cclsearch.propose.agent.providers.parse import as_count, as_mapping, as_text, count_usage, keep_blocks, make_call
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    ErrorKind,
    Message,
    ProviderError,
    StopReason,
    ToolCall,
    Usage,
)

_STOPS = {
    "stop": StopReason.DONE,
    "tool_calls": StopReason.TOOL,
    "function_call": StopReason.TOOL,
    "length": StopReason.TRUNCATED,
    "content_filter": StopReason.FILTERED,
}
_REASONING = ("reasoning_content", "reasoning", "reasoning_details")
"""Fields in which servers give the model's reasoning; those that need it back need it in the same field."""


def write_body(
    model: str, request: CompletionRequest, form: Form, tools_of: CompletionRequest | None = None
) -> dict[str, Any]:
    """The request body."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    body: dict[str, Any] = {
        "model": model,
        "messages": [*system, *(item for message in request.messages for item in _messages(message, form))],
        form.limit_name: request.max_output_tokens,
    }
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in request.tools
        ]
        body["tool_choice"] = "required" if form.call is CallForm.FORCED else "auto"
    if form.call is CallForm.SCHEMA and tools_of is not None:
        schema = {"name": "decision", "schema": decision_schema(tools_of)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if form.effort:
        body["reasoning_effort"] = form.effort
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if form.streams else body


def _messages(message: Message, form: Form) -> Iterator[dict[str, Any]]:
    for result in message.results:
        yield {"role": "tool", "tool_call_id": result.id, "content": result.text}
    own = message.kept[0] if message.kept and form.keeps else {}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": to_json(call.arguments or {})}}
        for call in message.calls
    ]
    if calls:
        yield {"role": message.role.value, "content": message.text or None, "tool_calls": calls, **own}
    elif message.text or not message.results:
        yield {"role": message.role.value, "content": message.text or NOTHING, **own}


def _text_of(content: object) -> str:
    """The text of a message, which some servers send in parts."""
    if isinstance(content, list):
        content = "".join(as_text(as_mapping(part).get("text")) for part in content)
    # reasoning may be longer than what is kept of a text
    return as_text(content.rpartition("</think>")[2] or content) if isinstance(content, str) else ""


def read_answer(body: dict[str, Any], request: CompletionRequest) -> Answer:
    """The answer in that body; every field may be missing."""
    choices = body.get("choices")
    choice = as_mapping(choices[0]) if isinstance(choices, list) and choices else {}
    failed = find_error({"error": choice.get("error")})
    if failed:  # a gateway reports in this way that the server behind it failed
        raise failed
    message = as_mapping(choice.get("message"))
    stop_word = as_text(choice.get("finish_reason"))
    calls = _read_calls(message)
    if not calls and "malformed" in stop_word.lower():
        raise ProviderError(ErrorKind.BAD_GENERATION, f"the server could not read the call ({stop_word[:80]})")
    stop = StopReason.REFUSED if message.get("refusal") else _STOPS.get(stop_word.lower(), StopReason.OTHER)
    usage = as_mapping(body.get("usage"))
    cached = as_count(as_mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    counted = Usage(
        input_tokens=max(as_count(usage.get("prompt_tokens")) - cached, 0),
        output_tokens=as_count(usage.get("completion_tokens")),
        cache_read_tokens=cached,
        reasoning_tokens=as_count(as_mapping(usage.get("completion_tokens_details")).get("reasoning_tokens")),
    )
    own = {name: message[name] for name in _REASONING if message.get(name)}
    text = _text_of(message.get("content")) or as_text(message.get("refusal")) or as_text(choice.get("text"))
    if not text.strip() and not calls:
        # a server without a parser for this model leaves the call in the reasoning
        text = next((as_text(own[name]) for name in _REASONING[:2] if isinstance(own.get(name), str)), "")
    return Answer(
        text=text,
        calls=tuple(calls),
        stop=stop,
        stop_word=stop_word[:40],
        usage=count_usage(counted, request, body),
        kept=keep_blocks([own] if own else []),
    )


def _read_calls(message: dict[str, Any]) -> list[ToolCall]:
    raw_calls = message.get("tool_calls") or []
    if isinstance(raw_calls, dict):
        raw_calls = [raw_calls]
    if not raw_calls and message.get("function_call"):
        raw_calls = [{"function": message["function_call"]}]
    if not raw_calls and isinstance(message.get("content"), list):
        raw_calls = [part for part in message["content"] if as_mapping(part).get("type") in {"tool_use", "tool_call"}]
    calls: list[ToolCall] = []
    for raw in map(as_mapping, raw_calls if isinstance(raw_calls, list) else []):
        function = as_mapping(raw.get("function")) or raw
        arguments = next((function[name] for name in ("arguments", "parameters", "input") if name in function), None)
        calls.append(make_call(raw.get("id"), function.get("name"), arguments, len(calls)))
    return calls


def join_stream(events: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return the body that the events of a stream make up, and whether the stream came to its end."""
    message: dict[str, Any] = {}
    calls: dict[object, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    finish = ""
    for event in events:
        usage = as_mapping(event.get("usage")) or usage
        choices = event.get("choices")
        for choice in map(as_mapping, choices[:1] if isinstance(choices, list) else []):
            finish = as_text(choice.get("finish_reason")) or finish
            part = as_mapping(choice.get("delta")) or as_mapping(choice.get("message"))
            deltas = part.get("tool_calls")
            for raw in map(as_mapping, deltas if isinstance(deltas, list) else []):
                _join_call(calls, raw)
            for name in ("content", "refusal", "reasoning_content", "reasoning"):
                if isinstance(part.get(name), str):
                    message[name] = (message.get(name) or "") + part[name]
            if isinstance(part.get("reasoning_details"), list):
                message["reasoning_details"] = [*message.get("reasoning_details", []), *part["reasoning_details"]]
    if calls:
        message["tool_calls"] = list(calls.values())
    body: dict[str, Any] = {"choices": [{"message": message, "finish_reason": finish}]} if message or finish else {}
    return ({**body, "usage": usage} if usage else body), bool(finish)


def _join_call(calls: dict[object, dict[str, Any]], raw: dict[str, Any]) -> None:
    function = as_mapping(raw.get("function"))
    # servers that send whole calls often leave the index out, or send 0 for each
    is_more = bool(calls) and not function.get("name") and not raw.get("id")
    given = raw.get("index")
    at: object = given if isinstance(given, int) else (list(calls)[-1] if is_more else len(calls))
    if at in calls and function.get("name") and raw.get("id") and raw.get("id") != calls[at].get("id"):
        at = len(calls)
    call = calls.setdefault(at, {"id": None, "function": {"name": "", "arguments": ""}})
    call["id"] = call["id"] or raw.get("id")
    if not call["function"]["name"]:
        call["function"]["name"] = as_text(function.get("name"))
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        call["function"]["arguments"] = to_json(arguments)
    elif isinstance(arguments, str):
        call["function"]["arguments"] += arguments
