"""Answers as the streams of events that the three APIs send."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def write_events(events: Iterable[tuple[str, dict[str, Any]]]) -> bytes:
    """Server-sent events, each with its name."""
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events).encode()


def stream_anthropic(body: dict[str, Any]) -> bytes:
    """The stream of a message; text, thinking and arguments come in two halves."""
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {**body, "content": [], "stop_reason": None}}]
    for at, block in enumerate(body["content"]):
        kind = block["type"]
        text = json.dumps(block["input"]) if kind == "tool_use" else block[kind]
        empty = {**block, ("input" if kind == "tool_use" else kind): {} if kind == "tool_use" else ""}
        empty.pop("signature", None)
        name = {"tool_use": "input_json_delta", "text": "text_delta", "thinking": "thinking_delta"}[kind]
        field = "partial_json" if kind == "tool_use" else kind
        events.append({"type": "content_block_start", "index": at, "content_block": empty})
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            events.append({"type": "content_block_delta", "index": at, "delta": {"type": name, field: part}})
        if "signature" in block:
            sign = {"type": "signature_delta", "signature": block["signature"]}
            events.append({"type": "content_block_delta", "index": at, "delta": sign})
        events.append({"type": "content_block_stop", "index": at})
    delta = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": body.get("usage", {})})
    events += [{"type": "ping"}, {"type": "message_stop"}]
    return write_events((event["type"], event) for event in events)


def stream_responses(body: dict[str, Any]) -> bytes:
    """The stream of a response."""
    start = {**body, "output": [], "status": "in_progress"}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": start}]
    events += [
        {"type": "response.output_item.done", "output_index": at, "item": item}
        for at, item in enumerate(body["output"])
    ]
    events.append({"type": f"response.{body['status']}", "response": body})
    return write_events((event["type"], event) for event in events)


def stream_chat(body: dict[str, Any]) -> bytes:
    """The stream of a chat completion; text and arguments come in two halves."""
    choice = body["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        deltas += [{name: part} for part in (text[: len(text) // 2], text[len(text) // 2 :]) if part]
    for at, call in enumerate(message.get("tool_calls") or []):
        text = call["function"]["arguments"]
        head = {"index": at, "id": call["id"], "type": "function"}
        name = call["function"]["name"]
        deltas.append({"tool_calls": [{**head, "function": {"name": name, "arguments": text[: len(text) // 2]}}]})
        deltas.append({"tool_calls": [{"index": at, "function": {"arguments": text[len(text) // 2 :]}}]})
    chunks = [{"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    chunks.append({"choices": [], "usage": body.get("usage")})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"
