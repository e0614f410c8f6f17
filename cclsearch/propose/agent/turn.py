"""One turn: the model looks up what it wants, then decides; whatever it or its provider does, the turn ends."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from cclsearch.core.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.agent.clock import Clock
from cclsearch.propose.agent.prompt import MAX_CORRECTIONS, MAX_LOOKUPS, MAX_PROMPT_BYTES, Prompt
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits, Price, price_usage
from cclsearch.propose.agent.providers.parse import MAX_CALLS, call_in_text
from cclsearch.propose.agent.providers.retry import Patience, ask_patiently
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
    ToolSpec,
)
from cclsearch.propose.agent.quoting import clip_bytes, fence_line, redact_strings
from cclsearch.propose.agent.tool_handlers import MAX_REPLY_BYTES, Decision, ToolHandlers, ToolReply

MAX_ECHO_BYTES = 1500
"""Of one of the model's own earlier texts, when sent back to it."""
MAX_CALLS_BYTES = 4500
"""Of the arguments of all calls of one answer, when sent back."""
MIN_REPLY_BYTES = 300
MAX_ID = 48
"""Characters of a call's identifier that are kept."""
LEFT_OUT = "(left out: no room)"
REASONING_PREFIXES = ("anthropic:", "openai:")
MAX_OUTPUT_TOKENS = 16_384
"""Of one answer of theirs, after answers that were cut off."""


@dataclass(frozen=True)
class Stall:
    """A turn that ended without a decision."""

    cause: str
    """`duplicate`, `illegal`, `malformed`, `refusal`, `provider`, `limit`, ...: what went wrong last."""
    text: str
    can_pass: bool = True
    """Whether the next turn may do better."""


@dataclass(frozen=True)
class Exchange:
    """One request's answer, or the trouble in its place: what a replay needs."""

    answer: Answer | None
    trouble: ErrorKind | None = None
    message: str = ""
    request_bytes: int = 0
    at_s: float = 0.0
    """Seconds since the turn began."""


@dataclass
class TurnResult:
    """What a turn came to."""

    decision: Decision | None
    stall: Stall | None
    cost: Cost
    exchanges: list[Exchange] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Short names of what was wrong on the way."""


@dataclass(frozen=True)
class TurnSettings:
    """What a turn runs under."""

    clock: Clock
    jitter: random.Random
    price: Price | None = None
    limits: LlmLimits = field(default_factory=LlmLimits)
    spent: Cost = field(default_factory=Cost)
    """By earlier turns."""
    patience: Patience = field(default_factory=Patience)
    max_output_tokens: int = 4096
    max_seconds: float = 600.0
    """Of a whole turn: no further request starts after this."""


class Turn:
    """Runs one turn to its end."""

    def __init__(
        self,
        provider: Provider,
        handlers: ToolHandlers,
        prompt: Prompt,
        tools: Sequence[ToolSpec],
        settings: TurnSettings,
    ) -> None:
        self._provider = provider
        self._desk = handlers
        self._system = prompt.system
        self._tools = tuple(tools)
        self._settings = settings
        self._messages: list[Message] = [Message(role=Role.USER, text=prompt.user)]
        self._lookups = 0
        self._max_output_tokens = settings.max_output_tokens
        self._ids: set[str] = set()
        self._result = TurnResult(None, None, Cost())
        self._started_s = settings.clock.now_s()

    def run(self) -> TurnResult:
        """The result; never raises for anything that a provider does."""
        result = self._result
        while result.decision is None and result.stall is None:
            result.stall = self._limit_stall()
            if result.stall is None:
                self._step()
        result.cost = result.cost + Cost(seconds=self._elapsed_s())
        return result

    def cost_so_far(self) -> Cost:
        """What the requests that were answered so far took."""
        return self._result.cost + Cost(seconds=self._elapsed_s())

    def _elapsed_s(self) -> float:
        return self._settings.clock.now_s() - self._started_s

    def _limit_stall(self) -> Stall | None:
        reached = self._settings.limits.reached(self._settings.spent + self._result.cost)
        if reached:
            return Stall("limit", f"a limit is reached: {reached}", can_pass=False)
        seconds = self._elapsed_s()
        if seconds > self._settings.max_seconds:
            return Stall("slow", f"the turn took {seconds:.0f} s without a decision")
        return None

    def _step(self) -> None:
        request = self._request()
        answer = self._ask(request)
        if answer is None:
            return
        if answer.stop is StopReason.FILTERED:
            self._result.stall = Stall("content filter", "the provider's content filter stopped the answer")
            return
        complaint = self._complaint(answer)
        calls = answer.calls
        if not calls and not complaint:
            written = call_in_text(answer.text, {tool.name for tool in request.tools})
            calls = (written,) if written else ()
        if complaint or not calls:
            name, words = complaint or ("no call", "you called no tool; call one")
            self._say(Role.ASSISTANT, _echo(answer.text) or "(nothing)")
            self._correct(name, words)
            return
        self._take_calls(answer.text, self._unique(calls[:MAX_CALLS]))

    def _complaint(self, answer: Answer) -> tuple[str, str] | None:
        if answer.stop is StopReason.TRUNCATED:
            most = self._max_output_tokens
            if self._provider.name.startswith(REASONING_PREFIXES):
                # Models that think first may need more to get to an answer; a server of one's own may have no more.
                self._max_output_tokens = min(2 * most, MAX_OUTPUT_TOKENS)
            return (
                "truncated",
                f"your answer was cut off after {most} tokens: answer again, briefly, with one tool call",
            )
        if answer.stop is StopReason.REFUSED:
            return "refusal", "you declined; this only chooses settings of a training job. Decide, or call finish"
        if not answer.calls and not answer.text.strip():
            return "empty", "your answer was empty: call a tool"
        return None

    def _ask(self, request: CompletionRequest) -> Answer | None:
        settings, result = self._settings, self._result
        try:
            answer = ask_patiently(
                self._provider, request, clock=settings.clock, patience=settings.patience, jitter=settings.jitter
            )
        except ProviderError as error:
            result.cost = result.cost + Cost(requests=1)
            kind, words = error.trouble.value.replace("_", " "), one_line(redact(error.message), 300)
            result.exchanges.append(Exchange(None, error.trouble, words, request.num_bytes, self._elapsed_s()))
            if error.trouble in {ErrorKind.MALFORMED, ErrorKind.TOO_LARGE}:
                self._correct(kind, f"your answer could not be read: {fence_line(words)}. Be brief")
            else:
                result.stall = Stall("provider", f"the provider failed ({kind}: {words})", error.trouble.can_pass)
            return None
        result.exchanges.append(Exchange(answer, request_bytes=request.num_bytes, at_s=self._elapsed_s()))
        result.cost = result.cost + Cost(usage=answer.usage, usd=price_usage(answer.usage, settings.price), requests=1)
        return answer

    def _take_calls(self, text: str, calls: Sequence[ToolCall]) -> None:
        echoed = tuple(_echo_call(call, MAX_CALLS_BYTES // len(calls)) for call in calls)
        said = Message(role=Role.ASSISTANT, text=_echo(text), calls=echoed)
        room_bytes = self._reply_room(said)
        replies: list[tuple[ToolCall, ToolReply]] = []
        for call in calls:
            reply = self._reply(call, room_bytes)
            replies.append((call, reply))
            if reply.decision:
                self._result.decision = reply.decision
                return
        results = tuple(
            ToolResult(id=call.id, text=clip_reply(reply.text, room_bytes), is_error=bool(reply.fault))
            for call, reply in replies
        )
        self._messages.append(said)
        self._messages.append(Message(role=Role.USER, text=self._urge(), results=results))
        faults = [reply for call, reply in replies if reply.fault and not self._desk.is_lookup(call)]
        if faults:
            self._count_fault(faults[-1].fault, faults[-1].text)
        elif self._lookups > MAX_LOOKUPS:
            self._count_fault("undecided", f"it made more than {MAX_LOOKUPS} look-ups without deciding")

    def _reply_room(self, said: Message) -> int:
        """Bytes for each of these calls' results: an equal share of what a request has left without older results."""
        older = [self._messages[0], *map(_shrunk, self._messages[1:])]
        bare = tuple(ToolResult(id=call.id, text="") for call in said.calls)
        messages = (*older, said, Message(role=Role.USER, text=self._urge(), results=bare))
        left = MAX_PROMPT_BYTES - self._request_of(messages).num_bytes
        # JSON escapes newlines and quotes, so a result's own bytes are not quite what is sent.
        share = int(left * 0.9) // max(len(said.calls), 1)
        return min(max(share, MIN_REPLY_BYTES), MAX_REPLY_BYTES)

    def _reply(self, call: ToolCall, room_bytes: int) -> ToolReply:
        if self._desk.is_lookup(call):
            self._lookups += 1
            if self._lookups > MAX_LOOKUPS:
                return ToolReply(f"refused: {MAX_LOOKUPS} look-ups are used; decide now", "undecided")
        return self._desk.answer(call, room_bytes)

    def _urge(self) -> str:
        left = MAX_LOOKUPS - self._lookups
        return (
            f"{left} look-ups left"
            if left > 0
            else "no look-ups left: submit or finish now, further look-ups are refused"
        )

    def _correct(self, fault: str, words: str) -> None:
        if not self._count_fault(fault, words):
            self._say(Role.USER, f"That did not work: {words}")

    def _count_fault(self, fault: str, words: str) -> bool:
        """Whether that was one fault too many, and the turn is over."""
        self._result.faults.append(fault)
        if len(self._result.faults) <= MAX_CORRECTIONS:
            return False
        self._result.stall = Stall(fault, describe_faults(self._result.faults, words))
        return True

    def _say(self, role: Role, text: str) -> None:
        last = self._messages[-1]
        if last.role is role:
            self._messages[-1] = last.model_copy(update={"text": f"{last.text}\n{text}"})
        else:
            self._messages.append(Message(role=role, text=text))

    def _request(self) -> CompletionRequest:
        self._shrink()
        return self._request_of(self._messages)

    def _request_of(self, messages: Sequence[Message]) -> CompletionRequest:
        """The request with these messages; system and tools stay the same, so that a provider's cache holds."""
        return CompletionRequest(
            system=self._system,
            messages=tuple(messages),
            tools=self._tools,
            max_output_tokens=self._max_output_tokens,
        )

    def _shrink(self) -> None:
        """Bring the request within its bound: older look-ups are emptied, then left out, then the last are clipped."""
        messages = self._messages
        for i in range(1, len(messages) - 1):
            if not self._excess():
                return
            messages[i] = _shrunk(messages[i])
        while len(messages) > 3 and self._excess():
            del messages[1:3]
        for limit in (1200, 600, 300, 100, 0):
            if not self._excess() or len(messages) == 1:
                return
            messages[-1] = _clipped(messages[-1], limit)

    def _excess(self) -> int:
        return max(self._request_of(self._messages).num_bytes - MAX_PROMPT_BYTES, 0)

    def _unique(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """The calls with identifiers that no other call of this turn has."""
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


def describe_faults(faults: Sequence[str], words: str) -> str:
    """Why a turn stalled, for people: what went wrong as often as it did."""
    same = len(set(faults)) == 1
    number = {2: "two", 3: "three"}.get(len(faults), str(len(faults)))
    sentences = {
        "duplicate": "proposals in a row were duplicates",
        "illegal": "proposals in a row were not legal",
        "implausible": "proposals in a row overruled the surrogate without credit",
        "refusal": "answers in a row were refusals",
        "truncated": "answers in a row were cut off",
        "empty": "answers in a row were empty",
        "malformed": "calls in a row were malformed",
        "unknown tool": "calls in a row named no tool there is",
        "no call": "answers in a row called no tool",
        "policy failed": "policy programs in a row failed",
        "finish refused": "wishes to finish in a row were refused",
        "undecided": "answers in a row did not decide",
        "malformed answer": "answers in a row could not be read",
        "answer too large": "answers in a row were too large to be read",
    }
    if same:
        return f"{number} {sentences.get(faults[0], faults[0])}"
    return f"the turn ended without a legal new configuration ({', '.join(faults)}; last: {one_line(words, 160)})"


def clip_reply(text: str, limit_bytes: int) -> str:
    """A result within its bound; what was cut is said."""
    safe = redact(text)
    clipped = clip_bytes(safe, limit_bytes)
    return safe if clipped == safe else f"{clipped}\n({len(safe) - len(clipped)} characters left out)"


def _echo(text: str) -> str:
    # A text of nothing but spaces, which models put before a call, is refused when it is sent back.
    safe = redact(text) if text.strip() else ""
    clipped = clip_bytes(safe, MAX_ECHO_BYTES)
    return safe if clipped == safe else f"{clipped} (cut)"


def _echo_call(call: ToolCall, limit_bytes: int) -> ToolCall:
    """The call as it is sent back: long arguments are elided, the bound holds whatever came."""
    # Providers refuse a name that no tool could have.
    name = re.sub(r"[^A-Za-z0-9_-]", "_", redact(call.name))[:64] or "unnamed"
    if len(json.dumps(call.arguments)) <= limit_bytes:
        return call.model_copy(update={"arguments": redact_strings(call.arguments), "name": name})
    elided = {"elided": "the arguments were too long to be sent back"}
    return call.model_copy(update={"arguments": elided, "name": name})


def _shrunk(message: Message) -> Message:
    calls = tuple(call.model_copy(update={"arguments": {}}) for call in message.calls)
    results = tuple(result.model_copy(update={"text": LEFT_OUT}) for result in message.results)
    return message.model_copy(update={"results": results, "calls": calls, "text": clip_bytes(message.text, 400)})


def _clipped(message: Message, limit_bytes: int) -> Message:
    results = tuple(
        result if len(result.text.encode()) <= limit_bytes + len(LEFT_OUT) else _cut(result, limit_bytes)
        for result in message.results
    )
    return message.model_copy(update={"results": results})


def _cut(result: ToolResult, limit_bytes: int) -> ToolResult:
    kept = clip_bytes(result.text, limit_bytes)
    return result.model_copy(update={"text": f"{kept}\n{LEFT_OUT}" if kept else LEFT_OUT})
