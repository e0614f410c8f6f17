"""Parses and checks requests as the two providers do, and refuses what they refuse, with the same status."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

from cclsearch.propose.agent.providers.types import CompletionRequest, Message, Role, ToolCall, ToolResult, ToolSpec


class BadRequest(Exception):
    """A request that a real server answers with 400."""


def read_anthropic(body: dict[str, Any]) -> CompletionRequest:
    """The request in a messages body; raises BadRequest if Anthropic would refuse it."""
    _require(isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 0, "max_tokens: Field required")
    known = {"model", "max_tokens", "system", "messages", "tools", "tool_choice", "stream", "thinking", "output_config"}
    unknown = set(body) - known
    thinks = body.get("thinking", {}).get("type") in {"adaptive", "enabled"}
    forced = body.get("tool_choice", {}).get("type") in {"any", "tool"}
    _require(not (thinks and forced), "Thinking may not be enabled when tool_choice forces tool use.")
    _require(not unknown, f"{sorted(unknown)}: Extra inputs are not permitted")
    system = body.get("system", "")
    if isinstance(system, list):
        _require(all(block.get("type") == "text" and block.get("text") for block in system), "system: text blocks only")
        marks = str(body).count("'cache_control':")
        _require(marks <= 4, "at most 4 cache_control marks")
        system = "\n".join(block["text"] for block in system)
    tools = tuple(_anthropic_tool(tool) for tool in body.get("tools", []))
    messages = body.get("messages")
    _require(isinstance(messages, list) and bool(messages), "messages: at least one message is required")
    read = tuple(_anthropic_message(message) for message in messages)
    _require(read[0].role is Role.USER, "messages: first message must use the user role")
    _require(read[-1].role is Role.USER, "messages: must end with a user message")
    for before, after in pairwise(read):
        wanted, given = {call.id for call in before.calls}, {result.id for result in after.results}
        _require(wanted == given, f"messages: tool_use ids {sorted(wanted ^ given)} have no counterpart")
        _require(before.role is not after.role, "messages: roles must alternate")
    _check_ids(read)
    return CompletionRequest(system=system, messages=read, tools=tools, max_output_tokens=body["max_tokens"])


def read_responses(body: dict[str, Any]) -> CompletionRequest:
    """The request in a body of the Responses API; raises BadRequest if OpenAI would refuse it."""
    chat: dict[str, Any] = {"messages": [], "max_tokens": body.get("max_output_tokens"), "tools": []}
    for tool in body.get("tools", []):
        _require("strict" in tool, "tools: missing required field 'strict'")
        chat["tools"].append({"type": tool["type"], "function": {k: v for k, v in tool.items() if k != "type"}})
    if body.get("instructions"):
        chat["messages"].append({"role": "system", "content": body["instructions"]})
    reasoning: dict[str, Any] | None = None
    for item in body["input"]:
        kind = item.get("type", "message")
        _require(
            reasoning is None or kind in {"message", "function_call"}, "reasoning without its required following item"
        )
        if kind == "reasoning":
            _require("summary" in item and bool(item.get("encrypted_content")), "reasoning: not persisted")
            reasoning = item
        elif kind == "function_call":
            call = {"id": item["call_id"], "type": "function", "function": {k: item[k] for k in ("name", "arguments")}}
            own = {"role": "assistant", "content": None, "tool_calls": [call]}
            last = chat["messages"][-1]
            if last["role"] == "assistant" and last.get("tool_calls"):
                last["tool_calls"].append(call)
            else:
                chat["messages"].append(own | ({"reasoning": reasoning} if reasoning else {}))
            reasoning = None
        elif kind == "function_call_output":
            chat["messages"].append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        else:
            text = item["content"] if isinstance(item["content"], str) else item["content"][0]["text"]
            chat["messages"].append({"role": item["role"], "content": text})
            reasoning = None
    return read_openai(chat)


def read_openai(body: dict[str, Any]) -> CompletionRequest:
    """The request in a chat-completions body; raises BadRequest if OpenAI would refuse it."""
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    _require(isinstance(most, int) and most > 0, "max_completion_tokens must be a positive integer")
    tools = tuple(_openai_tool(tool) for tool in body.get("tools", []))
    messages = body.get("messages")
    _require(isinstance(messages, list) and bool(messages), "messages: [] is too short")
    system = ""
    read: list[Message] = []
    waiting: set[str] = set()
    for raw in messages:
        role = raw.get("role")
        _require(role in {"system", "user", "assistant", "tool"}, f"messages: unknown role {role!r}")
        if role == "tool":
            _require(raw.get("tool_call_id") in waiting, "messages with role 'tool' must follow their tool_calls")
            waiting.discard(raw["tool_call_id"])
            result = ToolResult(id=raw["tool_call_id"], text=_text(raw.get("content")))
            if read and read[-1].role is Role.USER and read[-1].results:
                read[-1] = read[-1].model_copy(update={"results": (*read[-1].results, result)})
            else:
                read.append(Message(role=Role.USER, results=(result,)))
            continue
        _require(not waiting, f"tool_call_ids {sorted(waiting)} did not have response messages")
        if role == "system":
            system += _text(raw.get("content"))
            continue
        calls = tuple(_openai_call(call) for call in raw.get("tool_calls") or ())
        waiting = {call.id for call in calls}
        text = _text(raw.get("content")) if raw.get("content") is not None else ""
        _require(bool(text or calls), "content must not be empty")
        if role == "user" and read and read[-1].results and not read[-1].text:
            read[-1] = read[-1].model_copy(update={"text": text})
        else:
            own = {name: raw[name] for name in ("reasoning_content", "reasoning") if raw.get(name)}
            read.append(Message(role=Role(role), text=text, calls=calls, kept=(own,) if own else ()))
    _require(not waiting, f"tool_call_ids {sorted(waiting)} did not have response messages")
    _require(bool(read), "no messages but the system's")
    if "response_format" in body:
        _require(body["response_format"].get("type") == "json_schema", "response_format.type")
        _require("schema" in body["response_format"].get("json_schema", {}), "response_format.json_schema.schema")
    else:
        _check_ids(tuple(read))
    return CompletionRequest(system=system, messages=tuple(read), tools=tools, max_output_tokens=most)


def _check_ids(messages: tuple[Message, ...]) -> None:
    names = [call.name for message in messages for call in message.calls]
    _require(
        all(re.fullmatch("[A-Za-z0-9_-]{1,64}", name) for name in names), "tool names must match [A-Za-z0-9_-]{1,64}"
    )
    ids = [call.id for message in messages for call in message.calls]
    _require(len(ids) == len(set(ids)), "tool call ids must be unique")


def _anthropic_tool(tool: dict[str, Any]) -> ToolSpec:
    schema = tool.get("input_schema")
    _require(isinstance(schema, dict) and schema.get("type") == "object", "tools: input_schema.type must be object")
    return ToolSpec(name=tool["name"], description=tool.get("description", ""), parameters=schema)


def _openai_tool(tool: dict[str, Any]) -> ToolSpec:
    _require(tool.get("type") == "function", "tools: type must be function")
    function = tool["function"]
    _require(isinstance(function.get("parameters"), dict), "tools: parameters must be a schema")
    return ToolSpec(
        name=function["name"], description=function.get("description", ""), parameters=function["parameters"]
    )


def _anthropic_message(message: dict[str, Any]) -> Message:
    _require(message.get("role") in {"user", "assistant"}, f"messages: unexpected role {message.get('role')!r}")
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    _require(isinstance(content, list) and bool(content), "messages: content must not be empty")
    texts, calls, results, kept = [], [], [], []
    for block in content:
        kind = block.get("type")
        if kind == "text":
            _require(bool(block.get("text", "").strip()), "messages: text content blocks must be non-empty")
            texts.append(block["text"])
        elif kind == "tool_use":
            _require(isinstance(block.get("input"), dict), "messages: tool_use.input must be an object")
            calls.append(ToolCall(id=block["id"], name=block["name"], arguments=block["input"]))
        elif kind == "tool_result":
            _require(not texts, "messages: tool_result blocks must come first")
            text = block.get("content", "")
            results.append(ToolResult(id=block["tool_use_id"], text=text, is_error=bool(block.get("is_error"))))
        elif kind == "thinking":
            _require(
                block.get("signature") == f"signed {block.get('thinking')}", "Invalid `signature` in `thinking` block"
            )
            kept.append(block)
        else:
            raise BadRequest(f"messages: unknown block {kind!r}")
    parts = {"calls": tuple(calls), "results": tuple(results), "kept": tuple(kept)}
    return Message(role=Role(message["role"]), text="\n".join(texts), **parts)


def _openai_call(call: dict[str, Any]) -> ToolCall:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        raise BadRequest("messages: tool_calls.function.arguments must be JSON") from None
    return ToolCall(id=call["id"], name=function["name"], arguments=arguments)


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    raise BadRequest("messages: content must be a string")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadRequest(message)
