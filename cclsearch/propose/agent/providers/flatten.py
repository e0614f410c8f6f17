"""Write a request without tools, for servers that refuse them: the text asks for one JSON object per call."""

from __future__ import annotations

import json
from typing import Any

from cclsearch.propose.agent.providers.forms import CallForm, Form
from cclsearch.propose.agent.providers.types import MAX_BODY_BYTES, CompletionRequest, Message, Role

NOTHING = "(nothing)"
"""Text of a message without text: servers refuse an empty one."""


def flatten(request: CompletionRequest, form: Form) -> CompletionRequest:
    """Return the request as that form needs it: without tools, or without a system text of its own."""
    if form.call in {CallForm.SCHEMA, CallForm.TEXT}:
        plain = _ask_for_json(request, in_text=True)
        if form.call is CallForm.SCHEMA and plain.num_bytes + len(to_json(decision_schema(request))) > MAX_BODY_BYTES:
            plain = _ask_for_json(request, in_text=False)  # two copies of the schemas do not fit
        request = plain
    if form.system_apart or not request.system:
        return request
    first, *others = request.messages
    first = first.model_copy(update={"text": f"{request.system}\n\n{first.text}"})
    return request.model_copy(update={"system": "", "messages": (first, *others)})


def _ask_for_json(request: CompletionRequest, *, in_text: bool) -> CompletionRequest:
    tools = "\n".join(
        f"- {tool.name}: {tool.description}" + (f" arguments: {to_json(tool.parameters)}" if in_text else "")
        for tool in request.tools
    )
    how = f'\n\nAnswer with one JSON object {{"tool": NAME, "arguments": {{...}}}} and nothing else. Tools:\n{tools}'
    messages: list[Message] = []
    for message in request.messages:
        parts = [f"result of {result.id}: {result.text}" for result in message.results]
        parts += [to_json({"tool": call.name, "arguments": call.arguments or {}}) for call in message.calls]
        text = "\n".join([*parts, message.text] if message.text else parts)
        messages.append(Message(role=message.role, text=text or NOTHING))
    if messages[-1].role is Role.ASSISTANT:
        messages.append(Message(role=Role.USER, text="Go on."))
    return request.model_copy(update={"system": request.system + how, "messages": tuple(messages), "tools": ()})


def decision_schema(request: CompletionRequest) -> dict[str, Any]:
    """Return the schema of one object `{"tool": NAME, "arguments": {...}}`."""
    choices = [
        {
            "type": "object",
            "properties": {"tool": {"const": tool.name}, "arguments": tool.parameters},
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for tool in request.tools
    ]
    return {"anyOf": choices}


def to_json(value: object) -> str:
    """The value as JSON in the fewest bytes: the bound on a request counts UTF-8 bytes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
