"""Asks again at once where that helps: after a cut connection, and after the wait that a rate limit names."""

from __future__ import annotations

import time
from typing import Protocol

import tenacity

from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.types import Answer, CompletionRequest, ErrorKind, Provider, ProviderError

_AGAIN = {ErrorKind.SERVER, ErrorKind.OVERLOADED, ErrorKind.CONNECTION}


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

    longest_wait_s: float = 60.0
    """Longest `Retry-After` for which the turn waits; for longer ones the fallback chooses meanwhile."""
    total_s: float = 180.0
    """Seconds that one request may wait in all."""
    again_s: float = 1.0
    """Pause before another try after a failure of the server or the connection."""
    tries_again: int = 1
    """Such tries of one request."""


def ask_with_retries(
    provider: Provider, request: CompletionRequest, *, clock: Clock, settings: RetrySettings
) -> Answer:
    """The answer; raises the last ProviderError, at once if waiting is for the search to decide."""
    waited = {"s": 0.0, "again": 0}

    def wait_s(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        named = error.retry_after_s if isinstance(error, ProviderError) else None
        return settings.again_s if named is None else max(named, settings.again_s)

    def is_worth_it(error: BaseException) -> bool:
        # What may have to be paid is asked again by the search alone, which counts it.
        if not isinstance(error, ProviderError) or error.may_have_cost:
            return False
        if error.kind not in {*_AGAIN, ErrorKind.RATE_LIMIT}:
            return False
        named = error.retry_after_s
        if named is None:
            waited["again"] += 1
            is_open = "refused" not in error.message.lower()  # else nothing listens there
            return error.kind in _AGAIN and waited["again"] <= settings.tries_again and is_open
        waited["s"] += max(named, settings.again_s)
        return named <= settings.longest_wait_s and waited["s"] <= settings.total_s

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_worth_it),
        stop=tenacity.stop_never,
        wait=wait_s,
        sleep=clock.sleep,
        reraise=True,
    )
    return retrying(provider.ask, request)
