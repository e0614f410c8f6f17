"""The proposer of a search, made from its frozen inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cclsearch.propose.base import PROPOSERS, Proposer, ProposerContext
from cclsearch.propose.enqueued import EnqueuedProposer
from cclsearch.propose.study.choose import make_sampler
from cclsearch.run.spec import SAMPLER, RunSpec


def make_proposer(spec: RunSpec, folder: Path, is_stopped: Callable[[], bool] = lambda: False) -> Proposer:
    """Return what proposes: the strategy that decides between LLM and sampler, or the sampler, after what the user
    enqueued. Long work, such as a turn of the LLM, ends as soon as `is_stopped`.
    """
    if spec.strategy == SAMPLER:
        proposer = make_offline_proposer(spec, is_stopped)
    else:
        from cclsearch.loop.llm_agent import make_llm_context

        context = ProposerContext(
            make_sampler=lambda: make_offline_proposer(spec, is_stopped),
            parallel=spec.limits.parallel,
            is_stopped=is_stopped,
            llm=make_llm_context(spec, folder),
        )
        proposer = PROPOSERS.get(spec.strategy).from_context(context)
    return EnqueuedProposer(spec.first, proposer) if spec.first else proposer


def make_offline_proposer(spec: RunSpec, is_stopped: Callable[[], bool] = lambda: False) -> Proposer:
    """Return what asks the study's sampler: what `--dry-run` shows, and the fallback of a search with an LLM."""
    return make_sampler(spec.sampler, ProposerContext(parallel=spec.limits.parallel, is_stopped=is_stopped))
