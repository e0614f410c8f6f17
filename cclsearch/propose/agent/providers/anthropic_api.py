"""Anthropic's messages protocol, through its SDK."""

from __future__ import annotations

import json
from typing import Any

from cclsearch.propose.agent.providers.http import make_http_client, send
from cclsearch.propose.agent.providers.parse import as_count, as_mapping, as_text, estimate_usage, make_call, parse_body
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    Message,
    Role,
    StopReason,
    ToolCall,
    Usage,
)

_STOPS = {
    "end_turn": StopReason.DONE,
    "stop_sequence": StopReason.DONE,
    "tool_use": StopReason.TOOL,
    "max_tokens": StopReason.TRUNCATED,
    "model_context_window_exceeded": StopReason.TRUNCATED,
    "refusal": StopReason.REFUSED,
}


class AnthropicProvider:
    """One Anthropic model. The key comes from the caller, is passed to the SDK and stored nowhere else."""

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None, timeout_s: float = 120.0) -> None:
        import anthropic

        self.name = f"anthropic:{model}"
        self._model = model
        self._timeout_s = timeout_s
        self._client = anthropic.Anthropic(
            api_key=api_key,
            base_url=base_url,
            max_retries=0,
            http_client=make_http_client(anthropic.DefaultHttpxClient, timeout_s=timeout_s),
        )

    def ask(self, request: CompletionRequest) -> Answer:
        """See `Provider`."""
        body = anthropic_body(self._model, request)
        content = send(self._client.messages.with_raw_response.create, body, self._timeout_s)
        return _read_answer(parse_body(content), request)


def anthropic_body(model: str, request: CompletionRequest) -> dict[str, Any]:
    """The request body in that protocol, with marks for the provider's prompt cache.

    Tools and system stay the same during a search, the first message during a turn.
    """
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [_message(message) for message in request.messages]
    messages[0]["content"][-1].update(cached)
    return {
        "model": model,
        "max_tokens": request.max_output_tokens,
        "system": [{"type": "text", "text": request.system, **cached}],
        "messages": messages,
        "tools": [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
            for tool in request.tools
        ],
        "tool_choice": {"type": "any"},
    }


def _message(message: Message) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for result in message.results:
        block = {"type": "tool_result", "tool_use_id": result.id, "content": result.text}
        blocks.append({**block, "is_error": True} if result.is_error else block)
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments or {}})
    if message.role is Role.ASSISTANT and not blocks:
        blocks.append({"type": "text", "text": "(nothing)"})
    return {"role": message.role.value, "content": blocks}


def _read_answer(body: dict[str, Any], request: CompletionRequest) -> Answer:
    texts: list[str] = []
    calls: list[ToolCall] = []
    content = body.get("content")
    for block in content if isinstance(content, list) else []:
        block = as_mapping(block)
        if block.get("type") == "text":
            texts.append(as_text(block.get("text")))
        elif block.get("type") == "tool_use":
            calls.append(make_call(block.get("id"), block.get("name"), block.get("input"), len(calls)))
    stop_word = as_text(body.get("stop_reason"))
    usage = as_mapping(body.get("usage"))
    counted = Usage(
        input_tokens=as_count(usage.get("input_tokens")),
        output_tokens=as_count(usage.get("output_tokens")),
        cache_read_tokens=as_count(usage.get("cache_read_input_tokens")),
        cache_write_tokens=as_count(usage.get("cache_creation_input_tokens")),
    )
    return Answer(
        text="\n".join(texts),
        calls=tuple(calls),
        stop=_STOPS.get(stop_word, StopReason.OTHER),
        stop_word=stop_word[:40],
        usage=counted if counted.total else estimate_usage(request, len(json.dumps(body))),
    )
