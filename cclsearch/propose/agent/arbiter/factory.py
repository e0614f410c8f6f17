"""The strategies of a search with an LLM; their modules are imported only for such a search."""

from __future__ import annotations

from dataclasses import dataclass

from cclsearch.core.errors import UserError
from cclsearch.propose.base import PROPOSERS, Proposer, ProposerContext, ProposerRole


@dataclass(frozen=True)
class LlmStrategy:
    """Makes the arbiter between the LLM and the sampler."""

    name: str
    num_seeds: int | None = None
    """Safe trials before the LLM decides; None: the arbiter's own number."""

    role = ProposerRole.STRATEGY

    def from_context(self, context: ProposerContext) -> Proposer:
        """Return the arbiter, or the sampler alone if the LLM's key is missing."""
        from cclsearch.propose.agent.arbiter.proposer import Arbiter, NoLlmProposer
        from cclsearch.propose.agent.arbiter.rules import ArbiterSettings

        sampler, llm = context.make_sampler(), context.llm
        if llm is None:
            raise ValueError(f"the strategy {self.name!r} needs an LLM")
        if llm.missing_key:
            return NoLlmProposer(sampler, f"{llm.missing_key} is not set")
        try:
            agent = llm.make_agent()
        except UserError as error:
            # `run` refuses it before it begins; a night and a resume lose nothing by going on
            return NoLlmProposer(sampler, str(error))
        rules = ArbiterSettings() if self.num_seeds is None else ArbiterSettings(num_seeds=self.num_seeds)
        return Arbiter(
            agent,
            sampler,
            strategy=self.name,
            parallel=context.parallel,
            rules=rules,
            is_stopped=context.is_stopped,
        )


PROPOSERS.register("hybrid")(LlmStrategy("hybrid"))
PROPOSERS.register("llm")(LlmStrategy("llm", num_seeds=0))
