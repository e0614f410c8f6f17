"""The LLM's server during a search: whether it answers, when it is asked again, and what that costs."""

from __future__ import annotations

import os
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.agent.background import start_in_background
from cclsearch.propose.agent.providers.cost import Cost, cost_of, largest_cost
from cclsearch.propose.agent.providers.http import ENVIRONMENT_NAMES
from cclsearch.propose.agent.providers.prices import Price
from cclsearch.propose.agent.providers.retry import Clock, WallClock
from cclsearch.propose.agent.providers.spec import LlmSpec, find_price, make_provider, read_key, read_timeout_s
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    Effort,
    ErrorKind,
    Message,
    Provider,
    ProviderError,
    Role,
    ToolSpec,
)
from cclsearch.propose.events import LlmReport

WAIT_S = 5.0
"""Seconds that the search waits for an answer to the small request; a slower one is collected later."""
PAUSES_S = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Pauses before the server is asked again: three minutes in all, with the waits."""
MAX_WAIT_S = 180.0
"""Most seconds that a search waits for its server in all, failed turns included."""
LOST_S = 60.0
"""Seconds after which an unanswered small request counts as a failure."""
PROBE = CompletionRequest(
    system="You check a connection. Call the tool `ready` once, and write nothing else.",
    messages=(Message(role=Role.USER, text="Are you ready?"),),
    tools=(
        ToolSpec(
            name="ready",
            description="say that you are ready",
            parameters={
                "type": "object",
                "properties": {"ready": {"type": "boolean"}},
                "required": ["ready"],
                "additionalProperties": False,
            },
        ),
    ),
    max_output_tokens=2048,
)
"""The small request: it shows whether key, model, address and form are right."""


class ServerState(Enum):
    """Whether the LLM can be asked now."""

    UP = 1
    DOWN = 2
    """It failed, and is asked again later; the fallback chooses meanwhile."""
    OFF = 3
    """It is not asked again in this search."""


@dataclass
class LlmServer:
    """A provider with its price, and the state of its server. One per process and `--llm`, so the form is kept."""

    provider: Provider
    price: Price | None = None
    clock: Clock = field(default_factory=WallClock)
    state: ServerState = ServerState.UP
    reason: str = ""
    """Reason why it is not `UP`."""
    error: ErrorKind | None = None
    _request: Future[Answer] | None = field(default=None, init=False, repr=False)
    _asked_s: float = field(default=0.0, init=False)
    _next_s: float = field(default=0.0, init=False)
    _pauses: int = field(default=0, init=False)
    _waited_s: float = field(default=0.0, init=False)
    _reports: list[LlmReport] = field(default_factory=list, init=False, repr=False)

    def check(self, wait_s: float = WAIT_S) -> float:
        """Ask the small request, and wait so long for its answer; returns the seconds that it took.

        Afterwards the state is `UP`, `DOWN` (slow, overloaded, rate limited, no connection: another try may succeed) or
        `OFF` (no other try helps), with its reason.
        """
        begun_s = self.clock.now_s()
        self._ask()
        self._collect(wait_s, at_start=True)
        return self.clock.now_s() - begun_s

    def poll(self) -> ServerState:
        """Return the state; a server that is down is asked again once its pause is over."""
        if self.state is not ServerState.DOWN:
            return self.state
        wait_s = 0.0
        if self._request is None and self.clock.now_s() >= self._next_s:
            self._ask()
            wait_s = WAIT_S
        self._collect(wait_s)
        return self.state

    def reopen(self) -> None:
        """Let another search of this process ask a server again that an earlier one gave up."""
        if self.state is ServerState.OFF:
            self.state, self._next_s = ServerState.DOWN, self.clock.now_s()
            self.succeed()

    def fail(self, reason: str, seconds: float = 0.0) -> None:
        """Note that a turn of so many seconds failed for a reason that may pass: ask again after a pause."""
        self.state, self.reason = ServerState.DOWN, reason
        self._waited_s += seconds
        self._pause()

    def succeed(self) -> None:
        """Note that a turn got its answers: the pauses begin anew after the next failure."""
        self._pauses, self._waited_s = 0, 0.0

    @property
    def check_cost(self) -> Cost:
        """The most that a small request can cost."""
        return largest_cost(PROBE, self.price)

    def take_reports(self) -> list[LlmReport]:
        """Return what happened since the last call, for the ledger: changes of form, and small requests."""
        notes = [LlmReport(text=one_line(redact(note), 500)) for note in getattr(self.provider, "take_notes", list)()]
        reports, self._reports = [*notes, *self._reports], []
        return reports

    def _ask(self) -> None:
        self._asked_s = self.clock.now_s()
        self._request = start_in_background(lambda: self.provider.ask(PROBE), "llm-check")

    def _collect(self, wait_s: float, *, at_start: bool = False) -> None:
        request = self._request
        if request is None:
            return
        wait([request], wait_s)
        seconds = self.clock.now_s() - self._asked_s
        if not request.done():
            self.state, self.error = ServerState.DOWN, ErrorKind.TIMEOUT
            self.reason = f"no answer within {max(seconds, wait_s):.0f} s"
            if seconds > LOST_S:
                self._lose(self.reason)
            return
        self._request = None
        try:
            cost = cost_of(request.result().usage, self.price).model_copy(update={"seconds": seconds})
        except ProviderError as error:
            self._take_error(error, at_start=at_start)
            return
        self.state, self.error, self.reason = ServerState.UP, None, ""
        self._reports.append(LlmReport(text=f"answers ({cost.describe()})", cost=cost))

    def _take_error(self, error: ProviderError, *, at_start: bool) -> None:
        self.error = error.kind
        text = f"{error.kind.value.replace('_', ' ')}: {one_line(redact(error.message), 300)}"
        if error.kind.is_answer:
            self.state, self.reason = ServerState.UP, ""  # it answers; a turn tells the model what was wrong
        elif error.kind.is_incurable if at_start else not error.kind.is_temporary:
            self.state, self.reason = ServerState.OFF, text
        else:
            self._lose(text, error)

    def _lose(self, reason: str, error: ProviderError | None = None) -> None:
        if error is None or error.may_have_cost:
            lost = self.check_cost
            self._reports.append(LlmReport(text=f"did not answer: {reason}", cost=lost))
        self.state, self.reason, self._request = ServerState.DOWN, reason, None
        self._pause()

    def _pause(self) -> None:
        if self._pauses >= len(PAUSES_S) or self._waited_s > MAX_WAIT_S:
            self.state = ServerState.OFF
            self.reason = f"it was asked again for three minutes in vain ({self.reason})"
            return
        self._waited_s += PAUSES_S[self._pauses]
        self._next_s = self.clock.now_s() + PAUSES_S[self._pauses]
        self._pauses += 1


def connect(spec: LlmSpec, *, effort: Effort | None = None, price: Price | None = None) -> LlmServer:
    """The server of that spec; the same object as long as the process lives, so that the form it accepts is kept.

    Raises UserError for a missing key or a wrong environment. Nothing is sent.
    """
    names = (*ENVIRONMENT_NAMES, spec.kind.address_name)
    environment = tuple(os.environ.get(name, "") for name in names if name)
    return _connect(spec, effort, price, read_timeout_s(effort, spec.kind), read_key(spec.kind), environment)


@lru_cache(maxsize=16)
def _connect(
    spec: LlmSpec, effort: Effort | None, price: Price | None, timeout_s: float, key: str, environment: tuple[str, ...]
) -> LlmServer:
    provider = make_provider(spec, timeout_s=timeout_s, effort=effort)
    return LlmServer(provider, price or find_price(spec.name))
