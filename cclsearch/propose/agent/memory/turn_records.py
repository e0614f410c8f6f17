"""Turns on disk: `turns/0007.json` keeps a turn's input and the provider's answers, for a replay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.array_codec import Packed
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError, refuse_newer
from cclsearch.core.values import Model
from cclsearch.propose.agent.conversation import join
from cclsearch.propose.agent.memory.evidence import TrialEvidence
from cclsearch.propose.agent.options import AgentOptions
from cclsearch.propose.agent.prompt.prompt import PromptInput
from cclsearch.propose.agent.prompt.quoting import redact_strings
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits, Price
from cclsearch.propose.agent.providers.types import Message
from cclsearch.propose.agent.tools.extension import ExtensionRecord, count_growths
from cclsearch.propose.agent.tools.tool_handlers import ToolHandlers
from cclsearch.propose.agent.turn import Turn, TurnResult, TurnSettings
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.events import ArbiterMove, LlmMode, LlmTurn
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge
from cclsearch.scoring.objective import Objective
from cclsearch.space.table import Knob, Space

TURNS_FOLDER = "turns"
CONTEXT_FILE = "context.json"
VERSION = 3
PACKED_FIELDS = {"codes", "look"}
"""Fields of packed numbers: they hold no secret, but by chance their text may look like one."""

OLD_FIELDS = {"explanations", "look_with_beliefs"}
"""Fields of earlier versions, which are left out."""

T = TypeVar("T", bound=Model)


class ContextRecord(Model):
    """The part that does not change during a search: `turns/context.json`."""

    schema_version: int = VERSION
    model: str
    """`anthropic:MODEL`, ...: no key, no address."""
    mode: LlmMode
    anonymous: bool
    card: Card
    knobs: tuple[Knob, ...]
    codes: Annotated[NDArray[np.int16], Packed(np.int16)]
    """The configurations of the search space, row by row."""
    num_raw: int
    rules: tuple[str, ...]
    target: Objective | None
    """None: the primary metric of the card's task."""
    goal: str = ""
    """The formula of its loss, as the prompt shows it."""
    seed: int
    prior: tuple[Observation, ...] = ()
    earlier: EarlierKnowledge | None = None
    can_repeat: bool = False
    """Whether a doubted trial could run again."""

    def space(self) -> Space:
        """The search space; raises UserError if the record is damaged."""
        if len(self.codes) % max(len(self.knobs), 1):
            raise UserError(f"the search space in {CONTEXT_FILE!r} cannot be read: its last row is incomplete")
        return Space(self.knobs, self.codes.reshape(-1, len(self.knobs)), self.num_raw, self.rules)


class TurnRecord(Model):
    """One turn: its view, the provider's answers and the decision."""

    schema_version: int = VERSION
    turn: int
    observations: tuple[Observation, ...]
    pending: tuple[int, ...]
    held_back: tuple[int, ...] = ()
    budget_left: int
    next_trial: int
    remarks: tuple[LlmTurn | ArbiterMove, ...]
    """The events of the ledger that the turn could read."""
    slots: int
    max_submitted: int
    overrules_left: int
    standing: str = ""
    """The model's distance from a stall, as in the prompt."""
    # Computed later, or on another machine, it may differ.
    look: SurrogateTable
    """The surrogate's table at the time of the turn."""
    evidence: dict[int, TrialEvidence] = {}
    program: str | None = None
    program_note: str = ""
    recorded: dict[str, str] = {}
    """Look-up and its arguments -> its text, of those that a replay cannot repeat: rules, traces, suppositions."""
    limits: LlmLimits = LlmLimits()
    # The price list may have changed since.
    price: Price | None = None
    """Price of the model, if known."""
    max_seconds: float = 600.0
    """Time limit of the turn."""
    max_output_tokens: int = 16_384
    """Limit on the tokens of its first answer."""
    spent: Cost = Cost()
    """Cost of earlier turns."""
    has_traces: bool = False
    growths: int = 0
    """Number of earlier growths of the search space: each growth has a context of its own."""
    extension: ExtensionRecord = ExtensionRecord()
    system: str
    user: str
    result: TurnResult
    opening: tuple[Message, ...] | None = None
    """The conversation before it; None if it continues that of the turn before."""
    own: tuple[Message, ...] = ()
    """Its part of the conversation."""

    def view(self, context: ContextRecord, space: Space) -> SearchView:
        """The view that this turn had."""
        return SearchView(
            card=context.card,
            space=space,
            observations=_find_rows(self.observations, space),
            pending=frozenset(self.pending),
            held_back=frozenset(self.held_back),
            budget_left=self.budget_left,
            seed=context.seed,
            target=context.target,
            prior=_find_rows(context.prior, space),
            earlier=context.earlier,
            can_repeat=context.can_repeat,
            events=self.remarks,
            next_trial=self.next_trial,
        )


def _find_rows(observations: Sequence[Observation], space: Space) -> tuple[Observation, ...]:
    return tuple(replace(observation, row=space.row(observation.config)) for observation in observations)


def make_record(
    prompt_input: PromptInput,
    handlers: ToolHandlers,
    turn: Turn,
    result: TurnResult,
    settings: TurnSettings,
    number: int,
    opening: tuple[Message, ...] | None,
) -> TurnRecord:
    """The record of one turn."""
    view = prompt_input.view
    return TurnRecord(
        turn=number,
        observations=tuple(view.observations),
        pending=tuple(sorted(view.pending)),
        held_back=tuple(sorted(view.held_back)),
        budget_left=view.budget_left,
        next_trial=view.next_trial,
        remarks=tuple(event for event in view.events if isinstance(event, LlmTurn | ArbiterMove)),
        slots=prompt_input.slots,
        max_submitted=handlers.max_submitted,
        overrules_left=handlers.overrules_left,
        standing=prompt_input.standing,
        look=handlers.table,
        evidence=handlers.looked_up,
        program=prompt_input.program,
        program_note=prompt_input.program_note,
        recorded=dict(handlers.recorded),
        limits=settings.limits,
        price=settings.price,
        max_seconds=settings.max_seconds,
        max_output_tokens=settings.max_output_tokens,
        spent=settings.spent,
        has_traces=handlers.has_traces,
        growths=count_growths(view),
        extension=handlers.extension.record,
        system=turn.prompt.system,
        user=turn.prompt.user,
        result=result,
        opening=opening,
        own=turn.own,
    )


def record_context(view: SearchView, model: str, options: AgentOptions) -> ContextRecord:
    """The context record of a search."""
    return ContextRecord(
        model=model,
        mode=options.mode,
        anonymous=options.anonymous,
        goal=options.goal,
        card=view.card,
        knobs=view.space.knobs,
        codes=view.space.codes_NK,
        num_raw=view.space.num_raw,
        rules=view.space.rules,
        target=view.target,
        seed=view.seed,
        prior=view.prior,
        earlier=view.earlier,
        can_repeat=view.can_repeat,
    )


def write_record(path: Path, record: Model) -> None:
    """Write one record atomically, with secrets masked in each string."""
    whole = record.model_dump(mode="json")
    packed = {name: whole.pop(name) for name in PACKED_FIELDS & set(whole)}
    data = {**redact_strings(whole), **packed}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(data, indent=1, ensure_ascii=True) + "\n")


def read_context(folder: Path, growths: int = 0) -> ContextRecord:
    """The context record of a run folder after so many growths; raises UserError if it cannot be read."""
    return _read(context_path(folder, growths), ContextRecord)


def context_path(folder: Path, growths: int = 0) -> Path:
    """`turns/context.json`, and `turns/context-2.json` after the second growth of the search space."""
    name = CONTEXT_FILE if not growths else CONTEXT_FILE.replace(".", f"-{growths}.")
    return folder / TURNS_FOLDER / name


def read_turns(folder: Path) -> list[TurnRecord]:
    """All turn records of a run folder, oldest first; raises UserError if one cannot be read."""
    paths = sorted((folder / TURNS_FOLDER).glob("[0-9]*.json"))
    return [_read(path, TurnRecord) for path in paths]


def trace_openings(turns: Iterable[TurnRecord]) -> Iterator[tuple[Message, ...]]:
    """Yield the conversation before each of these turns, and then that after the last."""
    before: tuple[Message, ...] = ()
    for turn in turns:
        opening = before if turn.opening is None else turn.opening
        yield opening
        before = join(opening, turn.own)
    yield before


def read_conversation(folder: Path) -> tuple[Message, ...]:
    """The conversation in a run folder; none if its records cannot be read."""
    try:
        return list(trace_openings(read_turns(folder)))[-1]
    except UserError:
        return ()


def turn_path(folder: Path, turn: int) -> Path:
    """`turns/0007.json`."""
    return folder / TURNS_FOLDER / f"{turn:04d}.json"


def _read(path: Path, model: type[T]) -> T:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.get("schema_version") if isinstance(data, dict) else None
        refuse_newer(path, version, VERSION)
        for old in OLD_FIELDS & set(data):
            del data[old]
        return model.model_validate(data)
    except FileNotFoundError:
        raise UserError(f"run {path.parent.parent.name!r} used no LLM, so there is nothing to replay") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from None
