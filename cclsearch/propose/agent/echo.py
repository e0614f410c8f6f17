"""A conversation as it is sent back to the model: masked, clipped, and shortened where it does not fit."""

from __future__ import annotations

import json
import re

from cclsearch.core.secrets.redact import redact
from cclsearch.propose.agent.prompt.quoting import clip_bytes, redact_strings
from cclsearch.propose.agent.providers.types import Message, ToolCall, ToolResult

MAX_ECHO_BYTES = 1500
"""Bytes of one of the model's earlier texts when it is sent back to the model."""
LEFT_OUT = "(left out: size limit)"


def clip_reply(text: str, limit_bytes: int) -> str:
    """A result within its bound, with the number of characters that were cut."""
    safe = redact(text)
    clipped = clip_bytes(safe, limit_bytes)
    return safe if clipped == safe else f"{clipped}\n({len(safe) - len(clipped)} characters left out)"


def echo_text(text: str) -> str:
    """The model's text as it is sent back."""
    # Some models write only whitespace before a call; providers refuse such a text when it is sent back.
    safe = redact(text) if text.strip() else ""
    clipped = clip_bytes(safe, MAX_ECHO_BYTES)
    return safe if clipped == safe else f"{clipped} (cut)"


def echo_call(call: ToolCall, limit_bytes: int) -> ToolCall:
    """Return the call as it is sent back; arguments over the bound are left out."""
    # Providers refuse tool names with other characters.
    name = re.sub(r"[^A-Za-z0-9_-]", "_", redact(call.name))[:64] or "unnamed"
    if len(json.dumps(call.arguments)) <= limit_bytes:
        return call.model_copy(update={"arguments": redact_strings(call.arguments), "name": name})
    elided = {"elided": "the arguments were too long to send back"}
    return call.model_copy(update={"arguments": elided, "name": name})


def shrink_message(message: Message) -> Message:
    """The message without the content of results and calls."""
    calls = tuple(call.model_copy(update={"arguments": {}}) for call in message.calls)
    results = tuple(result.model_copy(update={"text": LEFT_OUT}) for result in message.results)
    text = clip_bytes(message.text, 400)
    return message.model_copy(update={"results": results, "calls": calls, "text": text, "kept": ()})


def clip_results(message: Message, limit_bytes: int) -> Message:
    """The message with results of at most that many bytes."""
    results = tuple(
        result if len(result.text.encode()) <= limit_bytes + len(LEFT_OUT) else _cut(result, limit_bytes)
        for result in message.results
    )
    return message.model_copy(update={"results": results})


def _cut(result: ToolResult, limit_bytes: int) -> ToolResult:
    kept = clip_bytes(result.text, limit_bytes)
    return result.model_copy(update={"text": f"{kept}\n{LEFT_OUT}" if kept else LEFT_OUT})
