"""Anthropic's Messages API: body, answer and stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cclsearch.propose.agent.providers.flatten import NOTHING
from cclsearch.propose.agent.providers.forms import CallForm, Form, Thinking
from cclsearch.propose.agent.providers.parse import as_count, as_mapping, as_text, count_usage, keep_blocks, make_call
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    Message,
    StopReason,
    ToolCall,
    Usage,
)

MIN_BUDGET = 1024
"""Fewest tokens of thinking that the API accepts as a budget."""
_STOPS = {
    "end_turn": StopReason.DONE,
    "stop_sequence": StopReason.DONE,
    "tool_use": StopReason.TOOL,
    "max_tokens": StopReason.TRUNCATED,
    "model_context_window_exceeded": StopReason.TRUNCATED,
    "refusal": StopReason.REFUSED,
    "pause_turn": StopReason.PAUSED,
}


def write_body(model: str, request: CompletionRequest, form: Form) -> dict[str, Any]:
    """The request body. The marks for the provider's cache cover tools and system, and the conversation."""
    # A turn of another trial comes minutes later: a mark of five minutes would only cost.
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}} if form.marks_cache else {}
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_output_tokens,
        "messages": [_message(message, form) for message in request.messages],
    }
    if len(body["messages"]) > 1:
        # the conversation only grows: the next request reads what this one writes
        body["messages"][-1]["content"][-1] |= mark
    if request.system:
        body["system"] = [{"type": "text", "text": request.system, **mark}]
    if request.tools:
        body["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
            for tool in request.tools
        ]
        body["tool_choice"] = {"type": "any" if form.call is CallForm.FORCED else "auto"}
    if form.thinking is Thinking.ADAPTIVE:
        body["thinking"] = {"type": "adaptive"}
    elif form.thinking is Thinking.BUDGET:
        body["thinking"] = {"type": "enabled", "budget_tokens": max(request.max_output_tokens // 2, MIN_BUDGET)}
    if form.effort:
        body["output_config"] = {"effort": form.effort}
    return {**body, "stream": True} if form.streams else body


def _message(message: Message, form: Form) -> dict[str, Any]:
    if message.kept and form.keeps:
        return {"role": "assistant", "content": list(message.kept)}
    blocks: list[dict[str, Any]] = []
    for result in message.results:
        block = {"type": "tool_result", "tool_use_id": result.id, "content": result.text}
        blocks.append({**block, "is_error": True} if result.is_error else block)
    if blocks and message.text:
        # a text of its own after results makes some models end their turn
        blocks[-1]["content"] += f"\n\n{message.text}"
    elif message.text or not (blocks or message.calls):
        blocks.append({"type": "text", "text": message.text or NOTHING})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments or {}})
    return {"role": message.role.value, "content": blocks}


def read_answer(body: dict[str, Any], request: CompletionRequest) -> Answer:
    """The answer in that body; every field may be missing."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    content = body.get("content")
    blocks = [as_mapping(block) for block in content] if isinstance(content, list) else []
    for block in blocks:
        if block.get("type") == "text":
            texts.append(as_text(block.get("text")))
        elif block.get("type") == "tool_use":
            calls.append(make_call(block.get("id"), block.get("name"), block.get("input"), len(calls)))
    stop_word = as_text(body.get("stop_reason"))
    thinks = any(block.get("type") in {"thinking", "redacted_thinking"} for block in blocks)
    usage = as_mapping(body.get("usage"))
    counted = Usage(
        input_tokens=as_count(usage.get("input_tokens")),
        output_tokens=as_count(usage.get("output_tokens")),
        cache_read_tokens=as_count(usage.get("cache_read_input_tokens")),
        cache_write_tokens=as_count(usage.get("cache_creation_input_tokens")),
        reasoning_tokens=as_count(as_mapping(usage.get("output_tokens_details")).get("thinking_tokens")),
    )
    return Answer(
        text="\n".join(texts),
        calls=tuple(calls),
        stop=_STOPS.get(stop_word, StopReason.OTHER),
        stop_word=stop_word[:40],
        usage=count_usage(counted, request, body),
        kept=keep_blocks(blocks) if thinks or stop_word == "pause_turn" else (),
    )


def join_stream(events: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return the body that the events of a stream make up, and whether the stream came to its end."""
    body: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    is_whole = False
    for event in events:
        at = event.get("index", 0) if isinstance(event.get("index", 0), int) else 0
        match event.get("type"):
            case "message_start":
                body = {**as_mapping(event.get("message"))}
            case "content_block_start":
                blocks[at] = {**as_mapping(event.get("content_block"))}
            case "content_block_delta":
                _add_delta(blocks.setdefault(at, {"type": "text"}), as_mapping(event.get("delta")), at, inputs)
            case "message_delta":
                body |= {name: value for name, value in as_mapping(event.get("delta")).items() if value is not None}
                body["usage"] = {**as_mapping(body.get("usage")), **as_mapping(event.get("usage"))}
            case "message_stop":
                is_whole = True
    for at, text in inputs.items():
        try:
            blocks[at]["input"] = json.loads(text or "{}")
        except (ValueError, RecursionError):
            blocks[at]["input"] = text
    return {**body, "content": [blocks[at] for at in sorted(blocks)]}, is_whole


def _add_delta(block: dict[str, Any], delta: dict[str, Any], at: int, inputs: dict[int, str]) -> None:
    if delta.get("type") == "input_json_delta":
        inputs[at] = inputs.get(at, "") + as_text(delta.get("partial_json"))
        return
    for name in ("text", "thinking", "signature"):
        if isinstance(delta.get(name), str):
            block[name] = (block.get(name) or "") + delta[name]
