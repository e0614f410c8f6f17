"""`--llm SPEC`: the model, its protocol and its key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from cclsearch.core.errors import UserError
from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.anthropic_api import AnthropicProvider
from cclsearch.propose.agent.providers.openai_api import OpenAIProvider
from cclsearch.propose.agent.providers.types import Provider, name_model

FORMS = "anthropic:MODEL, openai:MODEL, or the URL of an OpenAI-compatible server, http://HOST:PORT/v1#MODEL"
KEYS = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY", "compatible": "CCL_SEARCH_LLM_API_KEY"}
"""Protocol -> environment variable with its key. A server by URL never receives OpenAI's own key."""
TIMEOUT_NAME = "CCL_SEARCH_LLM_TIMEOUT_S"
TIMEOUT_S = 120.0
"""For one answer, unless `CCL_SEARCH_LLM_TIMEOUT_S` is set."""
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
        """The model's name in prices and records."""
        return name_model(self.protocol, self.model, self.base_url)


def parse_spec(text: str) -> LlmSpec:
    """The spec; raises UserError with the valid forms."""
    url, _, fragment = text.partition("#")
    if url.startswith(("http://", "https://")):
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise UserError(f"--llm must not contain a password; put the key into {KEYS['compatible']}")
        if parts.query:
            raise UserError(f"--llm must not contain a query (`?...`); put the key into {KEYS['compatible']}")
        if not parts.hostname or not _MODEL.fullmatch(fragment):
            raise UserError(f"--llm {text!r} does not name a model; write {FORMS}")
        return LlmSpec(protocol="compatible", model=fragment, base_url=url.rstrip("/"))
    protocol, _, model = text.partition(":")
    if protocol not in {"anthropic", "openai"} or not _MODEL.fullmatch(model):
        raise UserError(f"--llm must be {FORMS}, not {text!r}")
    return LlmSpec(protocol=protocol, model=model)


def missing_key(spec: LlmSpec) -> str | None:
    """The environment variable of the key if it is required and empty, else None."""
    is_set = spec.protocol == "compatible" or os.environ.get(spec.key_name, "").strip()
    return None if is_set else spec.key_name


def read_timeout_s(environment: Mapping[str, str] | None = None) -> float:
    """Timeout of one answer in seconds; raises UserError if the variable is not a valid number."""
    given = (os.environ if environment is None else environment).get(TIMEOUT_NAME, "").strip()
    try:
        seconds = float(given) if given else TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86_400.0:
        raise UserError(f"{TIMEOUT_NAME} must be seconds from 1 to 86400, not {given!r}")
    return seconds


def make_provider(spec: LlmSpec, *, timeout_s: float = TIMEOUT_S) -> Provider:
    """The provider, with its key from the environment; raises UserError if the key is missing."""
    name = missing_key(spec)
    if name:
        raise UserError(f"{name} is not set; set it, or run with --llm none")
    key = os.environ.get(spec.key_name, "").strip() or "not-needed"
    if spec.protocol == "anthropic":
        return AnthropicProvider(spec.model, api_key=key, base_url=spec.base_url, timeout_s=timeout_s)
    return OpenAIProvider(spec.model, api_key=key, base_url=spec.base_url, timeout_s=timeout_s)
