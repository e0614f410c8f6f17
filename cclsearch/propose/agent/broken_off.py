"""A turn whose trial missed what the LLM stated is broken off: the LLM chooses the rest of its trials anew."""

from __future__ import annotations

from dataclasses import dataclass

from cclsearch.propose.agent.history import past_turns
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.events import ArbiterMove, DecisionKind, LlmTurn, SubmittedConfig


@dataclass(frozen=True)
class BrokenOff:
    """A turn that submitted several configurations, of which the latest to run missed."""

    turn: int
    """The turn that submitted first; what the LLM chooses now still belongs to it."""
    trial: int
    """The trial that failed or was refuted."""
    left: int
    """Configurations of the turn that may be chosen anew."""
    dropped: tuple[SubmittedConfig, ...]
    """What was to run next."""


def find_broken_off(view: SearchView) -> BrokenOff | None:
    """Return the turn that is broken off now; None if none is.

    The LLM has as many trials as it submitted: asking it again between them gives it no more of them. With several
    slots nothing is left to choose, because all that a turn submits starts at once.
    """
    latest = _latest_submission(view)
    if latest is None or latest.num_seen >= len(view.observations):
        return None
    chain = [turn for turn in past_turns(view.events) if turn.submitted and turn.root == latest.root]
    seen = {o.config.digest: o for o in view.observations if not o.is_confirmation}
    first = [item for item in chain[0].submitted if not item.is_repeat]
    items = {item.config.digest: item for turn in chain for item in turn.submitted if not item.is_repeat}
    run = [(seen[digest], item) for digest, item in items.items() if digest in seen]
    left = min(len(first) - len(run), view.budget_left)
    if not run or left <= 0 or any(view.space.row(item.config) in view.pending for item in items.values()):
        return None
    last, item = max(run, key=lambda pair: pair[0].trial)
    if not is_missed(view, last, item):
        return None
    dropped = tuple(item for item in latest.submitted if item.config.digest not in seen)
    return BrokenOff(latest.root, last.trial, left, dropped)


def is_missed(view: SearchView, o: Observation, item: SubmittedConfig) -> bool:
    """Whether a trial of the LLM failed, or measured what by its own words refutes its rationale."""
    metric, value = view.primary, o.value(view.primary.name)
    if not o.is_valid or value is None:
        return True
    return item.refuted_at is not None and metric.sign * value > metric.sign * item.refuted_at


def _latest_submission(view: SearchView) -> LlmTurn | None:
    """Return the latest turn that submitted something, unless the arbiter moved since, which drops its queue."""
    for event in reversed(view.events):
        if isinstance(event, ArbiterMove):
            return None
        if isinstance(event, LlmTurn) and event.decision is DecisionKind.SUBMIT:
            return event
    return None
