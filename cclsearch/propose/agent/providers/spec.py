"""`--llm SPEC`: the model, its protocol and its key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from cclsearch.core.errors import UserError
from cclsearch.core.offline import is_local_url, refuse_outside
from cclsearch.core.registry import describe_broken_plugins
from cclsearch.core.secrets.names import declare_secret
from cclsearch.core.text import guess_name
from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.kind import PROVIDERS, ProviderKind, describe_forms, list_kinds
from cclsearch.propose.agent.providers.types import Provider

COMPATIBLE = "compatible"
"""The kind of provider that a URL chooses."""
TIMEOUT_NAME = "CCL_SEARCH_LLM_TIMEOUT_S"
TIMEOUT_S = 120.0
"""Seconds for one answer, unless `CCL_SEARCH_LLM_TIMEOUT_S` is set."""
_MODEL = re.compile(r"[A-Za-z0-9][\w.:/@+\-]{0,199}")


class LlmSpec(Model):
    """A parsed `--llm`."""

    protocol: str
    model: str
    base_url: str | None = None

    @property
    def kind(self) -> ProviderKind:
        """Its kind of provider; raises UserError if no installed package has it."""
        return PROVIDERS.get(self.protocol)()

    @property
    def name(self) -> str:
        """The model's name in prices and records."""
        return self.kind.name_model(self.model, self.base_url)


def parse_spec(text: str) -> LlmSpec:
    """Return the spec; raises UserError with the valid forms. From now on the key is masked, under any name."""
    spec = _parse_url(text) if text.startswith(("http://", "https://")) else _parse_word(text)
    if spec.kind.key_name:
        declare_secret(spec.kind.key_name)
    return spec


def _parse_url(text: str) -> LlmSpec:
    url, _, fragment = text.partition("#")
    parts, key_name = urlsplit(url), PROVIDERS.get(COMPATIBLE).key_name
    if parts.username or parts.password:
        raise UserError(f"--llm must not contain a password; put the key into {key_name}")
    if parts.query:
        raise UserError(f"--llm must not contain a query (`?...`); put the key into {key_name}")
    if not parts.hostname or not _MODEL.fullmatch(fragment):
        raise UserError(f"--llm {text!r} does not name a model; write {describe_forms()}")
    return LlmSpec(protocol=COMPATIBLE, model=fragment, base_url=url.rstrip("/"))


def _parse_word(text: str) -> LlmSpec:
    word, _, model = text.partition(":")
    kinds = list_kinds()
    if word not in kinds or not _MODEL.fullmatch(model):
        guess = guess_name(word, kinds) if word not in kinds else ""
        raise UserError(f"--llm must be {describe_forms()}, not {text!r}{guess}{describe_broken_plugins()}")
    return LlmSpec(protocol=word, model=model)


def missing_key(spec: LlmSpec) -> str | None:
    """The environment variable of the key if it is required and empty, else None."""
    kind = spec.kind
    return kind.key_name if kind.key_name and kind.needs_key and not _read_key(kind) else None


def _read_key(kind: ProviderKind) -> str:
    return os.environ.get(kind.key_name, "").strip() if kind.key_name else ""


def find_address(spec: LlmSpec) -> str:
    """Return the URL of requests: of the spec, of the SDK's own variable, or of the provider; empty if unknown."""
    kind = spec.kind
    named = os.environ.get(kind.address_name, "").strip() if kind.address_name else ""
    return spec.base_url or named or kind.address


def refuse_if_offline(spec: LlmSpec) -> None:
    """Raise UserError if the user wants no connections and the model is not on this machine."""
    address = find_address(spec)
    if not is_local_url(address):
        remedy = "run with `--llm none`, or with a model on this machine (http://127.0.0.1:PORT/v1#MODEL)"
        refuse_outside(f"the LLM {spec.name!r} at {address or 'an unknown address'}", remedy)


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
    refuse_if_offline(spec)
    name = missing_key(spec)
    if name:
        raise UserError(f"{name} is not set; set it, or run with --llm none")
    kind = spec.kind
    key = _read_key(kind) or "not-needed"
    return kind.make_provider(spec.model, api_key=key, base_url=spec.base_url, timeout_s=timeout_s)
