"""The proposer of a search, made from its frozen inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cclsearch.propose.base import Proposer
from cclsearch.propose.enqueued import EnqueuedProposer
from cclsearch.propose.study.choose import make_sampler
from cclsearch.run.spec import LLM_STRATEGIES, RunSpec


def make_proposer(spec: RunSpec, folder: Path, is_stopped: Callable[[], bool] = lambda: False) -> Proposer:
    """Return what proposes: with an LLM the arbiter, else the sampler, after what the user enqueued.

    A turn of the LLM ends as soon as `is_stopped`.
    """
    if spec.strategy in LLM_STRATEGIES:
        from cclsearch.search.llm_agent import make_llm_proposer

        proposer = make_llm_proposer(spec, folder, is_stopped)
    else:
        proposer = make_offline_proposer(spec)
    return EnqueuedProposer(spec.first, proposer) if spec.first else proposer


def make_offline_proposer(spec: RunSpec) -> Proposer:
    """Return what asks the study's sampler: what `--dry-run` shows, and the fallback of a search with an LLM."""
    return make_sampler(spec.sampler)
