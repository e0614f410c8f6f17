"""A kind of LLM provider: what stands before the colon in `--llm WORD:MODEL`. A package adds one of its own.

from cclsearch.plugins import PROVIDERS
from cclsearch.propose.agent.providers.prices import Price
from cclsearch.propose.agent.providers.kind import ProviderKind

@PROVIDERS.register("acme")
class AcmeKind(ProviderKind):
    word = "acme"
    key_name = "ACME_API_KEY"
    prices = (Price(model="small-*", input_usd=0.1, output_usd=0.4),)

    def make_provider(self, model, *, api_key, base_url, timeout_s):
        return AcmeProvider(model, api_key, timeout_s)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from cclsearch.core.registry import Registry

if TYPE_CHECKING:  # `--help` lists the providers, without what takes long to import
    from cclsearch.propose.agent.providers.prices import Price
    from cclsearch.propose.agent.providers.types import Provider


class ProviderKind(ABC):
    """Access to the models of one provider; the class is registered under its `word`."""

    word: ClassVar[str]
    key_name: ClassVar[str] = ""
    """Environment variable with the key; its value is masked everywhere. Empty: a key is never sent."""
    needs_key: ClassVar[bool] = True
    """Whether the LLM needs `key_name` to be set: without it, the search runs without the LLM, and says so."""
    address: ClassVar[str] = ""
    """URL of its server, unless `--llm` is a URL; `--offline` refuses it if it is empty or on another machine."""
    address_name: ClassVar[str] = ""
    """Environment variable with another URL, which its SDK reads."""
    is_url: ClassVar[bool] = False
    """Whether a URL, `http://HOST:PORT/v1#MODEL`, chooses it instead of its word."""
    timeout_s: ClassVar[float | None] = None
    """Seconds for one answer, unless the user sets them; None: by `--llm-effort`."""
    takes_effort: ClassVar[bool] = False
    """Whether `make_provider` has a parameter `effort`, an `Effort` or None, for `--llm-effort`."""
    prices: ClassVar[tuple[Price, ...]] = ()
    """Prices of its models, by patterns such as `small-*`; a price list that names `WORD:MODEL` comes first."""

    @abstractmethod
    def make_provider(self, model: str, *, api_key: str, base_url: str | None, timeout_s: float) -> Provider:
        """Return the provider that asks the model, each request within `timeout_s`; it must not connect yet."""

    def name_model(self, model: str, base_url: str | None) -> str:
        """Return the model's name in prices and records: never a key, never an address."""
        return f"{self.word}:{model}"

    @classmethod
    def list_prices(cls) -> tuple[Price, ...]:
        """Return the prices with whole names, so that they hold for no model of another provider."""
        return tuple(price.model_copy(update={"model": f"{cls.word}:{price.model}"}) for price in cls.prices)


PROVIDERS: Registry[type[ProviderKind]] = Registry(
    "LLM provider",
    {
        **dict.fromkeys(("anthropic", "compatible", "openai"), "cclsearch.propose.agent.providers.builtin"),
        "mcp": "cclsearch.propose.agent.providers.outside",
    },
    needs=("word", "key_name", "make_provider"),
)
"""word of `--llm WORD:MODEL` -> subclass of `ProviderKind`."""


def list_kinds() -> dict[str, type[ProviderKind]]:
    """Return the words before the colon in `--llm WORD:MODEL`, each with its provider."""
    kinds = {word: PROVIDERS.get(word) for word in PROVIDERS.names()}
    return {word: kind for word, kind in kinds.items() if not kind.is_url}


def describe_forms() -> str:
    """Return the valid forms of `--llm`: one per installed provider, and a URL."""
    words = ", ".join(f"{word}:MODEL" for word in list_kinds())
    return f"{words}, or the URL of an OpenAI-compatible server, http://HOST:PORT/v1#MODEL"
