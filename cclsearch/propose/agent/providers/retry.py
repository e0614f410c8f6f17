"""Retries a request that may succeed later: rate limit, overload, timeout, cut connection; never a wrong key."""

from __future__ import annotations

import random
import time
from typing import Protocol

import tenacity

from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.types import Answer, CompletionRequest, Provider, ProviderError


class Clock(Protocol):
    """Time as the agent measures it; tests replace it, so that a thousand turns of waiting take no time."""

    def now_s(self) -> float:
        """Seconds of a monotonic clock."""
        ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class RetrySettings(Model):
    """Limits on the tries of one request."""

    total_s: float = 180.0
    """Seconds from the first try to the start of the last."""
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0
    max_tries: int = 8


def ask_with_retries(
    provider: Provider, request: CompletionRequest, *, clock: Clock, settings: RetrySettings, jitter: random.Random
) -> Answer:
    """The answer, after as many tries as the settings allow; raises the last ProviderError.

    Waits double, with full jitter on their upper half. `Retry-After` is honored; if it asks for more time than is
    left, the error is raised at once.
    """
    started_s = clock.now_s()

    def wait_s(state: tenacity.RetryCallState) -> float:
        error = _error_of(state)
        doubled = min(settings.first_wait_s * 2.0 ** (state.attempt_number - 1), settings.max_wait_s)
        drawn = doubled * (0.5 + 0.5 * jitter.random())
        return max(drawn, error.retry_after_s or 0.0) if error else drawn

    def is_over(state: tenacity.RetryCallState) -> bool:
        used_s = clock.now_s() - started_s + state.upcoming_sleep
        return state.attempt_number >= settings.max_tries or used_s > settings.total_s

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, ProviderError) and error.kind.is_retried),
        stop=is_over,
        wait=wait_s,
        sleep=clock.sleep,
        reraise=True,
    )
    return retrying(provider.ask, request)


def _error_of(state: tenacity.RetryCallState) -> ProviderError | None:
    error = state.outcome.exception() if state.outcome else None
    return error if isinstance(error, ProviderError) else None
