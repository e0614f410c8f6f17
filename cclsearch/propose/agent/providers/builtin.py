"""The built-in providers; their SDKs are imported only when one is made."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from cclsearch.core.offline import is_local_host
from cclsearch.propose.agent.providers.client import Client, Create, Server
from cclsearch.propose.agent.providers.forms import Api, CallForm, Form, Thinking
from cclsearch.propose.agent.providers.http import PROXY_NAMES, make_http_client
from cclsearch.propose.agent.providers.kind import PROVIDERS, ProviderKind
from cclsearch.propose.agent.providers.types import Effort, Provider, name_model

_ENDINGS = re.compile(r"(/chat/completions|/completions|/responses|/messages)?/*$")
"""What people copy with an address from a server's documentation."""


@PROVIDERS.register("anthropic")
class AnthropicKind(ProviderKind):
    """Anthropic's Messages API."""

    word = "anthropic"
    key_name = "ANTHROPIC_API_KEY"
    address, address_name = "https://api.anthropic.com", "ANTHROPIC_BASE_URL"
    takes_effort = True

    def make_provider(
        self, model: str, *, api_key: str, base_url: str | None, timeout_s: float, effort: Effort | None = None
    ) -> Provider:
        """See `ProviderKind`."""
        import anthropic

        address = _strip(base_url or _read(self.address_name) or self.address)
        client = anthropic.Anthropic(
            api_key=api_key,
            base_url=address.removesuffix("/v1"),  # the SDK adds it
            max_retries=0,
            timeout=timeout_s,
            http_client=make_http_client(anthropic.DefaultHttpxClient, address, timeout_s=timeout_s),
        )
        # From 4.6 on a model thinks if the call is left to it; older ones refuse that, and are asked in another form.
        form = Form(
            api=Api.MESSAGES,
            call=CallForm.AUTO,
            thinking=Thinking.ADAPTIVE,
            effort=effort.value if effort else "",
            marks_cache=True,
            streams=True,
        )
        creates = {Api.MESSAGES: lambda path: client.messages.with_raw_response.create}
        server = Server(creates, _find_proxy(address))
        return Client(name_model(self.word, model, base_url), model, server, form, timeout_s=timeout_s)


@PROVIDERS.register("openai")
class OpenAIKind(ProviderKind):
    """OpenAI's Responses API, and chat completions of servers that have only these."""

    word = "openai"
    key_name = "OPENAI_API_KEY"
    address, address_name = "https://api.openai.com/v1", "OPENAI_BASE_URL"
    takes_effort = True

    def make_provider(
        self, model: str, *, api_key: str, base_url: str | None, timeout_s: float, effort: Effort | None = None
    ) -> Provider:
        """See `ProviderKind`."""
        import openai

        address = _strip(base_url or _read(self.address_name) or self.address)
        client = openai.OpenAI(
            api_key=api_key,
            base_url=address,
            max_retries=0,
            timeout=timeout_s,
            http_client=make_http_client(openai.DefaultHttpxClient, address, timeout_s=timeout_s),
        )

        def at(path: str) -> Any:
            return client.with_options(base_url=address + path) if path else client

        def create_response(path: str) -> Create:
            return at(path).responses.with_raw_response.create  # type: ignore[no-any-return]

        def create_chat(path: str) -> Create:
            return at(path).chat.completions.with_raw_response.create  # type: ignore[no-any-return]

        is_openai = (urlsplit(address).hostname or "").endswith(".openai.com")
        if is_openai:
            # Some of its models do not think at all unless they are asked to.
            word = (effort or Effort.MEDIUM).value
            form = Form(api=Api.RESPONSES, effort=word, streams=True, limit_name="max_completion_tokens")
        else:
            # With much thinking an answer takes minutes, and gateways cut a connection that is silent so long.
            is_slow = effort in (Effort.HIGH, Effort.MAX)
            form = Form(api=Api.CHAT, effort=effort.value if effort else "", streams=is_slow)
        creates = {Api.CHAT: create_chat, Api.RESPONSES: create_response}
        server = Server(creates, _find_proxy(address), is_whole=bool(re.search(r"/v\d", urlsplit(address).path)))
        return Client(name_model(self.word, model, base_url), model, server, form, timeout_s=timeout_s)


@PROVIDERS.register("compatible")
class CompatibleKind(OpenAIKind):
    """A server with an OpenAI-compatible API, by its URL. It never receives OpenAI's own key."""

    word = "compatible"
    key_name = "CCL_SEARCH_LLM_API_KEY"
    address, address_name = "", ""
    needs_key = False
    is_url = True

    def name_model(self, model: str, base_url: str | None) -> str:
        """Return `local:MODEL` for a server on this machine, which costs nothing."""
        return name_model(self.word, model, base_url)


def _read(name: str) -> str:
    return os.environ.get(name, "").strip() if name else ""


def _strip(address: str) -> str:
    return _ENDINGS.sub("", address.strip())


def _find_proxy(address: str) -> str:
    """The environment variable of the proxy on the way to that address; empty if none."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    if is_local_host(host) or proxy_bypass(host):
        return ""
    proxies = getproxies()
    used = parts.scheme if parts.scheme in proxies else "all" if "all" in proxies else ""
    names = (name for name in PROXY_NAMES if used and name.lower() == f"{used}_proxy" and os.environ.get(name))
    return next(names, "")
