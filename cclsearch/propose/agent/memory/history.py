"""Earlier turns as the ledger keeps them: the agent and the arbiter have no other memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from cclsearch.core.text import one_line
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits
from cclsearch.propose.base import Observation, ReportedEvent, SearchView
from cclsearch.propose.events import ArbiterMove, ArbiterPhase, DecisionKind, LlmLimitsSet, LlmReport, LlmTurn


def past_turns(events: Iterable[ReportedEvent]) -> list[LlmTurn]:
    """The turns among these events, oldest first."""
    return [event for event in events if isinstance(event, LlmTurn)]


def total_cost(events: Iterable[ReportedEvent]) -> Cost:
    """The cost of all turns and small requests among these events."""
    return sum((event.cost for event in events if isinstance(event, LlmTurn | LlmReport)), Cost())


def drop_decision(turn: LlmTurn, why: str) -> LlmTurn:
    """Return a turn without its decision; its cost and its lessons stay."""
    text = one_line(f"{why}: {turn.text}", 500)
    none: dict[str, object] = {"decision": DecisionKind.NONE, "submitted": (), "adds": {}, "policy": None}
    return turn.model_copy(update={"text": text, **none})


def limits_event(limits: LlmLimits) -> LlmLimitsSet:
    """The event of `resume --max-tokens --max-usd`, for the ledger."""
    parts = [f"{limits.max_tokens:,} tokens"] if limits.max_tokens is not None else []
    parts += [f"${limits.max_usd:g}"] if limits.max_usd is not None else []
    return LlmLimitsSet(text=f"the LLM may use {' and '.join(parts)} in total from now on", limits=limits)


def read_limits(events: Iterable[ReportedEvent], limits: LlmLimits) -> LlmLimits:
    """The limits of the search's start, replaced by those that were set since."""
    for event in events:
        if isinstance(event, LlmLimitsSet):
            limits = limits.model_copy(update=event.limits.model_dump(exclude_none=True))
    return limits


def last_insights(view: SearchView, count: int = 6) -> list[LlmTurn]:
    """The turns of the model's insights, latest last, without repetitions; also those withdrawn since."""
    found: dict[str, LlmTurn] = {}
    for turn in past_turns(view.events):
        if turn.insight:
            found.pop(turn.insight, None)
            found[turn.insight] = turn
    return list(found.values())[-count:]


def just_corrected(view: SearchView) -> bool:
    """Whether the latest turn corrected the prediction, and no trial has finished since."""
    turns = past_turns(view.events)
    return bool(turns) and turns[-1].decision is DecisionKind.REVISE and turns[-1].num_seen == len(view.observations)


def find_choosers(view: SearchView) -> dict[int, str]:
    """Trial -> who chose it: `you` (the model), `surrogate`, or `seed` for those before the model took over.

    A configuration that a stall dropped from the model's queue, and that the surrogate ran later, is the surrogate's.
    """
    moves = [event.after for event in view.events if isinstance(event, ArbiterMove)]
    starts = [move.since_trial for move in moves]
    first_seen: dict[str, int] = {}
    for turn in past_turns(view.events):
        for item in turn.submitted:
            # of a repeat, only the runs after the turn are the model's choice
            first_seen.setdefault(item.config.digest, turn.num_seen)

    def choose(o: Observation) -> str:
        phase = moves[at - 1].phase if (at := bisect_right(starts, o.trial)) else ArbiterPhase.SEEDS
        is_mine = first_seen.get(o.config.digest, o.trial) < o.trial
        if is_mine and (not moves or phase is ArbiterPhase.LLM):
            return "you"
        return "seed" if phase is ArbiterPhase.SEEDS else "surrogate"

    return {o.trial: choose(o) for o in view.observations if not o.is_confirmation}
