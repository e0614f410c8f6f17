"""The options of an LLM agent, fixed when a search starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from cclsearch.core.trust import find_code
from cclsearch.propose.agent.conversation import DEFAULT_TOKENS
from cclsearch.propose.agent.prompt.prompt import PromptOptions
from cclsearch.propose.agent.providers.cost import LlmLimits
from cclsearch.propose.agent.providers.retry import RetrySettings
from cclsearch.propose.base import SearchView


@dataclass(frozen=True)
class AgentOptions(PromptOptions):
    """Options of an agent during one search."""

    limits: LlmLimits = field(default_factory=LlmLimits)
    proposer: str = "llm"
    """Proposer of its trials in the ledger, unless its programs choose them."""
    seed_policy: str | None = None
    """Name or path of the first policy program; None for the shipped one that fits the card."""
    seed_program: str | None = None
    """Source of the first policy program, as it was when the search began."""
    retry: RetrySettings = field(default_factory=RetrySettings)
    max_output_tokens: int = 16_384
    max_turn_s: float = 600.0
    max_context: int = DEFAULT_TOKENS
    """Tokens of a request, with the conversation of earlier turns; 0: each turn begins anew."""


def read_seed_program(view: SearchView, name: str | None) -> str:
    """Source of the policy program of that name; by default the shipped one that fits the card, empty if none does."""
    chosen = name or view.task.seed_policy(view.card)
    return find_code("policies", chosen, ".py").read_text(encoding="utf-8") if chosen else ""
