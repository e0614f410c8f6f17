"""The HTTP client of both SDKs: an answer is bounded in bytes and in time, and redirects are not followed."""

from __future__ import annotations

import importlib
import os
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from cclsearch.core.errors import UserError
from cclsearch.core.offline import is_local_host
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.agent.background import start_in_background
from cclsearch.propose.agent.providers.errors import read_status_error
from cclsearch.propose.agent.providers.types import ErrorKind, ProviderError

# Far above any real answer.
MAX_ANSWER_BYTES = 4_000_000
"""Size of an answer from which the rest is not read."""
CONNECT_S = 20.0
"""Maximum time to connect."""
PROXY_NAMES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "http_proxy", "all_proxy")
CERTIFICATE_NAMES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
ENVIRONMENT_NAMES = (*PROXY_NAMES, *CERTIFICATE_NAMES, "NO_PROXY", "no_proxy")
"""Variables that decide how the HTTP library connects."""


@dataclass(frozen=True)
class RawAnswer:
    """The bytes of an answer with a good status."""

    content: bytes
    headers: Mapping[str, str]


def send(create: Callable[..., Any], body: Mapping[str, Any], timeout_s: float) -> RawAnswer:
    """The answer of an SDK's `create` to that body; raises ProviderError, also if it takes longer than the timeout.

    An HTTP library bounds each read, but not a server that sends headers slowly, nor a resolver that hangs. A late
    request is abandoned in its daemon thread.
    """

    def exchange() -> RawAnswer:
        response = create(**body).http_response
        response.read()  # also of a stream: it is bounded, and read as a whole
        return RawAnswer(bytes(response.content), {k.lower(): v for k, v in response.headers.items()})

    answer = start_in_background(exchange, "llm-request")
    max_s = timeout_s + min(CONNECT_S, timeout_s)
    wait([answer], max_s)
    if not answer.done():
        raise ProviderError(ErrorKind.TIMEOUT, f"the answer was not complete after {max_s:g} s", may_have_cost=True)
    try:
        return answer.result()
    except Exception as error:  # the SDK's own errors, and those that its HTTP library does not wrap
        raise to_provider_error(error) from None


def make_http_client(default_client: Any, address: str, *, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
    """Return an SDK's own HTTP client for that address, with bounded answers.

    `default_client` is `anthropic.DefaultHttpxClient` or `openai.DefaultHttpxClient`. Raises UserError that names the
    environment variable if the HTTP library cannot use a proxy or a certificate of the environment.
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
                    text = f"the answer is longer than {max_bytes:,} bytes"
                    raise ProviderError(ErrorKind.TOO_LARGE, text, may_have_cost=True)
                if time.monotonic() > self._deadline_s:
                    text = f"the answer was not complete after {timeout_s:g} s"
                    raise ProviderError(ErrorKind.TIMEOUT, text, may_have_cost=True)
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

    options: dict[str, Any] = {
        "timeout": httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
        "event_hooks": {"request": [ask_plain], "response": [bound]},
        "follow_redirects": False,
    }
    if is_local_host(urlsplit(address).hostname or ""):
        # No proxy reaches this machine's own loopback.
        options |= {"transport": httpx.HTTPTransport(trust_env=False), "trust_env": False}
    try:
        return default_client(**options)
    except Exception as error:
        raise _explain_environment(error) from None


def _explain_environment(error: Exception) -> UserError:
    """Return the UserError for a client that cannot be made: it names the variable that the library stumbled over."""
    text = one_line(redact(str(error)), 200)
    named = {name: os.environ[name].strip() for name in ENVIRONMENT_NAMES if os.environ.get(name, "").strip()}
    without = "; or search without the LLM: --llm none"
    certificates = [name for name in CERTIFICATE_NAMES if name in named]
    if certificates and isinstance(error, OSError | ssl.SSLError):
        return UserError(f"{certificates[0]}={named[certificates[0]]}: {text}; name a readable PEM file{without}")
    proxies = {name: value for name, value in named.items() if name in PROXY_NAMES}
    socks = [name for name, value in proxies.items() if value.lower().startswith("socks")]
    if isinstance(error, ImportError) and socks:
        return UserError(f"{socks[0]} is a SOCKS proxy: install `pip install socksio`, or unset it{without}")
    wrong = [name for name, value in proxies.items() if not _is_proxy(value)]
    excluded = [name for name in ("NO_PROXY", "no_proxy") if name in named]
    if wrong:
        return UserError(f"{wrong[0]} is not the address of a proxy ({text}): write http://HOST:PORT{without}")
    if excluded:
        entries = [entry for entry in named[excluded[0]].split(",") if entry.count(":") > 1]
        entry = f", probably at {', '.join(entries)}" if entries else ""
        return UserError(f"{excluded[0]} cannot be read{entry} ({text}): leave such entries out{without}")
    names = ", ".join(named) or "the environment"
    return UserError(f"the HTTP client of the LLM cannot be made ({text}): check {names}{without}")


def _is_proxy(value: str) -> bool:
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        return parts.scheme in {"http", "https", "socks5", "socks5h"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _unpacked(unpack: Any, chunk: bytes, max_bytes: int) -> bytes:
    try:
        return bytes(unpack.decompress(chunk, max_bytes))
    except zlib.error:
        text = "the answer's header says that it is compressed, but it is not"
        raise ProviderError(ErrorKind.MALFORMED, text) from None


def to_provider_error(error: Exception) -> ProviderError:
    """The ProviderError for an SDK's exception; both SDKs use the same class names, and `status_code`."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None and len(chain) < 20:
        chain.append(chain[-1].__cause__)
    for part in chain:
        if isinstance(part, ProviderError):
            return part
        # the standard library's own errors say most, and stand below the HTTP library's as its context
        if part.__context__ is not None and part.__cause__ is None and len(chain) < 20:
            chain.append(part.__context__)
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        response = getattr(error, "response", None)
        headers = {str(k).lower(): str(v) for k, v in dict(getattr(response, "headers", {})).items()}
        return read_status_error(status, _content_of(response), headers)
    return _read_connection_error(error, chain)


def _content_of(response: Any) -> bytes:
    try:
        return bytes(response.read())
    except Exception:  # the body was cut, or is longer than its bound: the status says enough
        return b""


def _read_connection_error(error: Exception, chain: list[BaseException]) -> ProviderError:
    root = chain[-1]
    why = f": {_safe(root)}" if root is not error and str(root) else ""
    names = {cls.__name__ for part in chain for cls in type(part).__mro__}
    words = " ".join(str(part) for part in chain)
    if any(isinstance(part, socket.gaierror) for part in chain) or "Name or service not known" in words:
        return ProviderError(ErrorKind.UNKNOWN_HOST, f"the host of the address is not known{why}")
    if "CERTIFICATE_VERIFY_FAILED" in words:
        remedy = "set SSL_CERT_FILE to the certificate of your proxy or server"
        return ProviderError(ErrorKind.CERTIFICATE, f"the server's certificate is refused{why}; {remedy}")
    if "WRONG_VERSION_NUMBER" in words or "record layer failure" in words or "HTTP_REQUEST" in words:
        text = f"the server at the address does not speak TLS{why}: is it http:// in place of https://?"
        return ProviderError(ErrorKind.NOT_AN_API, text)
    if "ProxyError" in names:
        proxies = [name for name in PROXY_NAMES if os.environ.get(name)]
        return ProviderError(ErrorKind.CONNECTION, f"the proxy ({', '.join(proxies)}) refuses the connection{why}")
    if "Timeout" in type(error).__name__:
        is_sent = not names & {"ConnectTimeout", "PoolTimeout"}
        return ProviderError(ErrorKind.TIMEOUT, "no answer in time", may_have_cost=is_sent)
    if "LocalProtocolError" in names or any(isinstance(part, UnicodeEncodeError) for part in chain):
        return ProviderError(ErrorKind.AUTHENTICATION, "the key has characters that no HTTP header may have")
    if "RemoteProtocolError" in names and "illegal" in words.lower():
        return ProviderError(ErrorKind.NOT_AN_API, f"the server at the address does not speak HTTP{why}")
    if {"UnsupportedProtocol", "InvalidURL"} & names:
        return ProviderError(ErrorKind.NOT_AN_API, f"the address is not a URL{why}")
    if "Connection" in type(error).__name__ or {"TransportError", "OSError"} & names:
        is_sent = not names & {"ConnectError", "ConnectionRefusedError"}
        return ProviderError(ErrorKind.CONNECTION, f"the connection failed or was cut{why}", may_have_cost=is_sent)
    return ProviderError(ErrorKind.MALFORMED, f"{type(error).__name__}: {_safe(error)}")


def _safe(error: BaseException) -> str:
    return one_line(redact(str(error)), 300)
