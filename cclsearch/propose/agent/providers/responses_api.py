"""OpenAI's Responses API: body, answer and stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cclsearch.propose.agent.providers.flatten import NOTHING, decision_schema, to_json
from cclsearch.propose.agent.providers.forms import CallForm, Form
from cclsearch.propose.agent.providers.parse import as_count, as_mapping, as_text, count_usage, keep_blocks, make_call
from cclsearch.propose.agent.providers.types import Answer, CompletionRequest, Message, StopReason, ToolCall, Usage

_STOPS = {"completed": StopReason.DONE, "incomplete": StopReason.TRUNCATED, "content_filter": StopReason.FILTERED}
_KEPT = {"reasoning", "message", "function_call"}
_RESULT_NAMES = {"response.completed", "response.incomplete", "response.failed", "response.done"}


def write_body(
    model: str, request: CompletionRequest, form: Form, tools_of: CompletionRequest | None = None
) -> dict[str, Any]:
    """The request body. The provider stores nothing; the model's reasoning comes encrypted, and is sent back."""
    body: dict[str, Any] = {
        "model": model,
        "max_output_tokens": request.max_output_tokens,
        "input": [item for message in request.messages for item in _items(message, form)],
    }
    if request.system:
        body["instructions"] = request.system
    if form.says_store:
        body["store"] = False
    if form.keeps:
        body["include"] = ["reasoning.encrypted_content"]
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": False,
            }
            for tool in request.tools
        ]
        body["tool_choice"] = "required" if form.call is CallForm.FORCED else "auto"
    if form.call is CallForm.SCHEMA and tools_of is not None:
        schema = {"type": "json_schema", "name": "decision", "schema": decision_schema(tools_of), "strict": False}
        body["text"] = {"format": schema}
    if form.effort:
        body["reasoning"] = {"effort": form.effort}
    return {**body, "stream": True} if form.streams else body


def _items(message: Message, form: Form) -> Iterator[dict[str, Any]]:
    if message.kept and form.keeps:
        yield from message.kept
        return
    for result in message.results:
        yield {"type": "function_call_output", "call_id": result.id, "output": result.text}
    if message.text or not (message.results or message.calls):
        yield {"role": message.role.value, "content": message.text or NOTHING}
    for call in message.calls:
        arguments = to_json(call.arguments or {})
        yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments}


def read_answer(body: dict[str, Any], request: CompletionRequest) -> Answer:
    """The answer in that body; every field may be missing."""
    texts: list[str] = []
    refusals: list[str] = []
    calls: list[ToolCall] = []
    output = body.get("output")
    items = [as_mapping(item) for item in output] if isinstance(output, list) else []
    for item in items:
        if item.get("type") == "function_call":
            given_id = item.get("call_id") or item.get("id")
            calls.append(make_call(given_id, item.get("name"), item.get("arguments"), len(calls)))
        content = item.get("content") if item.get("type") == "message" else None
        for part in map(as_mapping, content if isinstance(content, list) else []):
            texts.append(as_text(part.get("text")))
            refusals.append(as_text(part.get("refusal")))
    why = as_text(as_mapping(body.get("incomplete_details")).get("reason"))
    stop_word = why or as_text(body.get("status"))
    stop = _STOPS.get(why) or _STOPS.get(as_text(body.get("status")), StopReason.OTHER)
    if stop is StopReason.DONE and calls:
        stop = StopReason.TOOL
    if any(refusals) and not calls:
        stop = StopReason.REFUSED
    usage = as_mapping(body.get("usage"))
    details = as_mapping(usage.get("input_tokens_details"))
    cached, written = as_count(details.get("cached_tokens")), as_count(details.get("cache_write_tokens"))
    counted = Usage(
        input_tokens=max(as_count(usage.get("input_tokens")) - cached - written, 0),
        output_tokens=as_count(usage.get("output_tokens")),
        cache_read_tokens=cached,
        cache_write_tokens=written,
        reasoning_tokens=as_count(as_mapping(usage.get("output_tokens_details")).get("reasoning_tokens")),
    )
    thinks = any(item.get("type") == "reasoning" for item in items)
    kept = [{name: value for name, value in item.items() if name != "status"} for item in items]
    return Answer(
        text="\n".join(filter(None, [*texts, *refusals])),
        calls=tuple(calls),
        stop=stop,
        stop_word=stop_word[:40],
        usage=count_usage(counted, request, body),
        kept=keep_blocks([item for item in kept if item.get("type") in _KEPT]) if thinks else (),
    )


def join_stream(events: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return the body that the events of a stream make up, and whether the stream came to its end."""
    items: list[Any] = []
    for event in events:
        if event.get("type") in _RESULT_NAMES:
            body = as_mapping(event.get("response"))
            # some servers leave the output out of the last event
            return {**body, "output": body.get("output") or items}, True
        if event.get("type") == "response.output_item.done":
            items.append(event.get("item"))
    return {"output": items}, False
