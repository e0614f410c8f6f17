"""The chat-completions protocol, through the OpenAI SDK: OpenAI itself, vLLM, Ollama, SGLang and others."""

from __future__ import annotations

import json
import os
from enum import Enum
from typing import Any

from cclsearch.propose.agent.providers.http import find_error, make_http_client, send
from cclsearch.propose.agent.providers.parse import as_count, as_mapping, as_text, estimate_usage, make_call, parse_body
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
    name_model,
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

    If a server refuses tools (some models of Ollama do), further requests ask for one JSON object of the same schemas
    instead; if it refuses schemas too, the text asks for the object.
    """

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None, timeout_s: float = 120.0) -> None:
        import openai

        self.name = name_model("openai" if base_url is None else "compatible", model, base_url)
        self._model = model
        self._timeout_s = timeout_s
        is_openai = base_url is None and not os.environ.get("OPENAI_BASE_URL")
        self._limit = "max_completion_tokens" if is_openai else "max_tokens"
        self._call_mode = _CallMode.TOOLS
        self._client = openai.OpenAI(
            api_key=api_key,
            base_url=base_url,
            max_retries=0,
            http_client=make_http_client(openai.DefaultHttpxClient, timeout_s=timeout_s),
        )

    def ask(self, request: CompletionRequest) -> Answer:
        """See `Provider`."""
        while True:
            try:
                return self._ask(request)
            except ProviderError as error:
                if error.kind is not ErrorKind.BAD_REQUEST or not self._change_request(error.message.lower()):
                    raise

    def _change_request(self, message: str) -> bool:
        """Change the form of all further requests to one that the server may accept; False if there is none."""
        if self._limit == "max_tokens" and "max_completion_tokens" in message:
            self._limit = "max_completion_tokens"
        elif self._call_mode is _CallMode.TOOLS and "tool" in message:
            self._call_mode = _CallMode.SCHEMA
        elif self._call_mode is _CallMode.SCHEMA and ("schema" in message or "format" in message):
            self._call_mode = _CallMode.TEXT
        else:
            return False
        return True

    def _ask(self, request: CompletionRequest) -> Answer:
        if self._call_mode is _CallMode.TOOLS:
            body = chat_body(self._model, request)
        else:
            body = json_body(self._model, request, with_schema=self._call_mode is _CallMode.SCHEMA)
        body[self._limit] = request.max_output_tokens
        content = send(self._client.chat.completions.with_raw_response.create, body, self._timeout_s)
        return _read_answer(parse_body(content), request)


class _CallMode(Enum):
    """Way in which a request makes a server answer with a call."""

    TOOLS = 1
    SCHEMA = 2
    TEXT = 3


def chat_body(model: str, request: CompletionRequest) -> dict[str, Any]:
    """The request body for chat completions, with tools."""
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
    """The request body for a server without tools, which answers with one object `{"tool": ..., "arguments": {...}}`.

    The text contains the schema of the arguments too, if both copies fit into the bound.
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
    """The value as JSON in the fewest bytes: the bound on a request counts UTF-8 bytes."""
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
    if failed:  # a gateway reports in this way that the server behind it failed
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
    stop_word = as_text(choice.get("finish_reason"))
    stop = StopReason.REFUSED if message.get("refusal") else _STOPS.get(stop_word, StopReason.OTHER)
    usage = as_mapping(body.get("usage"))
    cached = as_count(as_mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    counted = Usage(
        input_tokens=max(as_count(usage.get("prompt_tokens")) - cached, 0),
        output_tokens=as_count(usage.get("completion_tokens")),
        cache_read_tokens=cached,
    )
    return Answer(
        text=_text_of(message.get("content")) or as_text(message.get("refusal")),
        calls=tuple(calls),
        stop=stop,
        stop_word=stop_word[:40],
        usage=counted if counted.total else estimate_usage(request, len(json.dumps(body))),
    )
