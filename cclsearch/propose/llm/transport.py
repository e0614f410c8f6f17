"""The HTTP client under both SDKs: an answer is bounded in bytes and in time, and never redirected."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

from cclsearch.propose.llm.wire import ProviderError, Trouble
from cclsearch.redact import redact
from cclsearch.text import one_line

MAX_ANSWER_BYTES = 4_000_000
"""No honest answer comes near; what is longer is cut off unread."""


class AnswerTooLargeError(Exception):
    """The body passed the limit."""


class AnswerTooSlowError(Exception):
    """The body kept dripping past the deadline."""


def make_http_client(default_client: Any, *, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
    """An SDK's own HTTP client class, with bounded answers.

    `default_client` is `anthropic.DefaultHttpxClient` or `openai.DefaultHttpxClient`; which HTTP library lies beneath
    differs between releases, so it is taken from there.
    """
    base = next(cls for cls in default_client.__mro__ if cls.__module__.split(".")[0].startswith("httpx"))
    httpx = importlib.import_module(base.__module__.split(".")[0])

    class BoundedStream(httpx.SyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, inner: Any, deadline_s: float) -> None:
            self._inner = inner
            self._deadline_s = deadline_s

        def __iter__(self) -> Iterator[bytes]:
            seen = 0
            for chunk in self._inner:
                seen += len(chunk)
                if seen > max_bytes:
                    raise AnswerTooLargeError(f"the answer is longer than {max_bytes:,} bytes")
                if time.monotonic() > self._deadline_s:
                    raise AnswerTooSlowError(f"the answer was not complete after {timeout_s:g} s")
                yield chunk

        def close(self) -> None:
            self._inner.close()

    def ask_plain(request: Any) -> None:
        request.headers["accept-encoding"] = "identity"

    def bound(response: Any) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise AnswerTooLargeError("the answer is compressed, which was not asked for")
        response.stream = BoundedStream(response.stream, time.monotonic() + timeout_s)

    return default_client(
        timeout=httpx.Timeout(timeout_s, connect=min(20.0, timeout_s)),
        event_hooks={"request": [ask_plain], "response": [bound]},
        follow_redirects=False,
    )


def to_provider_error(error: Exception) -> ProviderError:
    """What an SDK's exception means; both SDKs use the same class names, and `status_code` on answers of the server."""
    words = one_line(redact(str(error)), 300)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AnswerTooLargeError):
            return ProviderError(Trouble.TOO_LARGE, str(cause))
        if isinstance(cause, AnswerTooSlowError):
            return ProviderError(Trouble.TIMEOUT, str(cause))
        cause = cause.__cause__
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return ProviderError(_trouble_of(status, words), f"HTTP {status}: {words}", _retry_after_s(error))
    name = type(error).__name__
    if "Timeout" in name:
        return ProviderError(Trouble.TIMEOUT, "no answer in time")
    if "Connection" in name:
        return ProviderError(Trouble.CONNECTION, "the connection failed or was cut")
    return ProviderError(Trouble.MALFORMED, f"{name}: {words}")


def _trouble_of(status: int, words: str) -> Trouble:
    if status == 429:
        # A used-up quota answers 429 too, and no waiting helps.
        return Trouble.AUTHENTICATION if "insufficient_quota" in words else Trouble.RATE_LIMIT
    if status in {401, 403}:
        return Trouble.AUTHENTICATION
    if status == 404:
        return Trouble.UNKNOWN_MODEL
    if status == 529 or status == 503:
        return Trouble.OVERLOADED
    if status in {408, 409, 504}:
        return Trouble.TIMEOUT
    return Trouble.SERVER if status >= 500 else Trouble.BAD_REQUEST


def _retry_after_s(error: Exception) -> float | None:
    """Seconds that the server asks us to wait; None where it does not say or says nonsense."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    try:
        if "retry-after-ms" in headers:
            return _plausible(float(headers["retry-after-ms"]) / 1000)
        return _plausible(float(headers["retry-after"]))
    except KeyError:
        return None
    except ValueError:
        return _seconds_until(headers["retry-after"])


def _seconds_until(date: str) -> float | None:
    from email.utils import parsedate_to_datetime

    try:
        return _plausible(parsedate_to_datetime(date).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _plausible(seconds: float) -> float | None:
    return max(seconds, 0.0) if seconds == seconds and seconds != float("inf") else None
