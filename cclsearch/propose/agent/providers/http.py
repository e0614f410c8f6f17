"""The HTTP client of both SDKs: an answer is bounded in bytes and in time, and redirects are not followed."""

from __future__ import annotations

import contextlib
import importlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from typing import Any

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.agent.background import start_in_background
from cclsearch.propose.agent.providers.types import ErrorKind, ProviderError

# Far above any real answer.
MAX_ANSWER_BYTES = 4_000_000
"""Size of an answer from which the rest is not read."""
CONNECT_S = 20.0
"""Maximum time to connect."""


def send(create: Callable[..., Any], body: Mapping[str, Any], timeout_s: float) -> bytes:
    """The answer of an SDK's `create` to that body; raises ProviderError, also if it takes longer than the timeout.

    An HTTP library bounds each read, but not a server that sends headers slowly, nor a resolver that hangs. A late
    request is abandoned in its daemon thread.
    """
    answer = start_in_background(lambda: bytes(create(**body).http_response.content), "llm-request")
    max_s = timeout_s + min(CONNECT_S, timeout_s)
    wait([answer], max_s)
    if not answer.done():
        raise ProviderError(ErrorKind.TIMEOUT, f"the answer was not complete after {max_s:g} s")
    try:
        return answer.result()
    except Exception as error:  # the SDK's own errors, and those that its HTTP library does not wrap
        raise to_provider_error(error) from None


def make_http_client(default_client: Any, *, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
    """Return an SDK's own HTTP client, with bounded answers.

    `default_client` is `anthropic.DefaultHttpxClient` or `openai.DefaultHttpxClient`.
    """
    # The HTTP library below it differs between releases, so it is read from the class.
    base = next(cls for cls in default_client.__mro__ if cls.__module__.split(".")[0].startswith("httpx"))
    httpx = importlib.import_module(base.__module__.split(".")[0])

    class BoundedStream(httpx.SyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, inner: Any, deadline_s: float, is_compressed: bool) -> None:
            self._inner = inner
            self._deadline_s = deadline_s
            self._unpack = zlib.decompressobj(wbits=47) if is_compressed else None

        def __iter__(self) -> Iterator[bytes]:
            seen = 0
            for chunk in self._inner:
                if self._unpack:
                    chunk = _unpacked(self._unpack, chunk, max_bytes + 1)
                seen += len(chunk)
                if seen > max_bytes:
                    raise ProviderError(ErrorKind.TOO_LARGE, f"the answer is longer than {max_bytes:,} bytes")
                if time.monotonic() > self._deadline_s:
                    raise ProviderError(ErrorKind.TIMEOUT, f"the answer was not complete after {timeout_s:g} s")
                yield chunk

        def close(self) -> None:
            self._inner.close()

    def ask_plain(request: Any) -> None:
        request.headers["accept-encoding"] = "identity"

    def bound(response: Any) -> None:
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in {"identity", "gzip", "x-gzip", "deflate"}:
            raise ProviderError(ErrorKind.MALFORMED, "the answer is compressed in a way that was not requested")
        # Decompressed here, so that the bound applies to the decompressed bytes.
        response.headers.pop("content-encoding", None)
        response.stream = BoundedStream(response.stream, time.monotonic() + timeout_s, encoding != "identity")

    return default_client(
        timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
        event_hooks={"request": [ask_plain], "response": [bound]},
        follow_redirects=False,
    )


def _unpacked(unpack: Any, chunk: bytes, max_bytes: int) -> bytes:
    try:
        return bytes(unpack.decompress(chunk, max_bytes))
    except zlib.error:
        text = "the answer's header says that it is compressed, but it is not"
        raise ProviderError(ErrorKind.MALFORMED, text) from None


def to_provider_error(error: Exception) -> ProviderError:
    """The ProviderError for an SDK's exception; both SDKs use the same class names, and `status_code`."""
    root: BaseException = error
    while not isinstance(root, ProviderError) and root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, ProviderError):
        return root
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return _of_status(status, _server_message(error), error)
    name = type(error).__name__
    if "Timeout" in name:
        return ProviderError(ErrorKind.TIMEOUT, "no answer in time")
    if "Connection" in name:
        why = f": {_safe(root)}" if root is not error and str(root) else ""
        return ProviderError(ErrorKind.CONNECTION, f"the connection failed or was cut{why}")
    return ProviderError(ErrorKind.MALFORMED, f"{name}: {_safe(error)}")


def find_error(body: Mapping[str, Any]) -> ProviderError | None:
    """Return the error in a body with status 200; None if none."""
    # Gateways send such a body if the server behind them failed.
    found = body.get("error")
    if not found or body.get("choices") or body.get("content"):
        return None
    code = found.get("code") if isinstance(found, Mapping) else None
    status = int(code) if isinstance(code, int | str) and str(code).isdigit() and len(str(code)) == 3 else 500
    return _of_status(max(status, 400), one_line(redact(_message_in(body)), 200), None)


def _of_status(status: int, message: str, error: Exception | None) -> ProviderError:
    codes = {str(getattr(error, name, "")) for name in ("code", "type")}
    kind = _kind_of_status(status, f"{message} {' '.join(sorted(codes))}")
    hint = ""
    if 300 <= status < 400:
        hint = " (the server redirects, which is not followed: use the final address)"
    elif kind is ErrorKind.UNKNOWN_MODEL and "model" not in message.lower():
        hint = " (unknown path or model: is the address right, with its /v1?)"
    shown = "" if message == str(status) else f": {message}"
    return ProviderError(kind, f"HTTP {status}{shown}{hint}", _retry_after_s(error))


def _server_message(error: Exception) -> str:
    """Return the server's message, which not every SDK repeats; the SDK's own message if the server sent none."""
    message = one_line(redact(_message_in(getattr(error, "body", None))), 300)
    return message or _safe(error).removeprefix("Error code: ")


def _message_in(body: object) -> str:
    """The message in an error's body: `{"error": {"message": ...}}`, `{"detail": ...}`, `{"error": "..."}`, or text."""
    if isinstance(body, Mapping):
        return next((_message_in(body[key]) for key in ("error", "message", "detail", "msg") if body.get(key)), "")
    if isinstance(body, list):
        return "; ".join(_message_in(item) for item in body[:3])
    return body[:2000] if isinstance(body, str) else ""


def _safe(error: BaseException) -> str:
    return one_line(redact(str(error)), 300)


def _kind_of_status(status: int, message: str) -> ErrorKind:
    if status == 429:
        # A used-up quota answers 429 too, and waiting does not help.
        return ErrorKind.AUTHENTICATION if "insufficient_quota" in message else ErrorKind.RATE_LIMIT
    if status in {401, 402, 403}:
        return ErrorKind.AUTHENTICATION
    if status == 404:
        return ErrorKind.UNKNOWN_MODEL
    if status == 529 or status == 503:
        return ErrorKind.OVERLOADED
    if status in {408, 409, 425, 504}:
        return ErrorKind.TIMEOUT
    return ErrorKind.SERVER if status >= 500 else ErrorKind.BAD_REQUEST


def _retry_after_s(error: Exception | None) -> float | None:
    """Seconds to wait according to the server; None if it gives none or an invalid value."""
    from email.utils import parsedate_to_datetime

    headers = getattr(getattr(error, "response", None), "headers", {})
    ways: tuple[tuple[str, Callable[[str], float]], ...] = (
        ("retry-after-ms", lambda given: float(given) * 0.001),
        ("retry-after", float),
        ("retry-after", lambda date: parsedate_to_datetime(date).timestamp() - time.time()),
    )
    for name, read_s in ways:
        with contextlib.suppress(KeyError, ValueError, TypeError, OverflowError):
            seconds = read_s(headers[name])
            return max(seconds, 0.0) if seconds == seconds and seconds != float("inf") else None
    return None
