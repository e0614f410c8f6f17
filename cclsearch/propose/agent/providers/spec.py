"""`--llm SPEC`: which model, over which protocol, with which key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from cclsearch.core.errors import UserError
from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.types import Provider

FORMS = "anthropic:MODEL, openai:MODEL, or the URL of an OpenAI-compatible server, http://HOST:PORT/v1#MODEL"
KEYS = {
    "anthropic": "ANTHROPIC_API_KEY",
    "openai": "OPENAI_API_KEY",
    "compatible": "CCL_SEARCH_LLM_API_KEY",
}
"""Protocol -> the environment variable that holds its key. A URL never gets OpenAI's own key."""
TIMEOUT_NAME = "CCL_SEARCH_LLM_TIMEOUT_S"
TIMEOUT_S = 120.0
"""For one answer, where `CCL_SEARCH_LLM_TIMEOUT_S` does not say otherwise."""
_MODEL = re.compile(r"[A-Za-z0-9][\w.:/@+\-]{0,199}")


class LlmSpec(Model):
    """A parsed `--llm`."""

    protocol: str
    model: str
    base_url: str | None = None

    @property
    def key_name(self) -> str:
        return KEYS[self.protocol]

    @property
    def name(self) -> str:
        """As prices and records call the model."""
        return name_model(self.protocol, self.model, self.base_url)


def parse_spec(text: str) -> LlmSpec:
    """The spec; raises UserError that names the forms there are."""
    url, _, fragment = text.partition("#")
    if url.startswith(("http://", "https://")):
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise UserError(f"--llm must not hold a password; put the key into {KEYS['compatible']}")
        if parts.query:
            raise UserError(f"--llm must hold no query (`?...`); put the key into {KEYS['compatible']}")
        if not parts.hostname or not _MODEL.fullmatch(fragment):
            raise UserError(f"--llm {text!r} names no model; write {FORMS}")
        return LlmSpec(protocol="compatible", model=fragment, base_url=url.rstrip("/"))
    protocol, _, model = text.partition(":")
    if protocol not in {"anthropic", "openai"} or not _MODEL.fullmatch(model):
        raise UserError(f"--llm must be {FORMS}; got {text!r}")
    return LlmSpec(protocol=protocol, model=model)


def name_model(protocol: str, model: str, base_url: str | None) -> str:
    """`protocol:model`, for people and for prices; `local:model` for a compatible server on this machine."""
    host = urlsplit(base_url).hostname if base_url else None
    return f"local:{model}" if protocol == "compatible" and host and _is_loopback(host) else f"{protocol}:{model}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def missing_key(spec: LlmSpec, environment: Mapping[str, str] | None = None) -> str | None:
    """The name of the variable that should hold the key and does not; None where nothing is missing."""
    source = os.environ if environment is None else environment
    if spec.protocol == "compatible" or source.get(spec.key_name, "").strip():
        return None
    return spec.key_name


def read_timeout_s(environment: Mapping[str, str] | None = None) -> float:
    """Seconds that one answer may take, for a slow model or a person; raises UserError where it is no such number."""
    given = (os.environ if environment is None else environment).get(TIMEOUT_NAME, "").strip()
    try:
        seconds = float(given) if given else TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86_400.0:
        raise UserError(f"{TIMEOUT_NAME} must be seconds from 1 to 86400; got {given!r}")
    return seconds


def make_provider(spec: LlmSpec, *, timeout_s: float = TIMEOUT_S) -> Provider:
    """The provider, with its key from the environment; raises UserError where the key is missing."""
    name = missing_key(spec)
    if name:
        raise UserError(f"{name} is not set; set it, or run without --llm (--strategy optuna needs no key)")
    key = os.environ.get(spec.key_name, "").strip() or "not-needed"
    if spec.protocol == "anthropic":
        from cclsearch.propose.agent.providers.anthropic_api import AnthropicProvider

        return AnthropicProvider(spec.model, api_key=key, base_url=spec.base_url, timeout_s=timeout_s)
    from cclsearch.propose.agent.providers.openai_api import OpenAIProvider

    return OpenAIProvider(spec.model, api_key=key, base_url=spec.base_url, timeout_s=timeout_s)
