"""The agent: runs one turn of the LLM, from a view to a decision, and writes its record; its memory is the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from cclsearch.core.text import one_line
from cclsearch.core.trust import find_code
from cclsearch.core.values import format_knob_value
from cclsearch.propose.agent.conversation import Conversation, join
from cclsearch.propose.agent.decision import Decision
from cclsearch.propose.agent.memory.evidence import EvidenceSource, NoEvidence
from cclsearch.propose.agent.memory.history import past_turns, read_limits, total_cost
from cclsearch.propose.agent.memory.turn_records import (
    TURNS_FOLDER,
    context_path,
    make_record,
    read_conversation,
    record_context,
    turn_path,
    write_record,
)
from cclsearch.propose.agent.options import AgentOptions, read_seed_program
from cclsearch.propose.agent.policy.runner import PolicyRunner, SandboxRunner
from cclsearch.propose.agent.policy.store import PolicyStore
from cclsearch.propose.agent.prompt.prompt import PromptInput, write_system
from cclsearch.propose.agent.prompt.surrogate_table import MakeSurrogateTable, make_surrogate_table
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits
from cclsearch.propose.agent.providers.retry import Clock, WallClock
from cclsearch.propose.agent.providers.spec import find_price
from cclsearch.propose.agent.providers.types import Message, Provider, Usage
from cclsearch.propose.agent.server import LlmServer
from cclsearch.propose.agent.tools.extension import SpaceExtender, count_growths, make_extension
from cclsearch.propose.agent.tools.lookups import Explain
from cclsearch.propose.agent.tools.tool_handlers import ToolHandlers, list_tools
from cclsearch.propose.agent.turn import Stall, Turn, TurnResult, TurnSettings
from cclsearch.propose.base import Proposal, SearchView
from cclsearch.propose.events import DecisionKind, LlmMode, LlmTurn, SubmittedConfig

TURN_ANSWERS = 5
"""Answers that each use the whole timeout for which a turn has time."""

KEPT = (
    *("submitted", "refused", "bet", "adds", "why"),
    *("insight", "withdraws", "corrections", "doubts", "memory_crashes"),
)
"""Fields of a decision that the ledger keeps."""


@dataclass(frozen=True)
class TurnOutcome:
    """The result of a turn, for the arbiter."""

    proposals: tuple[Proposal, ...]
    finish: str | None
    stall: Stall | None
    event: LlmTurn


@dataclass
class Agent:
    """An LLM behind a provider, with the sources that its tools read."""

    provider: Provider
    options: AgentOptions = field(default_factory=AgentOptions)
    folder: Path | None = None
    """The run folder; None writes no files."""
    evidence: EvidenceSource = field(default_factory=NoEvidence)
    explain: Explain | None = None
    extender: SpaceExtender | None = None
    """Additions to the search space that the LLM may make; None: none."""
    make_table: MakeSurrogateTable = make_surrogate_table
    policies: PolicyRunner = field(default_factory=SandboxRunner)
    clock: Clock = field(default_factory=WallClock)
    server: LlmServer | None = None
    """The state of the provider's server; by default a new one, which takes the server to answer."""
    _running_turn: tuple[int, Turn] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._output_tokens = self.options.max_output_tokens
        self._conversation: Conversation | None = None
        self._max_context = self.options.max_context
        if self.server is None:
            self.server = LlmServer(self.provider, find_price(self.provider.name), self.clock)

    @property
    def watched(self) -> LlmServer:
        """The server."""
        assert self.server is not None
        return self.server

    def limit_reached(self, view: SearchView, planned: Cost | None = None) -> str | None:
        """Return the limit that earlier turns have reached, or would with the planned cost, in words; None if none."""
        spent = total_cost(view.events)
        return self._limits(view).reached(spent + planned.model_copy(update={"usage": Usage()}) if planned else spent)

    def _limits(self, view: SearchView) -> LlmLimits:
        """The limits of the search's start, or those that `resume` has set since."""
        return read_limits(view.events, self.options.limits)

    def describe_running_turn(self) -> LlmTurn | None:
        """The cost so far of a turn that runs in another thread; None if no turn runs."""
        if self._running_turn is None:
            return None
        number, turn = self._running_turn
        cost = turn.cost_so_far()
        text = f"turn {number} ({cost.describe()} so far): the search ended before this turn did"
        return LlmTurn(turn=number, text=text, cost=cost)

    def run_turn(
        self,
        view: SearchView,
        slots: int,
        *,
        max_submitted: int,
        overrules_left: int,
        first_only: bool = False,
        standing: str = "",
    ) -> TurnOutcome:
        """Return the outcome of one whole turn; raises nothing for any fault of a provider or a model.

        With `first_only`, the model chooses among the surrogate's first candidates only. `standing` is its distance
        from a stall.
        """
        number = self._next_number(view)
        store = PolicyStore(self.folder)
        handlers = ToolHandlers(
            view=view,
            table=replace(self.make_table(view), first_only=first_only),
            evidence=self.evidence,
            max_submitted=max_submitted,
            overrules_left=overrules_left,
            mode=self.options.mode,
            anonymous=self.options.anonymous,
            explain=self.explain,
            policies=self.policies,
            has_traces=self.evidence.has_traces,
            extension=make_extension(view, self.extender),
        )
        prompt_input, settings = self._gather(handlers, slots, store, standing), self._settings(view)
        try:
            opening = self._open_conversation(prompt_input, handlers)
            turn = Turn(self.provider, handlers, prompt_input, self.options, settings, opening)
            self._running_turn = (number, turn)
            result = turn.run()
            is_new = self._conversation is None or opening is not self._conversation.messages
            self._max_context = 0 if turn.reads_less else self._max_context
            self._conversation = Conversation(join(opening, turn.own), turn.prompt.system, turn.tools)
            self._output_tokens = turn.max_output_tokens
        finally:
            self._running_turn = None
        version = store.add(result.decision.program) if result.decision and result.decision.program else None
        if self.folder is not None:
            context = context_path(self.folder, count_growths(view))
            if not context.exists():
                write_record(context, record_context(view, self.provider.name, self.options))
            record = make_record(prompt_input, handlers, turn, result, settings, number, opening if is_new else None)
            write_record(turn_path(self.folder, number), record)
        return _make_outcome(view, number, result, version, self.options)

    def _open_conversation(self, prompt_input: PromptInput, handlers: ToolHandlers) -> tuple[Message, ...]:
        """Return the messages of earlier turns; those of an earlier session as notes."""
        if self._conversation is None:
            self._conversation = Conversation(read_conversation(self.folder) if self.folder else ())
        system, tools = write_system(prompt_input.view, self.options), list_tools(handlers, self.options.mode)
        return self._conversation.open(system, tools, self._max_context)

    def _settings(self, view: SearchView) -> TurnSettings:
        return TurnSettings(
            clock=self.clock,
            price=self.watched.price,
            limits=self._limits(view),
            spent=total_cost(view.events),
            retry=self.options.retry,
            max_output_tokens=self._output_tokens,
            max_seconds=self.options.max_turn_s,
        )

    def _gather(self, handlers: ToolHandlers, slots: int, store: PolicyStore, standing: str) -> PromptInput:
        prompt_input = PromptInput(
            handlers.view,
            handlers.table,
            slots,
            handlers.find_shown(),
            offers=handlers.extension.record.offers,
            overrules_left=handlers.overrules_left,
            standing=standing,
            max_submitted=handlers.max_submitted,
            can_correct=handlers.can_correct,
        )
        if self.options.mode != LlmMode.POLICY:
            return prompt_input
        program, note = store.best(handlers.view, self.seed_program(handlers.view))
        return replace(prompt_input, program=program, program_note=note)

    def seed_program(self, view: SearchView) -> str:
        """The first policy program: the one frozen with the search, or the shipped one that fits the card."""
        return self.options.seed_program or read_seed_program(view, self.options.seed_policy)

    def _next_number(self, view: SearchView) -> int:
        in_ledger = max((turn.turn for turn in past_turns(view.events)), default=0)
        if self.folder is None:
            return in_ledger + 1
        on_disk = (int(path.stem) for path in (self.folder / TURNS_FOLDER).glob("[0-9]*.json") if path.stem.isdigit())
        return max(in_ledger, *on_disk, 0) + 1


def make_agent(
    server: LlmServer,
    *,
    options: AgentOptions,
    timeout_s: float,
    folder: Path,
    evidence: EvidenceSource,
    explain: Explain | None,
    extender: SpaceExtender | None = None,
) -> Agent:
    """The agent that asks that server, an answer within `timeout_s`."""
    if options.seed_policy is not None and options.seed_program is None:
        find_code("policies", options.seed_policy, ".py")
    return Agent(
        provider=server.provider,
        options=replace(options, max_turn_s=max(options.max_turn_s, TURN_ANSWERS * timeout_s)),
        folder=folder,
        evidence=evidence,
        explain=explain,
        extender=extender,
        server=server,
    )


def _make_outcome(
    view: SearchView, number: int, result: TurnResult, version: int | None, options: AgentOptions
) -> TurnOutcome:
    decision = result.decision or Decision()
    turn = LlmTurn(
        turn=number,
        decision=result.kind,
        **{name: getattr(decision, name) for name in KEPT},
        num_seen=len(view.observations),
        last_seen=max((o.trial for o in view.observations), default=0),
        cost=result.cost,
        policy=version,
    )
    proposals = tuple(to_proposal(item, number, options) for item in decision.submitted)
    event = turn.model_copy(update={"text": _describe_turn(turn, result)})
    return TurnOutcome(proposals, decision.finish, result.stall, event)


def to_proposal(item: SubmittedConfig, turn: int, options: AgentOptions) -> Proposal:
    """A submitted configuration as the search's proposal."""
    who = "policy" if options.mode == LlmMode.POLICY else options.proposer
    return Proposal(item.config, who, item.rationale, item.expects, turn, is_repeat=item.is_repeat)


def _describe_turn(turn: LlmTurn, result: TurnResult) -> str:
    """A turn in one line, for the ledger."""
    if turn.decision is DecisionKind.SUBMIT:
        what = "submitted " + "; ".join(str(item.config) for item in turn.submitted)
        what += "".join(f"; refused: {why}" for why in turn.refused)
        what += f"; ends the search unless this beats the best: {turn.bet}" if turn.bet else ""
    elif turn.decision is DecisionKind.FINISH:
        what = f"asks to finish: {result.decision.finish if result.decision else ''}"
    elif turn.decision is DecisionKind.EXTEND:
        added = "; ".join(f"{name}={','.join(map(format_knob_value, values))}" for name, values in turn.adds.items())
        what = f"asks to add to the search space: {added}"
    elif turn.decision is DecisionKind.REVISE:
        said = "; ".join(one.describe() for one in turn.corrections)
        what = f"corrects the prediction{': ' * bool(said)}{said}"
        what += "".join(f"; {why}" for why in turn.refused)
    else:
        what = f"no decision: {result.stall.text if result.stall else ''}"
    what += f"; withdraws what it learned in turn {', '.join(map(str, turn.withdraws))}" if turn.withdraws else ""
    what += f"; insight: {turn.insight}" if turn.insight else ""
    return one_line(f"turn {turn.turn} ({turn.cost.describe()}): {what}", 700)
