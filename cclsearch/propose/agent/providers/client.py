"""One model behind one server: asks in the form that the server accepts, and finds that form by its refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cclsearch.propose.agent.providers import chat_api, messages_api, responses_api
from cclsearch.propose.agent.providers.flatten import flatten
from cclsearch.propose.agent.providers.forms import Api, Form, step_down
from cclsearch.propose.agent.providers.http import RawAnswer, send
from cclsearch.propose.agent.providers.parse import parse_body
from cclsearch.propose.agent.providers.types import Answer, CompletionRequest, ErrorKind, ProviderError

MAX_STEPS = 10
"""Changes of form within one request, after which the server refuses every form."""
Create = Callable[..., Any]


@dataclass(frozen=True)
class Server:
    """The APIs of one server as its SDK calls them."""

    creates: Mapping[Api, Callable[[str], Create]]
    """API -> the SDK's function for it, at the address with a part added (empty, or `/v1`)."""
    proxy: str = ""
    """Environment variable of the proxy on the way to it; empty if none."""
    is_whole: bool = False
    """Whether its address has the API's version, such as `/v1`."""


class Client:
    """A `Provider` that keeps the form which its server accepts, as long as it lives."""

    def __init__(self, name: str, model: str, server: Server, form: Form, *, timeout_s: float) -> None:
        self.name = name
        self.form = form
        self._model = model
        self._server = server
        self._timeout_s = timeout_s
        self._notes: list[str] = []
        self._lock = threading.Lock()

    def ask(self, request: CompletionRequest) -> Answer:
        """See `Provider`. A refused form costs one request, and the next one is asked at once."""
        tried = [self.form]
        first: ProviderError | None = None
        while True:
            form = tried[-1]
            try:
                answer = self._ask(form, request)
            except ProviderError as error:
                first = first or self._name_proxy(error)
                if error.kind is ErrorKind.NOT_AN_API and (
                    form.path or (self._server.is_whole and form.api is Api.CHAT)
                ):
                    raise first from None
                if len(tried) > MAX_STEPS:
                    raise
                form, text = step_down(form, error, request, tuple(self._server.creates), tried)
                tried.append(form)
                with self._lock:
                    self._notes.append(f"{text} ({error.message})")
                if error.may_have_cost:  # the search counts it before it asks again
                    self.form = form
                    raise
                continue
            self.form = form
            return answer

    def take_notes(self) -> list[str]:
        """Return the changes of form since the last call, one line each."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def _ask(self, form: Form, request: CompletionRequest) -> Answer:
        if form.max_output is not None and form.max_output < request.max_output_tokens:
            request = request.model_copy(update={"max_output_tokens": form.max_output})
        plain = flatten(request, form)
        try:
            return self._exchange(form, plain, request)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            text = f"the answer has another shape than the API's ({type(error).__name__})"
            raise ProviderError(ErrorKind.MALFORMED, text, may_have_cost=True) from None

    def _exchange(self, form: Form, plain: CompletionRequest, request: CompletionRequest) -> Answer:
        create = self._server.creates[form.api](form.path)
        if form.api is Api.MESSAGES:
            raw = send(create, messages_api.write_body(self._model, plain, form), self._timeout_s)
            return messages_api.read_answer(_parse(raw, messages_api.join_stream), request)
        api: Any = responses_api if form.api is Api.RESPONSES else chat_api
        raw = send(create, api.write_body(self._model, plain, form, request), self._timeout_s)
        return api.read_answer(_parse(raw, api.join_stream), request)  # type: ignore[no-any-return]

    def _name_proxy(self, error: ProviderError) -> ProviderError:
        """The error with the variable of the proxy, where the connection failed."""
        kinds = {ErrorKind.CONNECTION, ErrorKind.UNKNOWN_HOST, ErrorKind.TIMEOUT, ErrorKind.CERTIFICATE}
        if self._server.proxy and error.kind in kinds and self._server.proxy not in error.message:
            error.message = f"{error.message} (through the proxy of {self._server.proxy})"
        return error


def _parse(raw: RawAnswer, join_stream: Any) -> dict[str, Any]:
    return parse_body(raw.content, raw.headers, join_stream)
