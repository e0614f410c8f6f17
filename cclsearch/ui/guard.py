"""Keep the pages safe: check the host, limit a page's sources and who may change something, mask secrets in text."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import only_inside
from cclsearch.core.secrets.names import is_secret_name
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine. A page of another name that resolves to it (DNS rebinding) is refused."""
TOKEN_HEADER = "x-ccl-token"
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src-elem 'self'",
        "style-src-attr 'unsafe-inline'",  # Vega places marks and tooltips with style attributes
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Refuses requests for another host than this machine, adds the headers that browsers enforce, and lets no request
    open what is not a regular file of the runs.
    """

    def __init__(self, app: ASGIApp, runs: Path) -> None:
        self.app, self._runs = app, runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or _name_of(hosts[0]) not in LOOPBACK:
            text = "this address is not served: open http://127.0.0.1 with the port that the terminal printed\n"
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send_guarded({"type": "http.response.start", "status": 421, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode()})
            return
        with only_inside(self._runs):
            await self.app(scope, receive, send_guarded)


def _name_of(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()


@dataclass(frozen=True)
class Permissions:
    """Changes that the pages allow, and the secret that a change must carry."""

    notes: bool = False
    """Whether tags and notes may be added."""
    start: bool = False
    """Whether searches may be started and stopped."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def any(self) -> bool:
        return self.notes or self.start

    def check(self, request: Request, *, may: bool, option: str) -> None:
        """Raise UserError unless the request may change something: allowed, from these pages, with the token."""
        if not may:
            raise UserError(f"these pages only read: start `ccl-search ui` with {option} to change this")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != request.headers["host"].lower():
            raise UserError("the request came from another page")
        if not secrets.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), self.token.encode()):
            raise UserError("the token is missing or old: open the address that the terminal printed")


MAX_TEXT = 2000


@cache
def _environment() -> dict[str, str]:
    """Variables of this process that may hold secrets; they do not change while the server runs."""
    return {name: value for name, value in os.environ.items() if is_secret_name(name) or "://" in value}


@lru_cache(maxsize=20_000)
def clean(text: str) -> str:
    """The text as one safe line without secrets; most texts of a table recur."""
    return one_line(redact(text, _environment()), MAX_TEXT)
