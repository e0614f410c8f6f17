"""Registers the built-in providers; their SDKs are imported only when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cclsearch.propose.agent.providers.kind import PROVIDERS, ProviderKind

if TYPE_CHECKING:
    from cclsearch.propose.agent.providers.types import Provider


@PROVIDERS.register("anthropic")
class AnthropicKind(ProviderKind):
    """Anthropic's messages protocol."""

    word = "anthropic"
    key_name = "ANTHROPIC_API_KEY"
    address, address_name = "https://api.anthropic.com", "ANTHROPIC_BASE_URL"
    may_reason = True

    def make_provider(self, model: str, *, api_key: str, base_url: str | None, timeout_s: float) -> Provider:
        """See `ProviderKind`."""
        from cclsearch.propose.agent.providers.anthropic_api import AnthropicProvider

        return AnthropicProvider(model, api_key=api_key, base_url=base_url, timeout_s=timeout_s)


@PROVIDERS.register("openai")
class OpenAIKind(ProviderKind):
    """OpenAI's chat completions."""

    word = "openai"
    key_name = "OPENAI_API_KEY"
    address, address_name = "https://api.openai.com/v1", "OPENAI_BASE_URL"
    may_reason = True

    def make_provider(self, model: str, *, api_key: str, base_url: str | None, timeout_s: float) -> Provider:
        """See `ProviderKind`."""
        from cclsearch.propose.agent.providers.openai_api import OpenAIProvider

        return OpenAIProvider(model, api_key=api_key, base_url=base_url, timeout_s=timeout_s)


@PROVIDERS.register("compatible")
class CompatibleKind(OpenAIKind):
    """A server with an OpenAI-compatible API, by its URL. It never receives OpenAI's own key."""

    word = "compatible"
    key_name = "CCL_SEARCH_LLM_API_KEY"
    needs_key = False
    is_url = True
    may_reason = False

    def name_model(self, model: str, base_url: str | None) -> str:
        """Return `local:MODEL` for a server on this machine, which costs nothing."""
        from cclsearch.propose.agent.providers.types import name_model

        return name_model(self.word, model, base_url)
