"""Earlier turns and moves as the ledger keeps them: the agent and the arbiter have no other memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits
from cclsearch.propose.agent.providers.types import Usage
from cclsearch.propose.base import ProposerEvent, SearchView
from cclsearch.propose.bayes.prior_hints import KEY, PriorHints, format_hints

TURN_TOPIC = "llm_turn"
MOVE_TOPIC = "arbiter"
LIMITS_TOPIC = "llm_limits"


@dataclass(frozen=True)
class SubmittedConfig:
    """One configuration that a turn submitted."""

    config: Config
    expected_step_time_s: float | None = None
    expected_memory_gib: float | None = None
    is_overrule: bool = False
    """The surrogate objected to it, or it was not among the surrogate's most promising configurations."""
    rationale: str = ""
    is_own_idea: bool = True
    """Not among the surrogate's first choices, so the fallback would not have run it."""


@dataclass(frozen=True)
class PastTurn:
    """One turn as the ledger keeps it."""

    number: int
    decision: str
    """`submit`, `finish` or `none`."""
    submitted: tuple[SubmittedConfig, ...]
    insight: str
    cost: Cost
    beliefs: PriorHints = field(default_factory=dict)
    num_seen: int = 0
    """Finished trials that the turn could see."""
    policy: int | None = None
    """Version of the policy program that the turn submitted."""


def turn_event(turn: PastTurn, text: str) -> ProposerEvent:
    """The event of a turn, for the ledger."""
    usage = turn.cost.usage
    return ProposerEvent(
        TURN_TOPIC,
        text,
        {
            "turn": turn.number,
            "decision": turn.decision,
            "submitted": json.dumps([_to_json(item) for item in turn.submitted], separators=(",", ":")),
            "insight": turn.insight,
            KEY: format_hints(turn.beliefs, turn.num_seen),
            "policy": turn.policy,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "cache_read_tokens": usage.cache_read_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
            "tokens_estimated": usage.is_estimated,
            "usd": turn.cost.usd,
            "seconds": round(turn.cost.seconds, 3),
            "requests": turn.cost.requests,
        },
    )


def past_turns(events: Iterable[ProposerEvent]) -> list[PastTurn]:
    """The turns among these events, oldest first."""
    return [_read_turn(event.data) for event in events if event.topic == TURN_TOPIC]


def total_cost(turns: Iterable[PastTurn]) -> Cost:
    """The cost of all these turns."""
    return sum((turn.cost for turn in turns), Cost())


def drop_decision(event: ProposerEvent, why: str) -> ProposerEvent:
    """A turn's event without its decision; its cost and what it learned are kept."""
    data = {**event.data, "decision": "none", "submitted": "[]", "policy": None}
    return ProposerEvent(event.topic, one_line(f"{why}: {event.text}", 500), data)


def limits_event(limits: LlmLimits) -> ProposerEvent:
    """The event of `resume --max-tokens --max-usd`, for the ledger."""
    parts = [f"{limits.max_tokens:,} tokens"] if limits.max_tokens is not None else []
    parts += [f"${limits.max_usd:g}"] if limits.max_usd is not None else []
    text = f"the LLM may use {' and '.join(parts)} in total from now on"
    return ProposerEvent(LIMITS_TOPIC, text, {"max_tokens": limits.max_tokens, "max_usd": limits.max_usd})


def read_limits(events: Iterable[ProposerEvent], limits: LlmLimits) -> LlmLimits:
    """The limits of the search's start, replaced by those that were set since."""
    for event in events:
        if event.topic == LIMITS_TOPIC:
            changed = {name: value for name, value in event.data.items() if value is not None}
            limits = LlmLimits.model_validate({**limits.model_dump(), **changed})
    return limits


def last_insights(view: SearchView, count: int = 6) -> list[str]:
    """The model's insights about framework and cluster, latest last, without repetitions."""
    found: dict[str, None] = {}
    for turn in past_turns(view.events):
        if turn.insight:
            found.pop(turn.insight, None)
            found[turn.insight] = None
    return list(found)[-count:]


def _to_json(item: SubmittedConfig) -> dict[str, object]:
    full = {
        "config": dict(item.config),
        "time": item.expected_step_time_s,
        "memory": item.expected_memory_gib,
        "overrule": item.is_overrule,
        "agreed": not item.is_own_idea,
        "why": one_line(item.rationale, 300),
    }
    return {key: value for key, value in full.items() if value not in (None, False, "")}


def _read_turn(data: Mapping[str, object]) -> PastTurn:
    items = json.loads(str(data.get("submitted") or "[]"))
    usage = Usage(
        input_tokens=_count(data.get("input_tokens")),
        output_tokens=_count(data.get("output_tokens")),
        cache_read_tokens=_count(data.get("cache_read_tokens")),
        cache_write_tokens=_count(data.get("cache_write_tokens")),
        is_estimated=bool(data.get("tokens_estimated")),
    )
    policy = data.get("policy")
    return PastTurn(
        number=_count(data.get("turn")),
        decision=str(data.get("decision", "none")),
        submitted=tuple(
            SubmittedConfig(
                Config(item["config"]),
                item.get("time"),
                item.get("memory"),
                bool(item.get("overrule")),
                str(item.get("why", "")),
                not item.get("agreed"),
            )
            for item in items
        ),
        insight=str(data.get("insight") or ""),
        cost=Cost(
            usage=usage,
            usd=_number(data.get("usd")),
            seconds=_number(data.get("seconds")) or 0.0,
            requests=_count(data.get("requests")),
        ),
        policy=_count(policy) if policy is not None else None,
    )


def _count(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
