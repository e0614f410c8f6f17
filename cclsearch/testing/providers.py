"""The contract of an LLM provider, against a local HTTP server: answers are read, and every failure has a kind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from cclsearch.propose.agent.providers.kind import PROVIDERS, ProviderKind
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    ErrorKind,
    Message,
    Provider,
    ProviderError,
    Role,
    ToolSpec,
)

KEY = "sk-contract-0123456789abcdef"
MODEL = "contract-model"
_TOOL = ToolSpec(
    name="submit",
    description="submit a configuration",
    parameters={"type": "object", "properties": {"tp": {"type": "integer"}}, "required": ["tp"]},
)
REQUEST = CompletionRequest(system="be brief", messages=(Message(role=Role.USER, text="go"),), tools=(_TOOL,))
_TIMEOUT_S = 2.0


class ProviderContract:
    """Subclass it, set `provider`, and say in `answer_body` what the provider's server answers."""

    provider: ClassVar[str]
    """The registered word."""

    def make_provider(self, base_url: str, timeout_s: float) -> Provider:
        """Return a provider that asks the server at that address."""
        return self.kind.make_provider(MODEL, api_key=KEY, base_url=base_url, timeout_s=timeout_s)

    def answer_body(self, text: str, calls: tuple[tuple[str, dict[str, Any]], ...]) -> bytes:
        """Return the body of the server's answer with this text and these calls: (tool, arguments)."""
        raise AssertionError(f"{type(self).__name__} must have `answer_body`")

    @property
    def kind(self) -> ProviderKind:
        """The registered kind."""
        return PROVIDERS.get(self.provider)()

    def ask(self, status: int, body: bytes, headers: dict[str, str] | None = None, wait_s: float = 0.0) -> Answer:
        """Return the provider's answer if the server answers like this."""
        with _serving(status, body, headers or {}, wait_s) as (url, requests):
            try:
                return self.make_provider(url, _TIMEOUT_S).ask(REQUEST)
            finally:
                self.num_requests = len(requests)
                self.sent = b"".join(requests)

    def fail(self, status: int, body: bytes = b"{}", **options: Any) -> ProviderError:
        """Return the error that the provider raises; any other exception fails the test."""
        with pytest.raises(ProviderError) as raised:
            self.ask(status, body, **options)
        assert KEY not in str(raised.value), "an error never contains the key"
        return raised.value

    def test_it_is_registered_under_its_word(self) -> None:
        """The word is one of `--llm WORD:MODEL`; names of models contain neither key nor address."""
        kind = self.kind
        assert kind.word == self.provider
        assert kind.key_name == "" or kind.key_name.isidentifier()
        assert kind.name_model(MODEL, None) == f"{self.provider}:{MODEL}"
        for price in kind.list_prices():
            assert price.model.startswith(f"{self.provider}:"), "a provider states prices of its own models only"

    def test_it_reads_text_and_calls(self) -> None:
        """One request is sent once, with what the request says."""
        answer = self.ask(200, self.answer_body("hello", ()))
        assert "hello" in answer.text
        assert self.num_requests == 1, "retries are the engine's"
        assert b"be brief" in self.sent
        answer = self.ask(200, self.answer_body("", (("submit", {"tp": 4}),)))
        [call] = answer.calls
        assert (call.name, call.arguments) == ("submit", {"tp": 4})
        assert call.id
        assert answer.usage.total >= 0

    @pytest.mark.parametrize(
        ("status", "kinds", "is_retried"),
        [
            (401, {ErrorKind.AUTHENTICATION}, False),
            (429, {ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED}, True),
            (500, {ErrorKind.SERVER, ErrorKind.OVERLOADED}, True),
            (503, {ErrorKind.SERVER, ErrorKind.OVERLOADED}, True),
            (400, {ErrorKind.BAD_REQUEST}, False),
        ],
    )
    def test_an_error_of_the_server_has_a_kind(self, status: int, kinds: set[ErrorKind], is_retried: bool) -> None:
        """The engine decides by the kind whether to ask again."""
        error = self.fail(status, b'{"error": {"message": "scripted ' + KEY.encode() + b'"}}')
        assert error.kind in kinds
        assert error.kind.is_retried is is_retried

    @pytest.mark.parametrize("body", [b"", b"<html>busy</html>", b"[]", b"\xff\xfe\x00"])
    def test_an_answer_that_cannot_be_read_is_an_error(self, body: bytes) -> None:
        """Whatever a proxy or a broken server sends."""
        assert self.fail(200, body).kind in {ErrorKind.MALFORMED, ErrorKind.SERVER, ErrorKind.NOT_AN_API}

    @pytest.mark.parametrize("body", [b"{}", b'{"choices": 3}', b'{"content": [7], "output": null}'])
    def test_an_answer_of_another_shape_decides_nothing(self, body: bytes) -> None:
        """It is an error, or an answer without text and calls."""
        try:
            answer = self.ask(200, body)
        except ProviderError:
            return
        assert (answer.text, answer.calls) == ("", ())

    def test_a_server_that_does_not_answer_is_a_timeout(self) -> None:
        """Within the limit, not after minutes."""
        started = time.monotonic()
        error = self.fail(200, self.answer_body("late", ()), wait_s=4 * _TIMEOUT_S)
        assert error.kind in {ErrorKind.TIMEOUT, ErrorKind.CONNECTION}
        assert time.monotonic() - started < 3.5 * _TIMEOUT_S

    def test_no_server_is_a_connection_error(self) -> None:
        """Making the provider does not connect; asking does."""
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            provider = self.make_provider(f"http://127.0.0.1:{unused.getsockname()[1]}", _TIMEOUT_S)
            with pytest.raises(ProviderError) as raised:
                provider.ask(REQUEST)
        assert raised.value.kind in {ErrorKind.CONNECTION, ErrorKind.TIMEOUT}
        assert KEY not in provider.name


@contextmanager
def _serving(status: int, body: bytes, headers: dict[str, str], wait_s: float) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of a server that answers every request like this, and the bodies that it got."""
    requests: list[bytes] = []
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(self.rfile.read(int(self.headers.get("content-length", "0"))))
            if wait_s and ended.wait(wait_s):
                return
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        log_message: Callable[..., None] = lambda *words: None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
