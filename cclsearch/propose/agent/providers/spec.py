"""`--llm SPEC`: the model, its protocol and its key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cclsearch.core.errors import UserError
from cclsearch.core.numbers import read_amount
from cclsearch.core.offline import is_local_url, refuse_outside
from cclsearch.core.registry import describe_broken_plugins
from cclsearch.core.secrets.names import declare_secret
from cclsearch.core.text import guess_name
from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.kind import PROVIDERS, ProviderKind, describe_forms, list_kinds
from cclsearch.propose.agent.providers.prices import Price, find_listed_price, load_prices, parse_price
from cclsearch.propose.agent.providers.types import Effort, Provider

PRICES_NAME = "CCL_SEARCH_PRICES"
"""Environment variable with a price list of one's own, which comes first."""
FREE_PROTOCOL = "local"
"""Protocol of names of models on this machine."""
COMPATIBLE = "compatible"
"""The kind of provider that a URL chooses."""
TIMEOUT_NAME = "CCL_SEARCH_LLM_TIMEOUT_S"
TIMEOUT_S = 300.0
"""Seconds for one answer, unless `CCL_SEARCH_LLM_TIMEOUT_S` is set."""
TIMEOUTS_S = {Effort.LOW: 120.0, Effort.MEDIUM: 300.0, Effort.HIGH: 600.0, Effort.MAX: 1200.0}
"""The same for each `--llm-effort`: a model that thinks longer answers later."""
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
    key_name = PROVIDERS.get(COMPATIBLE).key_name
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"--llm: {url.split('@')[-1]!r} is not an address: {error}") from None
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
    return kind.key_name if kind.key_name and kind.needs_key and not read_key(kind) else None


def read_key(kind: ProviderKind) -> str:
    """The key in the environment; empty if there is none."""
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


def read_timeout_s(effort: Effort | None = None, kind: ProviderKind | None = None) -> float:
    """Timeout of one answer in seconds; raises UserError if the variable is not a valid number."""
    given = os.environ.get(TIMEOUT_NAME, "").strip()
    if not given:
        usual_s = kind.timeout_s if kind is not None and kind.timeout_s else TIMEOUT_S
        return TIMEOUTS_S[effort] if effort else usual_s
    try:
        return read_amount(given, 1.0, 86_400.0)
    except ValueError:
        raise UserError(f"{TIMEOUT_NAME} must be seconds from 1 to 86400, not {given!r}") from None


def make_provider(spec: LlmSpec, *, timeout_s: float = TIMEOUT_S, effort: Effort | None = None) -> Provider:
    """The provider, with its key from the environment; raises UserError for a missing key or a wrong environment."""
    refuse_if_offline(spec)
    name, kind = missing_key(spec), spec.kind
    if name:
        raise UserError(f"{name} is not set; set it, or run with --llm none")
    key = read_key(kind) or "not-needed"
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{kind.key_name} has characters that no key has (blanks, line ends, quotes of a text editor)")
    if spec.base_url is None and kind.address_name:
        _check_address(os.environ.get(kind.address_name, "").strip(), kind.address_name)
    options = {"effort": effort} if kind.takes_effort else {}
    if effort and not options:
        raise UserError(f"--llm-effort: the provider {spec.protocol!r} has no such setting; leave it out")
    return kind.make_provider(spec.model, api_key=key, base_url=spec.base_url, timeout_s=timeout_s, **options)


def _check_address(address: str, name: str) -> None:
    try:
        parts = urlsplit(address)
        is_usable = (
            parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and not parts.password
        )
    except ValueError:
        is_usable = False
    if address and not is_usable:
        raise UserError(
            f"{name}={address.split('@')[-1]!r} is not an address: write http(s)://HOST[:PORT][/v1], or unset it"
        )


def find_price(name: str) -> Price | None:
    """The price of `protocol:model`; None if there is none.

    The user's own list comes first, then what the model's package states, then `genai-prices`: of a model that it does
    not name, the dearest price of the family, which shares the longest beginning of the name.
    """
    protocol, _, model = name.partition(":")
    path = os.environ.get(PRICES_NAME, "").strip()
    listed = load_prices(Path(path)) if path else None
    for price in listed.prices if listed else ():
        if fnmatchcase(name, price.model):
            return price.model_copy(update={"source": f"{path}, as of {listed.as_of if listed else ''}"})
    if protocol == FREE_PROTOCOL:
        return Price(model=name, input_usd=0.0, output_usd=0.0, source="a server on this machine")
    kind = PROVIDERS.find(protocol)
    for price in kind.list_prices() if kind else ():
        if fnmatchcase(name, price.model):
            return price.model_copy(update={"source": price.source or f"the provider {protocol}"})
    return find_listed_price(protocol, model)


def refuse_without_price(name: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for `--max-usd` without a known price of `protocol:model`."""
    price = parse_price(str(options["price"])) if options.get("price") else find_price(name)
    if options.get("max_usd") is not None and price is None:
        raise UserError(
            f"--max-usd: the price of {name} is unknown; state it with --llm-price INPUT,OUTPUT (US dollars for a "
            f"million tokens) or in a list ({PRICES_NAME}), or limit the LLM with --max-tokens"
        )
