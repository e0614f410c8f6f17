"""Asks a provider again when that may help: rate limits, overload, time-outs, cut connections; never a wrong key."""

from __future__ import annotations

import random

import tenacity

from cclsearch.core.values import Model
from cclsearch.propose.agent.clock import Clock
from cclsearch.propose.agent.providers.types import Answer, CompletionRequest, Provider, ProviderError


class Patience(Model):
    """How long one request may take in all."""

    total_s: float = 180.0
    """From the first try to the start of the last."""
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    max_tries: int = 8


def ask_patiently(
    provider: Provider, request: CompletionRequest, *, clock: Clock, patience: Patience, jitter: random.Random
) -> Answer:
    """The answer, after as many tries as patience allows; raises the last ProviderError.

    Waits grow twofold with full jitter on the upper half; `Retry-After` is honoured, and where it asks for more than
    is left the error is raised at once.
    """
    started_s = clock.now_s()

    def wait_s(state: tenacity.RetryCallState) -> float:
        error = _error_of(state)
        doubled = min(patience.first_wait_s * 2.0 ** (state.attempt_number - 1), patience.longest_wait_s)
        drawn = doubled * (0.5 + 0.5 * jitter.random())
        return max(drawn, error.retry_after_s or 0.0) if error else drawn

    def is_over(state: tenacity.RetryCallState) -> bool:
        used_s = clock.now_s() - started_s + state.upcoming_sleep
        return state.attempt_number >= patience.max_tries or used_s > patience.total_s

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, ProviderError) and error.trouble.is_retried),
        stop=is_over,
        wait=wait_s,
        sleep=clock.sleep,
        reraise=True,
    )
    return retrying(provider.ask, request)


def _error_of(state: tenacity.RetryCallState) -> ProviderError | None:
    error = state.outcome.exception() if state.outcome else None
    return error if isinstance(error, ProviderError) else None
