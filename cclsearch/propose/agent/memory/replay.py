"""Replays the LLM turns of a run without a provider: its answers are read from the turn records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cclsearch.propose.agent.memory.evidence import NoEvidence
from cclsearch.propose.agent.memory.turn_records import (
    ContextRecord,
    TurnRecord,
    read_context,
    read_turns,
    trace_openings,
)
from cclsearch.propose.agent.policy.runner import SandboxRunner
from cclsearch.propose.agent.prompt.prompt import Prompt, PromptInput, PromptOptions
from cclsearch.propose.agent.providers.retry import RetrySettings
from cclsearch.propose.agent.providers.types import Answer, CompletionRequest, ErrorKind, Message, ProviderError
from cclsearch.propose.agent.tools.extension import Extension
from cclsearch.propose.agent.tools.tool_handlers import ToolHandlers
from cclsearch.propose.agent.turn import Turn, TurnSettings
from cclsearch.space.table import Space


@dataclass(frozen=True)
class ReplayedTurn:
    """A recorded turn and the result of its replay."""

    turn: int
    decision: str
    """The recorded decision, in words."""
    again: str
    """The decision of the replay, in words."""
    same_prompt: bool

    @property
    def is_same(self) -> bool:
        return self.decision == self.again


def replay_turns(folder: Path) -> list[ReplayedTurn]:
    """Decide all turns of a run folder again from their records; raises UserError if a record cannot be read."""
    turns = read_turns(folder)
    growths = {record.growths for record in turns} or {0}
    contexts = {number: read_context(folder, number) for number in sorted(growths)}
    spaces = {number: context.space() for number, context in contexts.items()}
    openings = list(trace_openings(turns))[:-1]
    return [
        _replay(contexts[turn.growths], spaces[turn.growths], turn, opening)
        for turn, opening in zip(turns, openings, strict=True)
    ]


class _Recorded:
    """A provider, and clock, that repeat the recorded answers at their recorded times."""

    name = "recorded"

    def __init__(self, record: TurnRecord) -> None:
        self._left = list(record.result.exchanges)
        self._time_s = 0.0

    def ask(self, request: CompletionRequest) -> Answer:
        if not self._left:
            raise ProviderError(
                ErrorKind.BAD_REQUEST,
                "the record has no further answer: the replayed turn sent more requests than the recorded one",
            )
        exchange = self._left.pop(0)
        self._time_s = exchange.at_s
        if exchange.answer is None:
            kind = exchange.error or ErrorKind.MALFORMED
            raise ProviderError(kind, exchange.message, may_have_cost=exchange.may_have_cost)
        return exchange.answer

    def now_s(self) -> float:
        return self._time_s

    def sleep(self, seconds: float) -> None:
        """Returns at once."""


def _replay(context: ContextRecord, space: Space, record: TurnRecord, opening: tuple[Message, ...]) -> ReplayedTurn:
    view = record.view(context, space)
    handlers = ToolHandlers(
        view=view,
        table=record.look,
        evidence=NoEvidence(),
        max_submitted=record.max_submitted,
        overrules_left=record.overrules_left,
        mode=context.mode,
        anonymous=context.anonymous,
        policies=SandboxRunner(),
        looked_up=dict(record.evidence),
        recorded=dict(record.recorded),
        has_traces=record.has_traces,
        extension=Extension(record.extension),
    )
    shown = handlers.find_shown()
    prompt_input = PromptInput(
        *(view, handlers.table, record.slots, shown, record.program, record.program_note, record.extension.offers),
        overrules_left=record.overrules_left,
        standing=record.standing,
        max_submitted=record.max_submitted,
        can_correct=handlers.can_correct,
    )
    options = PromptOptions(context.mode, context.anonymous, context.goal)
    recorded = _Recorded(record)
    settings = TurnSettings(
        clock=recorded,
        price=record.price,
        limits=record.limits,
        spent=record.spent,
        retry=RetrySettings(longest_wait_s=-1, tries_again=0),
        max_output_tokens=record.max_output_tokens,
        max_seconds=record.max_seconds,
    )
    turn = Turn(recorded, handlers, prompt_input, options, settings, opening)
    same_prompt = turn.prompt == Prompt(record.system, record.user)
    return ReplayedTurn(record.turn, record.result.describe(), turn.run().describe(), same_prompt)
