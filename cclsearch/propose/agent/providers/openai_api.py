"""The chat-completions protocol, through the OpenAI SDK: OpenAI itself, vLLM, Ollama, SGLang and their like."""

from __future__ import annotations

import json
import os
from enum import Enum
from typing import Any

from cclsearch.propose.agent.providers.http import (
    CONNECT_S,
    call_within,
    find_error,
    make_http_client,
    to_provider_error,
)
from cclsearch.propose.agent.providers.parse import as_count, as_mapping, as_text, estimate_usage, make_call, parse_body
from cclsearch.propose.agent.providers.spec import name_model
from cclsearch.propose.agent.providers.types import (
    MAX_BODY_BYTES,
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


class OpenAIProvider:
    """One model behind chat completions. `base_url` None is OpenAI itself.

    A server that refuses tools (some models of Ollama do) is asked for one JSON object of the same schemas instead,
    from then on; one that refuses schemas too is asked for it in words.
    """

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None, timeout_s: float = 120.0) -> None:
        import openai

        self.name = name_model("openai" if base_url is None else "compatible", model, base_url)
        self._model = model
        self._most_s = timeout_s + min(CONNECT_S, timeout_s)
        is_openai = base_url is None and not os.environ.get("OPENAI_BASE_URL")
        self._limit = "max_completion_tokens" if is_openai else "max_tokens"
        self._manner = _Manner.TOOLS
        self._client = openai.OpenAI(
            api_key=api_key,
            base_url=base_url,
            max_retries=0,
            http_client=make_http_client(openai.DefaultHttpxClient, timeout_s=timeout_s),
        )

    def ask(self, request: CompletionRequest) -> Answer:
        """See `wire.Provider`."""
        while True:
            try:
                return self._ask(request)
            except ProviderError as error:
                if error.trouble is not ErrorKind.BAD_REQUEST or not self._gives_way(error.message.lower()):
                    raise

    def _gives_way(self, words: str) -> bool:
        """Whether what the server objects to can be asked for in another way, which is then kept to."""
        if self._limit == "max_tokens" and "max_completion_tokens" in words:
            self._limit = "max_completion_tokens"
        elif self._manner is _Manner.TOOLS and "tool" in words:
            self._manner = _Manner.SCHEMA
        elif self._manner is _Manner.SCHEMA and ("schema" in words or "format" in words):
            self._manner = _Manner.WORDS
        else:
            return False
        return True

    def _ask(self, request: CompletionRequest) -> Answer:
        if self._manner is _Manner.TOOLS:
            body = chat_body(self._model, request)
        else:
            body = json_body(self._model, request, with_schema=self._manner is _Manner.SCHEMA)
        body[self._limit] = request.max_output_tokens
        create = self._client.chat.completions.with_raw_response.create
        try:
            content = call_within(lambda: create(**body).http_response.content, self._most_s)
        except Exception as error:  # the SDK's own, and what its HTTP library lets through
            raise to_provider_error(error) from None
        return _read_answer(parse_body(content), request)


class _Manner(Enum):
    """How a server is asked to answer with a call."""

    TOOLS = 1
    SCHEMA = 2
    WORDS = 3


def chat_body(model: str, request: CompletionRequest) -> dict[str, Any]:
    """The request as chat completions have it, with tools."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": request.system}]
    for message in request.messages:
        messages += _messages(message)
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in request.tools
    ]
    return {"model": model, "messages": messages, "tools": tools, "tool_choice": "required"}


def json_body(model: str, request: CompletionRequest, *, with_schema: bool = True) -> dict[str, Any]:
    """The request for a server without tools: the answer is one JSON object `{"tool": ..., "arguments": {...}}`.

    The schema of the arguments stands in the text too, where there is room for it twice.
    """
    body = _json_body(model, request, with_schema=with_schema, in_text=True)
    if with_schema and len(_text_in_json(body).encode()) > MAX_BODY_BYTES:
        return _json_body(model, request, with_schema=True, in_text=False)
    return body


def _json_body(model: str, request: CompletionRequest, *, with_schema: bool, in_text: bool) -> dict[str, Any]:
    tools = "\n".join(
        f"- {tool.name}: {tool.description}" + (f" arguments: {_text_in_json(tool.parameters)}" if in_text else "")
        for tool in request.tools
    )
    how = f'\n\nAnswer with one JSON object {{"tool": NAME, "arguments": {{...}}}} and nothing else. Tools:\n{tools}'
    messages = [{"role": "system", "content": request.system + how}]
    for message in request.messages:
        parts = [f"result of {result.id}: {result.text}" for result in message.results]
        parts += [_text_in_json({"tool": call.name, "arguments": call.arguments or {}}) for call in message.calls]
        text = "\n".join([*parts, message.text] if message.text else parts)
        messages.append({"role": message.role.value, "content": text or "(nothing)"})
    body: dict[str, Any] = {"model": model, "messages": messages}
    return {**body, "response_format": _response_format(request)} if with_schema else body


def _text_in_json(value: object) -> str:
    """As few bytes as may be: the bound on a request counts those of UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _response_format(request: CompletionRequest) -> dict[str, Any]:
    choices = [
        {
            "type": "object",
            "properties": {"tool": {"const": tool.name}, "arguments": tool.parameters},
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for tool in request.tools
    ]
    schema = {"name": "decision", "schema": {"anyOf": choices}}
    return {"type": "json_schema", "json_schema": schema}


def _messages(message: Message) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": result.id, "content": result.text} for result in message.results
    ]
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": _text_in_json(call.arguments or {})},
        }
        for call in message.calls
    ]
    if calls:
        out.append({"role": message.role.value, "content": message.text or None, "tool_calls": calls})
    elif message.text or not out:
        out.append({"role": message.role.value, "content": message.text or "(nothing)"})
    return out


def _text_of(content: object) -> str:
    """The text of a message, which some servers send in parts."""
    if isinstance(content, list):
        return as_text("".join(as_text(as_mapping(part).get("text")) for part in content))
    return as_text(content)


def _read_answer(body: dict[str, Any], request: CompletionRequest) -> Answer:
    choices = body.get("choices")
    choice = as_mapping(choices[0]) if isinstance(choices, list) and choices else {}
    failed = find_error({"error": choice.get("error")})
    if failed:  # as gateways tell that what lies behind them broke off
        raise failed
    message = as_mapping(choice.get("message"))
    calls: list[ToolCall] = []
    raw_calls = message.get("tool_calls")
    if not raw_calls and message.get("function_call"):
        raw_calls = [{"function": message["function_call"]}]
    for raw in raw_calls if isinstance(raw_calls, list) else []:
        raw = as_mapping(raw)
        function = as_mapping(raw.get("function"))
        calls.append(make_call(raw.get("id"), function.get("name"), function.get("arguments"), len(calls)))
    word = as_text(choice.get("finish_reason"))
    stop = StopReason.REFUSED if message.get("refusal") else _STOPS.get(word, StopReason.OTHER)
    usage = as_mapping(body.get("usage"))
    cached = as_count(as_mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    told = Usage(
        input_tokens=max(as_count(usage.get("prompt_tokens")) - cached, 0),
        output_tokens=as_count(usage.get("completion_tokens")),
        cache_read_tokens=cached,
    )
    return Answer(
        text=_text_of(message.get("content")) or as_text(message.get("refusal")),
        calls=tuple(calls),
        stop=stop,
        stop_word=word[:40],
        usage=told if told.total else estimate_usage(request, len(json.dumps(body))),
    )
