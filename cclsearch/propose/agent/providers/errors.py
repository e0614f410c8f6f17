"""Say what a provider's failure is, from its status, code, type, parameter and message."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.agent.providers.types import ErrorKind, ProviderError

_KINDS = (
    # An empty account answers with 400, 402, 403 or 429; waiting does not help.
    (
        ErrorKind.EMPTY_ACCOUNT,
        r"insufficient[_ ](quota|balance|credits?|funds)|billing_(not_active|error|hard_limit)|credit[_ ]balance|"
        r"exceeded_current_quota|\b1113\b|out of credits|recharge|arrear|payment required|requires more credits|"
        r"(spend|usage)_limit_(reached|exceeded)|usage limit (reached|exceeded)|reached your usage limit|"
        r"code=1(3(0[89]|1[0134-9]|2[01]))\b|reached your (specified )?api usage limits|no (active )?credits|top up",
    ),
    (
        ErrorKind.FILTERED,
        r"content_filter|content management policy|data_inspection_failed|datainspectionfailed|"
        r"inappropriate content|prohibited_content|\bflagged|moderation|invalid_prompt|blocked by .{0,40}guardrail|"
        r"content (policy|moderation)|content exists risk",
    ),
    (
        ErrorKind.BAD_GENERATION,
        r"tool_use_failed|failed to (call a function|parse (the )?(tool|function|input|generat))|"
        r"(error|failed) (while )?parsing (the )?tool[_ ]?call|malformed_function_call|output_parse_failed|"
        r"json_validate_failed|failed to generate (valid )?json|invalid tool call|could not parse .{0,30}(tool|model)",
    ),
    (
        ErrorKind.AUTHENTICATION,
        r"invalid[_ ]api[_ ]?key|incorrect api key|api[_ ]?key (is )?(not valid|invalid|missing|required|expired)|"
        r"authentication_error|invalid x-api-key|no api key|unauthorized|unauthenticated",
    ),
    (
        ErrorKind.UNKNOWN_MODEL,
        r"model_not_found|model_not_exist|unknown[_ ]model|unsupported[_ ]model\b|invalid[_ ]model\b|"
        r"model.{0,80}(not found|does not exist|doesn't exist|not exist|no longer (available|supported)|"
        r"has been (retired|deprecated|decommissioned)|is not a valid|invalid model|"
        r"is not available|could not be found)|"
        r"model_decommissioned|no such model|deploymentnotfound|not_found_error.*model|no endpoints found|"
        r"not a valid model",
    ),
    (ErrorKind.RATE_LIMIT, r"rate_limit_error|rate_limit_exceeded|too many requests"),
    (ErrorKind.OVERLOADED, r"overloaded|no capacity|at capacity|engine_overloaded|server_is_busy"),
)
"""Kind of an error -> the words that name it; the first that matches counts, whatever the status."""
_FORM = re.compile(
    r"\b(tool|function|schema|response_format|stream|max_\w*tokens|parameter|v1/(responses|chat/completions))"
)
"""Words of a complaint about the form of a request, which another form may cure."""
_AFFORDABLE = re.compile(r"can only afford (\d{4,})")
_RETRY_WORDS = re.compile(r"(?:retry|try again) (?:in|after) (?:(\d+)m)?(\d+(?:\.\d+)?) ?(ms|s)", re.IGNORECASE)
_TITLE = re.compile(rb"<title[^>]*>([^<]{0,200})", re.IGNORECASE)
_FINAL = {401: ErrorKind.AUTHENTICATION, 402: ErrorKind.EMPTY_ACCOUNT, 403: ErrorKind.AUTHENTICATION}
_LATER = {
    **dict.fromkeys((408, 409, 425, 504, 524), ErrorKind.TIMEOUT),
    **dict.fromkeys((503, 529), ErrorKind.OVERLOADED),
    429: ErrorKind.RATE_LIMIT,
}


def read_status_error(status: int, content: bytes, headers: Mapping[str, str]) -> ProviderError:
    """Return the error of an answer with that status."""
    if is_page(content, headers):
        return _read_page(status, content, headers)
    try:
        body: object = json.loads(content.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        body = content.decode("utf-8", "replace")
    return _read_body(status, body, headers)


def find_error(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> ProviderError | None:
    """Return the error in a body with status 200, as gateways send it if the server behind them failed; else None."""
    found = body.get("error") or (body.get("type") == "error" and body)
    has_answer = any(body.get(name) for name in ("choices", "content", "output"))
    if not found or (has_answer and body.get("status") != "failed"):
        return None
    code = found.get("code") if isinstance(found, Mapping) else None
    status = int(code) if isinstance(code, int | str) and str(code).isdigit() and len(str(code)) == 3 else 500
    return _read_body(max(status, 400), body, headers or {})


def is_page(content: bytes, headers: Mapping[str, str]) -> bool:
    """Whether the body is a page for a browser."""
    start = content[:200].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    is_named = "text/html" in headers.get("content-type", "") and not start.startswith((b"{", b"["))
    return is_named or start.startswith((b"<!doctype", b"<html", b"<head"))


def _read_page(status: int, content: bytes, headers: Mapping[str, str]) -> ProviderError:
    """Return the error of a web page: a proxy or a portal answered, or the address is not the API's."""
    found = _TITLE.search(content[:20_000])
    title = one_line(redact(found[1].decode("utf-8", "replace")), 100) if found else ""
    what = f"HTTP {status}: a web page answered{f' ({title!r})' if title else ''}, not an API"
    if status == 407:
        return ProviderError(ErrorKind.NOT_AN_API, f"{what}: the proxy refuses; check HTTPS_PROXY and its password")
    if status in _LATER or status >= 500:
        kind = _LATER.get(status, ErrorKind.SERVER)
        return ProviderError(kind, what, _retry_after_s(headers, ""), may_have_cost=kind is ErrorKind.TIMEOUT)
    return ProviderError(ErrorKind.NOT_AN_API, f"{what}: is the address right, with its /v1? Does a proxy sign you in?")


def _read_body(status: int, body: object, headers: Mapping[str, str]) -> ProviderError:
    message = _message_in(body)
    words = " ".join(dict.fromkeys([*_labels_in(body), message]))
    retry_s = _retry_after_s(headers, message + (json.dumps(body)[:4000] if not isinstance(body, str) else ""))
    kind = _find_kind(status, words, retry_s)
    hint = ""
    if 300 <= status < 400:
        hint = " (the server redirects, which is not followed: use the final address)"
    elif kind is ErrorKind.NOT_AN_API:
        hint = " (unknown path: is the address right, with its /v1?)"
    elif kind is ErrorKind.UNKNOWN_MODEL and "model" not in message.lower():
        hint = " (unknown model)"
    safe = one_line(redact(message), 300)
    shown = "" if safe in ("", str(status)) else f": {safe}"
    is_form = kind is ErrorKind.BAD_REQUEST or kind is ErrorKind.SERVER
    worked = kind in {ErrorKind.TIMEOUT, ErrorKind.BAD_GENERATION}
    refused = words[:4000] if is_form else ""
    return ProviderError(kind, f"HTTP {status}{shown}{hint}", retry_s, refused=refused, may_have_cost=worked)


def _find_kind(status: int, words: str, retry_s: float | None) -> ErrorKind:
    low = words.lower()
    named = next((kind for kind, pattern in _KINDS if re.search(pattern, low)), None)
    if _AFFORDABLE.search(low):
        return ErrorKind.BAD_REQUEST  # for fewer output tokens the account is not empty
    if named is ErrorKind.EMPTY_ACCOUNT and status == 429 and retry_s is not None:
        return ErrorKind.RATE_LIMIT  # a quota a minute: some servers call it by the same words
    if named is ErrorKind.UNKNOWN_MODEL and (status not in {400, 403, 404, 410, 422} or _FORM.search(low)):
        named = None
    if named is ErrorKind.AUTHENTICATION and status in {429, *range(500, 600)}:
        named = None
    if named is ErrorKind.OVERLOADED and status < 429:
        named = None
    if named is not None:
        return named
    if status == 429 and "quota" in low and "billing" in low and retry_s is None:
        return ErrorKind.EMPTY_ACCOUNT
    if status in _LATER or status in _FINAL:
        return _LATER.get(status) or _FINAL[status]
    if status in {404, 405}:
        # A gateway answers 404, too, if none of its servers has what the request asks for.
        is_form = _FORM.search(low) and "invalid url" not in low
        return ErrorKind.BAD_REQUEST if is_form else ErrorKind.NOT_AN_API
    return ErrorKind.SERVER if status >= 500 and status != 501 else ErrorKind.BAD_REQUEST


def _message_in(body: object) -> str:
    """The message in an error's body: `{"error": {"message": ...}}`, `{"detail": ...}`, `{"error": "..."}`, or text."""
    if isinstance(body, Mapping):
        names = ("error", "message", "detail", "msg", "error_message", "errors")
        text = next((_message_in(body[key]) for key in names if body.get(key)), "")
        # a gateway puts the words of the server behind it into its metadata
        raw = body.get("metadata")
        inner = _message_in(raw.get("raw")) if isinstance(raw, Mapping) else ""
        return f"{text}: {inner}" if inner else text
    if isinstance(body, list):
        return "; ".join(_message_in(item) for item in body[:3])
    if not isinstance(body, str):
        return ""
    text = body[:4000].strip()
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            return _message_in(json.loads(text)) or text
    return text


def _labels_in(body: object) -> Iterator[str]:
    """Code, type, status and parameter of an error, at any depth of its body."""
    if isinstance(body, Mapping):
        for name, value in body.items():
            if name == "flagged_input":
                yield "flagged"
            elif name in {"code", "type", "param", "status", "loc", "reason", "error_code", "failed_generation"}:
                parts = value if isinstance(value, list) else [value]
                yield from (f"{name}={part}" for part in parts if isinstance(part, str | int) and part)
            elif isinstance(value, Mapping | list):
                yield from _labels_in(value)
    elif isinstance(body, list):
        for item in body[:5]:
            yield from _labels_in(item)


def _retry_after_s(headers: Mapping[str, str], text: str) -> float | None:
    """Seconds to wait according to the server; None if it gives none or an invalid value."""
    from email.utils import parsedate_to_datetime

    ways: tuple[tuple[str, Callable[[str], float]], ...] = (
        ("retry-after-ms", lambda given: float(given) * 0.001),
        ("retry-after", float),
        ("retry-after", lambda date: parsedate_to_datetime(date).timestamp() - time.time()),
    )
    for name, read_s in ways:
        with contextlib.suppress(KeyError, ValueError, TypeError, OverflowError):
            seconds = read_s(headers[name])
            return max(seconds, 0.0) if seconds == seconds and seconds != float("inf") else None
    found = _RETRY_WORDS.search(text) or re.search(r'"retryDelay": ?"()(\d+(?:\.\d+)?)(s)"', text)
    if found is None:
        return None
    return (float(found[1] or 0) * 60 + float(found[2])) * (0.001 if found[3] == "ms" else 1.0)
