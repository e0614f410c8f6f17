"""Parses a provider's answer: every field may be missing, of another type, or huge."""

from __future__ import annotations

import json
import math
from typing import Any

from cclsearch.propose.agent.providers.http import find_error
from cclsearch.propose.agent.providers.types import (
    BYTES_PER_TOKEN,
    CompletionRequest,
    ErrorKind,
    ProviderError,
    ToolCall,
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


def parse_body(content: bytes) -> dict[str, Any]:
    """The body as a JSON object; raises ProviderError if it is not one, or if it only reports an error."""
    try:
        body = _clean(json.loads(content))
    except (ValueError, RecursionError):
        raise ProviderError(ErrorKind.MALFORMED, "the answer's body is not JSON") from None
    if not isinstance(body, dict):
        raise ProviderError(ErrorKind.MALFORMED, "the answer's body is not a JSON object")
    error = find_error(body)
    if error:
        raise error
    return body


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


def find_call_in_text(text: str, tool_names: set[str]) -> ToolCall | None:
    """A call written as text, `{"tool": NAME, "arguments": {...}}`, with or without prose around it; None if none."""
    if len(text) > MAX_ARGUMENTS:
        return None
    start = text.find("{")
    for _ in range(MAX_BRACES):
        if start < 0:
            return None
        found = _call_at(text, start, tool_names)
        if found:
            return found
        start = text.find("{", start + 1)
    return None


def _call_at(text: str, start: int, tool_names: set[str]) -> ToolCall | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = value.get("tool", value.get("name"))
    if not isinstance(name, str) or name not in tool_names:
        return None
    arguments = value.get("arguments", value.get("parameters", value.get("input", {})))
    return make_call(None, name, arguments, 0)


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
