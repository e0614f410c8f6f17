"""One turn: the model makes look-ups, then decides. The turn ends under any fault of the model or its provider."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.agent.conversation import split_opening
from cclsearch.propose.agent.decision import Decision, ToolReply
from cclsearch.propose.agent.echo import clip_reply, clip_results, echo_call, echo_text, shrink_message
from cclsearch.propose.agent.prompt.messages import WORDS
from cclsearch.propose.agent.prompt.prompt import (
    MAX_CORRECTIONS,
    MAX_LOOKUPS,
    MAX_PROMPT_BYTES,
    PromptInput,
    PromptOptions,
    write_turn_prompt,
)
from cclsearch.propose.agent.prompt.quoting import quote_line
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits, Price, cost_of, largest_cost
from cclsearch.propose.agent.providers.parse import MAX_CALLS, find_call_in_text, settle_calls
from cclsearch.propose.agent.providers.retry import Clock, RetrySettings, ask_with_retries
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    ErrorKind,
    Message,
    Provider,
    ProviderError,
    Role,
    StopReason,
    ToolCall,
    ToolResult,
    Usage,
)
from cclsearch.propose.agent.tools.lookups import MAX_REPLY_BYTES
from cclsearch.propose.agent.tools.tool_handlers import ToolHandlers, list_tools
from cclsearch.propose.events import DecisionKind

MAX_CALLS_BYTES = 4500
"""Bytes of the arguments of all calls of one answer when they are sent back."""
MIN_REPLY_BYTES = 300
MAX_ID = 48
"""Characters of a call's identifier that are kept."""
UNANSWERED = "not answered, because what they show has changed: {names}. Send these look-ups again if you need them"
NOT_RUN = "not answered"
START_OUTPUT_TOKENS = 16_384
"""Limit on the tokens of one answer at the start of a search: a model thinks before it decides."""
MAX_OUTPUT_TOKENS = 65_536
"""The same after answers that were cut off."""
MIN_OUTPUT_TOKENS = 2_048
"""Output tokens for which money must be left before a request."""
MAX_PAUSES = 5
"""Answers of a turn that the provider interrupted and that are continued."""
KEPT_BYTES = 3 * MAX_PROMPT_BYTES
"""Size of a conversation with the model's own blocks. Shortened, its blocks would no longer fit it, and be refused;
models that give such blocks read far more than this."""


@dataclass(frozen=True)
class Stall:
    """A turn that ended without a decision."""

    cause: str
    """The last fault: `duplicate`, `illegal`, `malformed`, `refusal`, `provider`, `limit`, ..."""
    text: str
    is_temporary: bool = True
    """Whether a later turn may succeed."""


@dataclass(frozen=True)
class Exchange:
    """The answer to one request, or the error in its place, as a replay needs it."""

    answer: Answer | None
    error: ErrorKind | None = None
    message: str = ""
    request_bytes: int = 0
    at_s: float = 0.0
    """Seconds since the turn began."""
    results: tuple[ToolResult, ...] = ()
    """Results of the answer's look-ups; none if it decided. A replay looks up again."""
    may_have_cost: bool = False
    """Whether the request was counted with its largest cost, since its answer was lost."""


@dataclass
class TurnResult:
    """The decision of a turn or the reason why there is none, and its cost."""

    decision: Decision | None
    stall: Stall | None
    cost: Cost
    exchanges: list[Exchange] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Short names of the mistakes that were corrected or ended the turn, in order."""

    @property
    def kind(self) -> DecisionKind:
        if self.decision is None:
            return DecisionKind.NONE
        if self.decision.adds:
            return DecisionKind.EXTEND
        if self.decision.is_revision:
            return DecisionKind.REVISE
        return DecisionKind.SUBMIT if self.decision.finish is None else DecisionKind.FINISH

    def describe(self) -> str:
        """The decision in words."""
        if self.decision is None:
            return f"no decision: {self.stall.cause if self.stall else ''}"
        if self.decision.finish is not None:
            return f"finish: {self.decision.finish}"
        if self.decision.adds:
            return "extend " + json.dumps(dict(self.decision.adds), sort_keys=True)
        if self.decision.is_revision:
            said = [one.describe() for one in self.decision.corrections]
            return "correct " + json.dumps([said, self.decision.withdraws], sort_keys=True)
        bet = "bet " * bool(self.decision.bet)
        return f"{bet}submit " + "; ".join(str(item.config) for item in self.decision.submitted)


@dataclass(frozen=True)
class TurnSettings:
    """The clock, limits and prices of a turn."""

    clock: Clock
    price: Price | None = None
    limits: LlmLimits = field(default_factory=LlmLimits)
    spent: Cost = field(default_factory=Cost)
    """Cost of earlier turns."""
    retry: RetrySettings = field(default_factory=RetrySettings)
    max_output_tokens: int = START_OUTPUT_TOKENS
    max_seconds: float = 600.0
    """Time limit of a turn, after which no further request starts."""


class Turn:
    """Runs one turn until it ends."""

    def __init__(
        self,
        provider: Provider,
        handlers: ToolHandlers,
        prompt_input: PromptInput,
        options: PromptOptions,
        settings: TurnSettings,
        opening: Sequence[Message] = (),
    ) -> None:
        """`opening`: the conversation of earlier turns."""
        self._provider = provider
        self._handlers = handlers
        self.tools = list_tools(handlers, options.mode)
        self.prompt = write_turn_prompt(prompt_input, self.tools, options)
        self._settings = settings
        self._earlier, results = split_opening(opening)
        self._messages: list[Message] = [Message(role=Role.USER, text=self.prompt.user, results=results)]
        self.reads_less = False
        """Whether the server refused the conversation."""
        self.own: tuple[Message, ...] = ()
        """The turn's part of the conversation, once it is decided; a turn without a decision has none."""
        self._lookups = 0
        self.max_output_tokens = settings.max_output_tokens
        """The limit on the tokens of an answer; it grows if answers are cut off, and the next turn begins with it."""
        self._pauses = 0
        self._in_flight: CompletionRequest | None = None
        self._ids = {call.id for message in self._earlier for call in message.calls}
        self._result = TurnResult(None, None, Cost())
        self._started_s = settings.clock.now_s()

    def run(self) -> TurnResult:
        """Return the result; raises nothing for any fault of a provider."""
        result = self._result
        while result.decision is None and result.stall is None:
            result.stall = self._limit_stall()
            if result.stall is None:
                self._exchange()
        result.cost = result.cost + Cost(seconds=self._elapsed_s())
        return result

    def cost_so_far(self) -> Cost:
        """The cost so far; a request that is not answered yet counts with its largest cost."""
        cost = self._result.cost + Cost(seconds=self._elapsed_s())
        if self._in_flight is None:
            return cost
        return cost + largest_cost(self._in_flight, self._settings.price).model_copy(update={"usage": Usage()})

    def _elapsed_s(self) -> float:
        return self._settings.clock.now_s() - self._started_s

    def _limit_stall(self) -> Stall | None:
        reached = self._settings.limits.reached(self._settings.spent + self._result.cost)
        if reached:
            return Stall("limit", f"a limit is reached: {reached}", is_temporary=False)
        seconds = self._elapsed_s()
        if seconds > self._settings.max_seconds:
            return Stall("slow", f"the turn took {seconds:.0f} s without a decision")
        return None

    def _exchange(self) -> None:
        self._shrink()
        request, settings = self._request_of((*self._earlier, *self._messages)), self._settings
        try:
            request = settings.limits.fit(
                request, settings.spent + self._result.cost, settings.price, MIN_OUTPUT_TOKENS
            )
        except ValueError as error:
            self._result.stall = Stall("limit", f"a limit is reached: {error}", is_temporary=False)
            return
        answer = self._ask(request)
        if answer is None:
            return
        if answer.stop is StopReason.PAUSED and answer.kept and self._pauses < MAX_PAUSES:
            self._pauses += 1
            self._messages.append(Message(role=Role.ASSISTANT, text=echo_text(answer.text), kept=answer.kept))
            return
        if answer.stop is StopReason.FILTERED:
            self._result.stall = Stall("content filter", "the provider's content filter stopped the answer")
            return
        problem = self._problem(answer, request.max_output_tokens)
        calls = settle_calls(answer.calls, request.tools)
        if not calls and not problem:
            written = find_call_in_text(answer.text, request.tools)
            calls = (written,) if written else ()
        if problem or not calls:
            fault, text = problem or ("no call", "you called no tool; call one")
            # the provider's own blocks of a cut answer, or with a call that gets no result, would be refused
            kept = answer.kept if not problem and _is_whole(answer, ()) else ()
            self._append(Role.ASSISTANT, echo_text(answer.text) or "(nothing)", kept)
            self._correct(fault, text)
            return
        unique = self._unique(calls[:MAX_CALLS])
        self._take_calls(answer.text, unique, answer.kept if _is_whole(answer, unique) else ())

    def _problem(self, answer: Answer, limit: int) -> tuple[str, str] | None:
        if answer.stop is StopReason.TRUNCATED:
            self.max_output_tokens = min(max(2 * limit, self.max_output_tokens), MAX_OUTPUT_TOKENS)
            return (
                "truncated",
                f"your answer was cut off after {limit} tokens: answer again, briefly, with one tool call",
            )
        if answer.stop is StopReason.REFUSED:
            return (
                "refusal",
                "you declined; the task is only to choose settings of a job. Submit, or call finish",
            )
        if not answer.calls and not answer.text.strip():
            return "empty", "your answer was empty: call a tool"
        return None

    def _ask(self, request: CompletionRequest) -> Answer | None:
        settings, result = self._settings, self._result
        self._in_flight = request
        try:
            answer = ask_with_retries(self._provider, request, clock=settings.clock, settings=settings.retry)
        except ProviderError as error:
            self._in_flight = None
            # An answer that did not arrive may have to be paid all the same.
            lost = largest_cost(request, settings.price) if error.may_have_cost else Cost(requests=1)
            result.cost = result.cost + lost.model_copy(update={"usage": Usage()})
            kind, text = error.kind.value.replace("_", " "), one_line(redact(error.message), 300)
            lost_at = (request.num_bytes, self._elapsed_s())
            result.exchanges.append(Exchange(None, error.kind, text, *lost_at, may_have_cost=error.may_have_cost))
            if error.kind is ErrorKind.BAD_REQUEST and self._earlier:
                self._earlier, self.reads_less = (), True  # perhaps: a turn alone is short
                self._messages[0] = self._messages[0].model_copy(update={"results": ()})
            elif error.kind.is_answer:
                self._correct(kind, f"your answer could not be read: {quote_line(text)}. Be brief")
            elif error.kind is ErrorKind.FILTERED:
                result.stall = Stall("content filter", f"the provider's content filter refused the request ({text})")
            else:
                result.stall = Stall("provider", f"the provider failed ({kind}: {text})", error.kind.is_temporary)
            return None
        self._in_flight = None
        result.exchanges.append(Exchange(answer, request_bytes=request.num_bytes, at_s=self._elapsed_s()))
        result.cost = result.cost + cost_of(answer.usage, settings.price)
        return answer

    def _take_calls(self, text: str, calls: Sequence[ToolCall], kept: tuple[dict[str, Any], ...]) -> None:
        echoed = tuple(echo_call(call, MAX_CALLS_BYTES // len(calls)) for call in calls)
        answer = Message(role=Role.ASSISTANT, text=echo_text(text), calls=echoed, kept=kept)
        max_bytes = self._max_reply_bytes(answer)
        replies: list[tuple[ToolCall, ToolReply]] = []
        for call in calls:
            reply = self._reply(call, max_bytes)
            replies.append((call, reply))
            if reply.decision:
                self._result.decision = self._note_unanswered(reply.decision, calls)
                said = {done.id: told.text for done, told in replies}
                results = tuple(ToolResult(id=one.id, text=clip_reply(said.get(one.id, NOT_RUN), 300)) for one in calls)
                self.own = (*self._messages, answer, Message(role=Role.USER, results=results))
                return
        results = tuple(
            ToolResult(id=call.id, text=clip_reply(reply.text, max_bytes), is_error=bool(reply.fault))
            for call, reply in replies
        )
        self._result.exchanges[-1] = replace(self._result.exchanges[-1], results=results)
        self._messages.append(answer)
        self._messages.append(Message(role=Role.USER, text=self._lookups_left(), results=results))
        faults = [reply for call, reply in replies if reply.fault and not self._handlers.is_lookup(call)]
        if faults:
            self._count_fault(faults[-1].fault, faults[-1].text)
        elif self._lookups > MAX_LOOKUPS:
            self._count_fault("undecided", f"it made more than {MAX_LOOKUPS} look-ups without a decision")

    def _note_unanswered(self, decision: Decision, calls: Sequence[ToolCall]) -> Decision:
        """The decision, with a note on the look-ups beside it if the model is asked again at once."""
        names = dict.fromkeys(call.name for call in calls if self._handlers.is_lookup(call))
        if not names or not (decision.is_revision or decision.adds):
            return decision
        return replace(decision, refused=(*decision.refused, UNANSWERED.format(names=", ".join(names))))

    def _max_reply_bytes(self, answer: Message) -> int:
        """Bytes for the result of each call of this answer: equal shares of the bytes without older results."""
        older = [self._messages[0], *map(shrink_message, self._messages[1:])]
        bare = tuple(ToolResult(id=call.id, text="") for call in answer.calls)
        messages = (*older, answer, Message(role=Role.USER, text=self._lookups_left(), results=bare))
        left = MAX_PROMPT_BYTES - self._request_of(messages).num_bytes
        # JSON escapes newlines and quotes, so more bytes are sent than the result has.
        share = int(left * 0.9) // max(len(answer.calls), 1)
        return min(max(share, MIN_REPLY_BYTES), MAX_REPLY_BYTES)

    def _reply(self, call: ToolCall, max_bytes: int) -> ToolReply:
        if self._handlers.is_lookup(call):
            self._lookups += 1
            if self._lookups > MAX_LOOKUPS:
                return ToolReply(f"refused: {MAX_LOOKUPS} look-ups are used; decide now", "undecided")
        return self._handlers.answer(call, max_bytes)

    def _lookups_left(self) -> str:
        left = MAX_LOOKUPS - self._lookups
        return (
            f"{left} look-ups left"
            if left > 0
            else "no look-ups left: submit or finish now; further look-ups are refused"
        )

    def _correct(self, fault: str, text: str) -> None:
        if not self._count_fault(fault, text):
            self._append(Role.USER, f"That did not work: {text}")

    def _count_fault(self, fault: str, text: str) -> bool:
        """Record a fault; returns whether it was one too many, which ends the turn."""
        self._result.faults.append(fault)
        if len(self._result.faults) <= MAX_CORRECTIONS:
            return False
        self._result.stall = Stall(fault, describe_faults(self._result.faults, text))
        return True

    def _append(self, role: Role, text: str, kept: tuple[dict[str, Any], ...] = ()) -> None:
        last = self._messages[-1]
        if last.role is role:
            self._messages[-1] = last.model_copy(update={"text": f"{last.text}\n{text}", "kept": last.kept + kept})
        else:
            self._messages.append(Message(role=role, text=text, kept=kept))

    def _request_of(self, messages: Sequence[Message]) -> CompletionRequest:
        """The request with these messages; system and tools stay the same, so that the provider can cache them."""
        return CompletionRequest(
            system=self.prompt.system,
            messages=tuple(messages),
            tools=self.tools,
            max_output_tokens=self.max_output_tokens,
        )

    def _shrink(self) -> None:
        """Bring the request within its bound: empty older look-ups, then leave them out, then clip the last ones."""
        messages = self._messages
        for i in range(1, len(messages) - 1):
            if not self._excess():
                return
            messages[i] = shrink_message(messages[i])
        while len(messages) > 3 and self._excess():
            del messages[1:3]
        for limit in (1200, 600, 300, 100, 0):
            if not self._excess() or len(messages) == 1:
                return
            messages[-1] = clip_results(messages[-1], limit)

    def _excess(self) -> int:
        request = self._request_of(self._messages)
        has_own = any(message.kept for message in self._messages)
        return max(request.num_bytes - (KEPT_BYTES if has_own else MAX_PROMPT_BYTES), 0)

    def _unique(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """The calls, each with an identifier that is unique in this turn."""
        unique: list[ToolCall] = []
        for call in calls:
            given = call.id[:MAX_ID]
            name, number = given, 1
            while name in self._ids:
                number += 1
                name = f"{given}_{number}"
            self._ids.add(name)
            unique.append(call.model_copy(update={"id": name}))
        return unique


def _is_whole(answer: Answer, calls: Sequence[ToolCall]) -> bool:
    """Whether the provider's own blocks may go back in place of these calls: the same calls, and no secret in them."""
    # blocks with a type are whole answers, the others reasoning alone: beside it the calls are written anew
    are_same = [(call.id, call.name) for call in calls] == [(call.id, call.name) for call in answer.calls]
    are_same = are_same and all(call.arguments is not None for call in answer.calls)
    are_same = are_same or not any("type" in block for block in answer.kept)
    # signatures and encrypted reasoning are opaque, so by chance they may look like a secret
    opaque = {"signature", "encrypted_content", "data"}
    words = json.dumps([{name: value for name, value in block.items() if name not in opaque} for block in answer.kept])
    return are_same and redact(words) == words


def describe_faults(faults: Sequence[str], text: str) -> str:
    """Return why a turn stalled, for people; `text` describes the last fault."""
    same = len(set(faults)) == 1
    number = {2: "two", 3: "three"}.get(len(faults), str(len(faults)))
    if same:
        return f"{number} {WORDS['faults'].get(faults[0], faults[0])}"
    return f"the turn ended without a new configuration ({', '.join(faults)}; last: {one_line(text, 160)})"
