"""Parses a provider's answer: every field may be missing, of another type, or huge."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cclsearch.propose.agent.providers.errors import find_error, is_page, read_status_error
from cclsearch.propose.agent.providers.types import (
    BYTES_PER_TOKEN,
    MAX_KEPT_BYTES,
    CompletionRequest,
    ErrorKind,
    ProviderError,
    ToolCall,
    ToolSpec,
    Usage,
)

MAX_TEXT = 20_000
"""Characters of free text that are kept from one answer."""
MAX_ARGUMENTS = 40_000
"""Maximum characters of one call's arguments; longer ones are a fault."""
MAX_CALLS = 16
"""Calls of one answer that are read."""
# A model's reasoning may contain braces too.
MAX_BRACES = 200
"""Number of opening braces at which a call in a text is searched."""
_MAX_DEPTH = 40


JoinStream = Callable[[Sequence[dict[str, Any]]], tuple[dict[str, Any], bool]]


def parse_body(content: bytes, headers: Mapping[str, str], join_stream: JoinStream) -> dict[str, Any]:
    """The body as a JSON object; raises ProviderError if it is not one, or if it only reports an error.

    A stream of events is joined, whether it was asked for or not.
    """
    # Gateways write comments or blanks while the server behind them works.
    content = re.sub(rb"\A(?:\s*:[^\n]*\n)+\s*(?=[{\[])", b"", content.removeprefix(b"\xef\xbb\xbf").strip())
    if is_page(content, headers):
        raise read_status_error(200, content, headers)
    is_stream = content.startswith((b"data:", b"event:", b":", b"id:", b"retry:"))
    if is_stream:
        events = list(_read_events(content))
        if error := next((found for event in events if (found := _find_event_error(event))), None):
            raise error
        body, is_whole = join_stream(events)
        if not is_whole and b"[DONE]" not in content[-200:]:
            raise ProviderError(ErrorKind.CONNECTION, "the stream was cut before its end", may_have_cost=True)
    else:
        try:
            body = _clean(json.loads(content))
        except (ValueError, RecursionError):
            raise ProviderError(ErrorKind.MALFORMED, "the answer's body is not JSON", may_have_cost=True) from None
    if isinstance(body, list) and len(body) == 1:
        body = body[0]
    if not isinstance(body, dict):
        raise ProviderError(ErrorKind.MALFORMED, "the answer's body is not a JSON object")
    error = find_error(body, headers)
    if error:
        raise error
    return body


def _read_events(content: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events; lines of other kinds are comments of gateways."""
    events: list[dict[str, Any]] = []
    text = re.sub(r"\r\n?", "\n", content.decode("utf-8", "replace"))
    for block in text.split("\n\n"):
        data = [line.removeprefix("data:").strip() for line in block.split("\n") if line.startswith("data:")]
        whole = _parse_event("\n".join(data))
        # some servers leave out the blank line between events
        events += [whole] if whole is not None else [event for line in data if (event := _parse_event(line))]
    return events


def _parse_event(data: str) -> dict[str, Any] | None:
    try:
        event = _clean(json.loads(data)) if data else None
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _find_event_error(event: dict[str, Any]) -> ProviderError | None:
    """Return the error that an event of a stream reports; None if it reports none."""
    response = as_mapping(event.get("response"))
    if event.get("type") == "error" or event.get("error"):
        return find_error({"error": event.get("error") or {k: v for k, v in event.items() if k != "type"}})
    if event.get("type") == "response.failed" and response.get("error"):
        return find_error({"error": response["error"]})
    return None


def _clean(value: Any, depth: int = 0) -> Any:
    """The value without content that JSON or UTF-8 cannot write: lone surrogates, NaN, huge numbers, deep nesting."""
    if depth > _MAX_DEPTH:
        return None
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case float():
            return value if math.isfinite(value) else None
        case int():
            return value if abs(value) < 2**63 else None
        case list():
            return [_clean(item, depth + 1) for item in value]
        case dict():
            return {_clean(key): _clean(item, depth + 1) for key, item in value.items()}
    return value


def as_mapping(value: object) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_text(value: object) -> str:
    """The value, bounded, if it is text, else an empty text."""
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def as_count(value: object) -> int:
    """The value if it is a plausible count, else 0."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12
    return value if is_count else 0  # type: ignore[return-value]


def make_call(call_id: object, name: object, arguments: object, position: int) -> ToolCall:
    """One call from its raw parts; arguments may be an object or JSON text."""
    given_id = call_id if isinstance(call_id, str) and 0 < len(call_id) <= 100 else f"call_{position}"
    given_name = name[:80] if isinstance(name, str) and name else "(no name)"
    parsed, fault = _parse_arguments(arguments)
    return ToolCall(id=given_id, name=given_name, arguments=parsed, fault=fault)


def settle_calls(calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
    """The calls with the names of our tools, and with arguments of the schema's types, where that is certain.

    Servers decorate names (`functions.submit`, `submit:0`); models write a list or an object as JSON text.
    """
    named = {tool.name: tool for tool in tools}
    settled = []
    for call in calls:
        name = _plain_name(call.name, named)
        if name in named and call.arguments is not None:
            call = call.model_copy(update={"arguments": _unpack(call.arguments, named[name].parameters)})
        settled.append(call.model_copy(update={"name": name}))
    return tuple(settled)


def _plain_name(name: str, known: Mapping[str, object]) -> str:
    if name in known:
        return name
    words = [word for word in re.split(r"[^A-Za-z0-9_-]+", name) if word]
    found = {word.lower().replace("-", "_") for word in words} & set(known)
    found = found or {word for word in known if any(re.fullmatch(rf"(\w+__)?{word}(_\d+)?", part) for part in words)}
    return found.pop() if len(found) == 1 else name


def _unpack(value: Any, schema: Mapping[str, Any], depth: int = 0) -> Any:
    """The value with JSON text read where the schema wants a list or an object, at any depth."""
    kind = schema.get("type")
    if isinstance(value, str) and kind in {"array", "object"} and depth < _MAX_DEPTH:
        try:
            read = _clean(json.loads(value))
        except (ValueError, RecursionError):
            return value
        if not isinstance(read, list | dict):
            return value
        value = read
    if isinstance(value, dict):
        fields = schema.get("properties") or {}
        return {name: _unpack(item, fields.get(name) or {}, depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_unpack(item, schema.get("items") or {}, depth + 1) for item in value]
    return value


def find_call_in_text(text: str, tools: Sequence[ToolSpec]) -> ToolCall | None:
    """A call written as text, in one of the forms of chat templates, with or without prose around it; None if none."""
    if len(text) > MAX_ARGUMENTS:
        return None
    named = {tool.name: tool for tool in tools}
    # A model may think aloud about a call before it decides.
    for part in (text.rpartition("</think>")[2], text):
        call = _find_object(part, named) or _find_tagged(part, named) or _find_named(part, named)
        if call:
            return settle_calls((call,), tools)[0]
    return None


def _find_object(text: str, named: Mapping[str, ToolSpec]) -> ToolCall | None:
    """`{"tool": NAME, "arguments": {...}}` and its kin."""
    start = text.find("{")
    for _ in range(MAX_BRACES):
        if start < 0:
            return None
        found = _call_at(text, start, named)
        if found:
            return found
        start = text.find("{", start + 1)
    return None


def _call_at(text: str, start: int, named: Mapping[str, ToolSpec]) -> ToolCall | None:
    value = _object_at(text, start)
    if value is None:
        return None
    nested = next(
        (value[key] for key in ("function", "tool_call", "function_call") if isinstance(value.get(key), dict)), None
    )
    value = nested or value
    name = next(
        (value[key] for key in ("tool", "name", "tool_name", "function") if isinstance(value.get(key), str)), ""
    )
    name = _plain_name(name, named)
    if name not in named:
        return None
    keys = ("arguments", "parameters", "input", "args", "tool_input")
    arguments = next((value[key] for key in keys if key in value), None)
    if arguments is None:
        arguments = {key: item for key, item in value.items() if key in named[name].parameters.get("properties", {})}
    return make_call(None, name, arguments, 0)


def _object_at(text: str, start: int) -> dict[str, Any] | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_PARAMETER = re.compile(
    r"<parameter(?:=| name=)[\"']?([\w.-]+)[\"']?[^>]*>(.*?)</parameter>"
    r"|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    re.DOTALL,
)


def _find_tagged(text: str, named: Mapping[str, ToolSpec]) -> ToolCall | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...`, as Qwen's, GLM's and Anthropic's templates write it."""
    found = re.search(r"<(?:function=|invoke name=|function name=|tool_call>\s*)[\"']?([\w.:-]+)", text)
    name = _plain_name(found[1], named) if found else ""
    if found is None or name not in named:
        return None
    pairs = [(match[1] or match[3], match[2] or match[4] or "") for match in _PARAMETER.finditer(text, found.end())]
    arguments: dict[str, Any] = {}
    for key, written in pairs:
        try:
            arguments[key.strip()] = json.loads(written)
        except (ValueError, RecursionError):
            arguments[key.strip()] = written.strip()
    return make_call(None, name, arguments, 0) if arguments or not _needed(named[name]) else None


def _find_named(text: str, named: Mapping[str, ToolSpec]) -> ToolCall | None:
    """`NAME {...}`, `NAME({...})` or `NAME<separator>{...}`: the object needs a field that the tool requires."""
    for name, tool in named.items():
        for match in re.finditer(rf"\b{re.escape(name)}\b[^{{}}]{{0,60}}?(?=\{{)", text):
            value = _object_at(text, match.end())
            if value is not None and _needed(tool) & value.keys():
                return make_call(None, name, value, 0)
    return None


def _needed(tool: ToolSpec) -> set[str]:
    return set(tool.parameters.get("required") or ())


def keep_blocks(blocks: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The provider's own blocks, to be sent back; none if they are far larger than any real answer's."""
    return tuple(blocks) if sum(len(json.dumps(block)) for block in blocks) <= MAX_KEPT_BYTES else ()


def count_usage(counted: Usage, request: CompletionRequest, body: dict[str, Any]) -> Usage:
    """The tokens that the provider counted, or an estimate."""
    return counted if counted.total else estimate_usage(request, len(json.dumps(body)))


def estimate_usage(request: CompletionRequest, num_answer_bytes: int) -> Usage:
    """Tokens estimated as bytes / 3, for a provider that gives no count."""
    return Usage(
        input_tokens=-(-request.num_bytes // BYTES_PER_TOKEN),
        output_tokens=-(-num_answer_bytes // BYTES_PER_TOKEN),
        is_estimated=True,
    )


def _parse_arguments(arguments: object) -> tuple[dict[str, Any] | None, str]:
    for _ in range(2):
        # Some servers encode the arguments twice.
        if not isinstance(arguments, str):
            break
        if len(arguments) > MAX_ARGUMENTS:
            return None, f"the arguments are {len(arguments):,} characters long; at most {MAX_ARGUMENTS:,} are read"
        try:
            arguments = _clean(json.loads(arguments or "{}"))
        except (ValueError, RecursionError):
            return None, "the arguments are not valid JSON"
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return None, "the arguments are not a JSON object"
    try:
        num_characters = len(json.dumps(arguments))
    except (ValueError, RecursionError):
        return None, "the arguments are nested too deeply"
    if num_characters > MAX_ARGUMENTS:
        return None, f"the arguments are {num_characters:,} characters long; at most {MAX_ARGUMENTS:,} are read"
    return arguments, ""
