"""Abandons the remaining trials of a turn when one surprises; the LLM then decides again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cclsearch.propose.agent.memory.history import past_turns
from cclsearch.propose.agent.prompt.surrogate_table import improvement_threshold
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.events import ArbiterMove, DecisionKind, LlmTurn, SubmittedConfig


@dataclass(frozen=True)
class AbandonedTurn:
    """A turn with several submitted configurations; the latest result changes what to try next."""

    turn: int
    """The turn that submitted first; the LLM's new choice still belongs to it."""
    trial: int
    """The trial that changes it."""
    why: str
    """The trial's surprise, in words."""
    left: int
    """Configurations of the turn that may be chosen anew."""
    dropped: tuple[SubmittedConfig, ...]
    """The configurations that were to run next."""


def find_abandoned(view: SearchView) -> AbandonedTurn | None:
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
    why = _find_surprise(view, last, item)
    if not why:
        return None
    dropped = tuple(item for item in latest.submitted if item.config.digest not in seen)
    return AbandonedTurn(latest.root, last.trial, why, left, dropped)


def is_missed(view: SearchView, o: Observation, item: SubmittedConfig) -> bool:
    """Whether a trial of the LLM failed, or measured what its own rationale called a refutation."""
    metric, value = view.primary, o.value(view.primary.name)
    if not o.is_valid or value is None:
        return True
    return item.refuted_at is not None and metric.sign * value > metric.sign * item.refuted_at


def _find_surprise(view: SearchView, o: Observation, item: SubmittedConfig) -> str:
    """Return a trial's surprise that changes what to try next, in words; empty if none."""
    if is_missed(view, o, item):
        return "failed, or measured beyond your refuted_at"
    return "improved the best more than expected" if is_windfall(view, o, item) else ""


def is_windfall(view: SearchView, o: Observation, item: SubmittedConfig) -> bool:
    """Whether a trial beat the best, the surrogate's prediction and the LLM's expectation, each beyond the noise."""
    metric, noise = view.primary, improvement_threshold(view)
    value, predicted = o.value(metric.name), item.predicted.metrics.get(metric.name)
    earlier = [p.loss for p in view.observations if p.loss is not None and p.trial < o.trial]
    if o.loss is None or value is None or not predicted or not earlier:
        return False
    expected = [predicted, *(v for v in (item.expects.metrics.get(metric.name),) if v)]
    is_better = all(metric.sign * math.log(value / figure) < -noise for figure in expected)
    return is_better and o.loss < min(earlier) - abs(min(earlier)) * noise


def _latest_submission(view: SearchView) -> LlmTurn | None:
    """Return the latest turn that submitted something; None if the arbiter moved since, which drops its queue."""
    for event in reversed(view.events):
        if isinstance(event, ArbiterMove):
            return None
        if isinstance(event, LlmTurn) and event.decision is DecisionKind.SUBMIT:
            return event
    return None
