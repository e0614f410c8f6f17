"""The proposer of a search, made from its frozen inputs."""

from __future__ import annotations

from pathlib import Path

from cclsearch.plan.strategy import LLM_STRATEGIES
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Proposer
from cclsearch.propose.bayes.pareto_proposer import ParetoProposer
from cclsearch.propose.enqueued import EnqueuedProposer
from cclsearch.run.spec import RunSpec


def make_proposer(spec: RunSpec, folder: Path) -> Proposer:
    """Return the strategy, after the configurations that the user enqueued."""
    if spec.strategy in LLM_STRATEGIES:
        from cclsearch.search.llm_agent import make_llm_proposer

        strategy = make_llm_proposer(spec, folder)
    else:
        strategy = make_offline_proposer(spec)
    return EnqueuedProposer(spec.first, strategy) if spec.first else strategy


def make_offline_proposer(spec: RunSpec) -> Proposer:
    """Return the strategy without an LLM: what `--dry-run` shows, and the fallback of a search with one."""
    name = "default" if spec.strategy in LLM_STRATEGIES else spec.strategy
    proposer: Proposer = PROPOSERS.get(name)()
    if isinstance(proposer, ParetoProposer) and spec.objective.is_multi:
        return ParetoProposer([(term.metric, term.direction.value) for term in spec.objective.terms])
    return proposer
