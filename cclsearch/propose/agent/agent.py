"""The agent: one turn from a view to a decision, with its record; it keeps no state that the ledger does not hold."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cclsearch.core.content import find_content
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.propose.agent.clock import Clock, WallClock
from cclsearch.propose.agent.evidence import EvidenceSource, NoEvidence, TrialEvidence
from cclsearch.propose.agent.history import (
    MOVE_TOPIC,
    TURN_TOPIC,
    PastTurn,
    SubmittedConfig,
    past_turns,
    read_limits,
    total_cost,
    turn_event,
)
from cclsearch.propose.agent.policy.runner import PolicyRunner, SandboxRunner
from cclsearch.propose.agent.policy.store import PolicyLibrary
from cclsearch.propose.agent.prompt import (
    MAX_PROMPT_BYTES,
    Prompt,
    PromptInput,
    PromptOptions,
    last_observation,
    write_prompt,
    write_system,
)
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits, Price, Prices, load_prices, prices_path
from cclsearch.propose.agent.providers.retry import Patience
from cclsearch.propose.agent.providers.spec import make_provider, parse_spec, read_timeout_s
from cclsearch.propose.agent.providers.types import CompletionRequest, Message, Provider, Role, ToolSpec
from cclsearch.propose.agent.surrogate_table import SurveyFunction, best_observation, survey_surrogate
from cclsearch.propose.agent.tool_handlers import Decision, Explain, ToolHandlers
from cclsearch.propose.agent.tool_schemas import make_toolset
from cclsearch.propose.agent.turn import Stall, Turn, TurnResult, TurnSettings
from cclsearch.propose.agent.turn_records import (
    CONTEXT_FILE,
    TURNS_FOLDER,
    ExchangeRecord,
    RemarkRecord,
    SubmittedRecord,
    TurnRecord,
    record_context,
    record_look,
    record_observation,
    turn_path,
    write_record,
)
from cclsearch.propose.base import ExpectedOutcome, Proposal, ProposerEvent, SearchView

RESERVED_BYTES = {"configs": 10_000, "policy": 12_000}
"""Of the bound on a request, kept for the turn's look-ups."""
TURN_ANSWERS = 5
"""Answers that use all of their time, for which a turn has time."""
LEAST_RESERVED_BYTES = 4000
LEAST_TOLD_BYTES = 8000
"""For trials, candidates and diagnosis, where knobs and tools leave little."""


@dataclass(frozen=True)
class AgentOptions:
    """How an agent works; all of it is frozen at a search's start."""

    mode: str = "configs"
    """`configs` or `policy`."""
    limits: LlmLimits = field(default_factory=LlmLimits)
    anonymous: bool = False
    goal: str = ""
    """How the objective's loss is made, in a line."""
    seed_policy: str | None = None
    """Name or path of the first policy program; None for the shipped one that fits the card."""
    seed_program: str | None = None
    """Its source, as it was when the search began."""
    patience: Patience = field(default_factory=Patience)
    max_output_tokens: int = 4096
    max_turn_s: float = 600.0


@dataclass(frozen=True)
class TurnOutcome:
    """What a turn came to, for the arbiter."""

    number: int
    proposals: tuple[Proposal, ...]
    finish: str | None
    stall: Stall | None
    event: ProposerEvent


@dataclass
class Agent:
    """An LLM behind a provider, with what it may look at."""

    provider: Provider
    options: AgentOptions = field(default_factory=AgentOptions)
    folder: Path | None = None
    """The run folder; None keeps no files."""
    evidence: EvidenceSource = field(default_factory=NoEvidence)
    explain: Explain | None = None
    look: SurveyFunction = survey_surrogate
    policies: PolicyRunner = field(default_factory=SandboxRunner)
    clock: Clock = field(default_factory=WallClock)
    prices: Prices = field(default_factory=lambda: load_prices(prices_path()))
    _under_way: tuple[int, Turn] | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        return self.provider.name

    def limit_reached(self, view: SearchView) -> str | None:
        """Which limit earlier turns have reached, in words."""
        return self._limits(view).reached(total_cost(past_turns(view.remarks)))

    def _limits(self, view: SearchView) -> LlmLimits:
        """The limits of the search's start, or those that `resume` set since."""
        return read_limits(view.remarks, self.options.limits)

    def describe_under_way(self) -> ProposerEvent | None:
        """What a turn that is under way in another thread cost so far; None where there is none."""
        under_way = self._under_way
        if under_way is None:
            return None
        number, turn = under_way
        past = PastTurn(number, "none", (), "", turn.cost_so_far())
        return turn_event(past, f"turn {number} ({describe_cost(past.cost)} so far): the search ended before it did")

    def run_turn(self, view: SearchView, slots: int, *, max_submitted: int, overrules_left: int) -> TurnOutcome:
        """One whole turn; raises nothing for what a provider or a model does."""
        number = self._next_number(view)
        library = PolicyLibrary(self.folder)
        look = self.look(view)
        explained: dict[str, tuple[str, ...]] = {}
        handlers = ToolHandlers(
            view=view,
            look=look,
            evidence=self.evidence,
            max_submitted=max_submitted,
            overrules_left=overrules_left,
            mode=self.options.mode,
            anonymous=self.options.anonymous,
            explain=self._remembering(explained),
            policies=self.policies,
        )
        known = self._gather(handlers, slots, library)
        try:
            prompt, result = self._run(known, handlers, number)
        finally:
            self._under_way = None
        version = library.add(result.decision.program) if result.decision and result.decision.program else None
        self._write(known, handlers, prompt, result, number=number, explained=explained)
        return _to_thought(view, number, result, version, self.options.mode)

    def _run(self, known: PromptInput, handlers: ToolHandlers, number: int) -> tuple[Prompt, TurnResult]:
        tools = make_toolset(known.view.space, self.options.mode, handlers.max_submitted)
        prompt = write_turn_prompt(
            known, tools, PromptOptions(self.options.mode, self.options.anonymous, self.options.goal)
        )
        settings = TurnSettings(
            clock=self.clock,
            jitter=random.Random(f"{known.view.seed}/{number}"),
            price=self._price(),
            limits=self._limits(known.view),
            spent=total_cost(past_turns(known.view.remarks)),
            patience=self.options.patience,
            max_output_tokens=self.options.max_output_tokens,
            max_seconds=self.options.max_turn_s,
        )
        turn = Turn(self.provider, handlers, prompt, tools, settings)
        self._under_way = (number, turn)
        return prompt, turn.run()

    def _price(self) -> Price | None:
        return self.prices.find(self.provider.name)

    def _gather(self, handlers: ToolHandlers, slots: int, library: PolicyLibrary) -> PromptInput:
        shown: dict[int, TrialEvidence] = {}
        for observation in (best_observation(handlers.view), last_observation(handlers.view)):
            found = handlers.find_evidence(observation.trial) if observation else None
            if observation and found:
                shown[observation.trial] = found
        known = PromptInput(handlers.view, handlers.look, slots, shown)
        if self.options.mode != "policy":
            return known
        program, note = library.best(handlers.view, self.seed_program(handlers.view))
        return replace(known, program=program, program_note=note)

    def seed_program(self, view: SearchView) -> str:
        """The policy program to begin with: the one that was frozen with the search, or the shipped one that fits."""
        return self.options.seed_program or seed_program(view, self.options.seed_policy)

    def _remembering(self, explained: dict[str, tuple[str, ...]]) -> Explain | None:
        explain = self.explain
        if explain is None:
            return None

        def tell(config: Config) -> tuple[str, ...]:
            explained[config.digest] = tuple(explain(config))
            return explained[config.digest]

        return tell

    def _next_number(self, view: SearchView) -> int:
        told = max((turn.number for turn in past_turns(view.remarks)), default=0)
        if self.folder is None:
            return told + 1
        kept = (int(path.stem) for path in (self.folder / TURNS_FOLDER).glob("[0-9]*.json") if path.stem.isdigit())
        return max(told, *kept, 0) + 1

    def _write(
        self,
        known: PromptInput,
        handlers: ToolHandlers,
        prompt: Prompt,
        result: TurnResult,
        *,
        number: int,
        explained: dict[str, tuple[str, ...]],
    ) -> None:
        if self.folder is None:
            return
        options, limits = self.options, self._limits(known.view)
        context = self.folder / TURNS_FOLDER / CONTEXT_FILE
        if not context.exists():
            record = record_context(
                known.view, model=self.provider.name, mode=options.mode, anonymous=options.anonymous
            )
            write_record(context, record.model_copy(update={"goal": options.goal}))
        write_record(
            turn_path(self.folder, number),
            make_record(known, handlers, prompt, result, number=number, explained=explained).model_copy(
                update={"limits": limits, "price": self._price(), "max_seconds": options.max_turn_s}
            ),
        )


def write_turn_prompt(known: PromptInput, tools: Sequence[ToolSpec], options: PromptOptions) -> Prompt:
    """The prompt with room left for its tools and for the turn's look-ups."""
    room = MAX_PROMPT_BYTES - RESERVED_BYTES[options.mode]
    fixed = _measure(Prompt(write_system(known.view, options), ""), tools)
    if room - fixed < LEAST_TOLD_BYTES:
        # A space of many knobs: what is told of the search comes before what can be looked up.
        room = min(fixed + LEAST_TOLD_BYTES, MAX_PROMPT_BYTES - LEAST_RESERVED_BYTES)
    # JSON escapes newlines and quotes, so the text's own bytes are not quite what is sent.
    limit = int((room - _measure(Prompt("", ""), tools)) * 0.95)
    prompt = write_prompt(known, options, limit)
    for _ in range(_MOST_FITTINGS):
        excess = _measure(prompt, tools) - room
        if excess <= 0:
            break
        limit -= excess
        prompt = write_prompt(known, options, limit)
    return prompt


_MOST_FITTINGS = 3


def _measure(prompt: Prompt, tools: Sequence[ToolSpec]) -> int:
    message = Message(role=Role.USER, text=prompt.user)
    return CompletionRequest(system=prompt.system, messages=(message,), tools=tuple(tools)).num_bytes


def make_record(
    known: PromptInput,
    handlers: ToolHandlers,
    prompt: Prompt,
    result: TurnResult,
    *,
    number: int,
    explained: Mapping[str, tuple[str, ...]],
) -> TurnRecord:
    """The file's content for one turn, but for what it ran under."""
    view = known.view
    decision = result.decision or Decision()
    return TurnRecord(
        turn=number,
        observations=tuple(record_observation(o) for o in view.observations),
        pending=tuple(sorted(view.pending)),
        held_back=tuple(sorted(view.held_back)),
        budget_left=view.budget_left,
        next_trial=view.next_trial,
        remarks=tuple(
            RemarkRecord(topic=r.topic, text=r.text, data=dict(r.data))
            for r in view.remarks
            if r.topic in {TURN_TOPIC, MOVE_TOPIC}
        ),
        slots=known.slots,
        max_submitted=handlers.max_submitted,
        overrules_left=handlers.overrules_left,
        look=record_look(handlers.look),
        evidence=handlers.looked_up,
        program=known.program,
        program_note=known.program_note,
        explanations=dict(explained),
        spent=total_cost(past_turns(view.remarks)),
        system=prompt.system,
        user=prompt.user,
        exchanges=tuple(
            ExchangeRecord(
                answer=e.answer, trouble=e.trouble, message=e.message, request_bytes=e.request_bytes, at_s=e.at_s
            )
            for e in result.exchanges
        ),
        decision=_decision_word(result.decision),
        submitted=tuple(_submitted_record(item) for item in decision.submitted),
        finish=decision.finish,
        insight=decision.insight,
        beliefs=dict(decision.beliefs),
        submitted_program=decision.program,
        stall=result.stall.text if result.stall else "",
        stall_cause=result.stall.cause if result.stall else "",
        faults=tuple(result.faults),
        cost=result.cost,
    )


def make_agent(
    spec: str,
    *,
    options: AgentOptions | None = None,
    folder: Path | None = None,
    evidence: EvidenceSource | None = None,
    explain: Explain | None = None,
    look: SurveyFunction | None = None,
) -> Agent:
    """The agent of `--llm SPEC`, its key taken from the environment; raises UserError where spec or key will not do."""
    options = options or AgentOptions()
    if options.seed_policy is not None and options.seed_program is None:
        find_content("policies", options.seed_policy, ".py")
    timeout_s = read_timeout_s()
    return Agent(
        provider=make_provider(parse_spec(spec), timeout_s=timeout_s),
        options=replace(options, max_turn_s=max(options.max_turn_s, TURN_ANSWERS * timeout_s)),
        folder=folder,
        evidence=evidence or NoEvidence(),
        explain=explain,
        look=look or survey_surrogate,
    )


def seed_program(view: SearchView, name: str | None) -> str:
    """Source of the policy program of that name; by default the shipped one that fits the card."""
    chosen = name or ("moe" if view.card.arch.moe else "dense")
    return find_content("policies", chosen, ".py").read_text(encoding="utf-8")


def _to_thought(view: SearchView, number: int, result: TurnResult, version: int | None, mode: str) -> TurnOutcome:
    decision = result.decision or Decision()
    past = PastTurn(
        number=number,
        decision=_decision_word(result.decision),
        submitted=decision.submitted,
        insight=decision.insight,
        beliefs=decision.beliefs,
        num_seen=len(view.observations),
        cost=result.cost,
        policy=version,
    )
    proposals = tuple(to_proposal(item, number, mode) for item in decision.submitted)
    return TurnOutcome(number, proposals, decision.finish, result.stall, turn_event(past, describe_turn(past, result)))


def to_proposal(item: SubmittedConfig, turn: int, mode: str) -> Proposal:
    """A submitted configuration as the search takes it."""
    expects = ExpectedOutcome(step_time_s=item.expected_step_time_s, peak_memory_gib=item.expected_memory_gib)
    return Proposal(item.config, "policy" if mode == "policy" else "llm", item.rationale, expects, turn)


def describe_turn(turn: PastTurn, result: TurnResult) -> str:
    """A turn in one line, for the ledger."""
    cost = describe_cost(turn.cost)
    if turn.decision == "submit":
        what = "submitted " + "; ".join(str(item.config) for item in turn.submitted)
    elif turn.decision == "finish":
        what = f"wants to finish: {result.decision.finish if result.decision else ''}"
    else:
        what = f"no decision: {result.stall.text if result.stall else ''}"
    return one_line(f"turn {turn.number} ({cost}): {what}", 500)


def describe_cost(cost: Cost) -> str:
    """`12,300 tokens, $0.0410, 12.3 s`."""
    usd = "price unknown" if cost.usd is None else f"${cost.usd:.4f}"
    return f"{cost.usage.total:,} tokens, {usd}, {cost.seconds:.1f} s"


def _decision_word(decision: Decision | None) -> str:
    if decision is None:
        return "none"
    return "finish" if decision.finish is not None else "submit"


def _submitted_record(item: SubmittedConfig) -> SubmittedRecord:
    return SubmittedRecord(
        config=item.config,
        expected_step_time_s=item.expected_step_time_s,
        expected_memory_gib=item.expected_memory_gib,
        rationale=item.rationale,
        is_overrule=item.is_overrule,
    )
