"""One turn: the model looks up what it wants, then decides; whatever it or its provider does, the turn ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from cclsearch.propose.llm.account import Cost, Limits, Price, price_usage
from cclsearch.propose.llm.clock import Clock
from cclsearch.propose.llm.desk import Decision, Desk, Reply
from cclsearch.propose.llm.fence import clip_bytes, redact_strings
from cclsearch.propose.llm.prompt import MAX_CORRECTIONS, MAX_LOOKUPS, MAX_PROMPT_BYTES, Prompt
from cclsearch.propose.llm.reading import MAX_CALLS, call_in_text
from cclsearch.propose.llm.retry import Patience, ask_patiently
from cclsearch.propose.llm.toolset import LOOKUPS
from cclsearch.propose.llm.wire import (
    Answer,
    Message,
    Provider,
    ProviderError,
    Request,
    Role,
    Stop,
    ToolCall,
    ToolResult,
    ToolSpec,
    Trouble,
)
from cclsearch.redact import redact
from cclsearch.text import one_line

MAX_ECHO_BYTES = 1500
"""Of one of the model's own earlier texts or arguments, when sent back to it."""
MAX_REPLY_BYTES = 2400
"""Of one look-up's result."""


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
    trouble: Trouble | None = None
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
    limits: Limits = field(default_factory=Limits)
    spent: Cost = field(default_factory=Cost)
    """By earlier turns."""
    patience: Patience = field(default_factory=Patience)
    max_output_tokens: int = 4096
    max_seconds: float = 600.0
    """Of a whole turn: no further request starts after this."""


class Turn:
    """Runs one turn to its end."""

    def __init__(
        self, provider: Provider, desk: Desk, prompt: Prompt, tools: Sequence[ToolSpec], settings: TurnSettings
    ) -> None:
        self._provider = provider
        self._desk = desk
        self._system = prompt.system
        self._tools = tuple(tools)
        self._settings = settings
        self._messages: list[Message] = [Message(role=Role.USER, text=prompt.user)]
        self._lookups = 0
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
        if answer.stop is Stop.FILTERED:
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
        if answer.stop is Stop.TRUNCATED:
            most = self._settings.max_output_tokens
            return (
                "truncated",
                f"your answer was cut off after {most} tokens: answer again, briefly, with one tool call",
            )
        if answer.stop is Stop.REFUSED:
            return "refusal", "you declined; this only chooses settings of a training job. Decide, or call finish"
        if not answer.calls and not answer.text.strip():
            return "empty", "your answer was empty: call a tool"
        return None

    def _ask(self, request: Request) -> Answer | None:
        settings, result = self._settings, self._result
        try:
            answer = ask_patiently(
                self._provider, request, clock=settings.clock, patience=settings.patience, jitter=settings.jitter
            )
        except ProviderError as error:
            result.cost = result.cost + Cost(requests=1)
            words = one_line(redact(error.message), 300)
            result.exchanges.append(Exchange(None, error.trouble, words, request.num_bytes, self._elapsed_s()))
            if error.trouble in {Trouble.MALFORMED, Trouble.TOO_LARGE}:
                self._correct(
                    error.trouble.value.replace("_", " "), f"your answer could not be read: {words}. Be brief"
                )
            else:
                kind = error.trouble.value.replace("_", " ")
                result.stall = Stall("provider", f"the provider failed ({kind}: {words})", error.trouble.can_pass)
            return None
        result.exchanges.append(Exchange(answer, request_bytes=request.num_bytes, at_s=self._elapsed_s()))
        result.cost = result.cost + Cost(usage=answer.usage, usd=price_usage(answer.usage, settings.price), requests=1)
        return answer

    def _take_calls(self, text: str, calls: Sequence[ToolCall]) -> None:
        replies: list[tuple[ToolCall, Reply]] = []
        for call in calls:
            reply = self._reply(call)
            replies.append((call, reply))
            if reply.decision:
                self._result.decision = reply.decision
                return
        results = tuple(
            ToolResult(id=call.id, text=clip_reply(reply.text), is_error=bool(reply.fault)) for call, reply in replies
        )
        echoed = tuple(_echo_call(call) for call in calls)
        self._messages.append(Message(role=Role.ASSISTANT, text=_echo(text), calls=echoed))
        self._messages.append(Message(role=Role.USER, text=self._urge(), results=results))
        faults = [reply for call, reply in replies if reply.fault and not self._desk.is_lookup(call)]
        if faults:
            self._count_fault(faults[-1].fault, faults[-1].text)
        elif self._lookups > MAX_LOOKUPS:
            self._count_fault("undecided", f"it made more than {MAX_LOOKUPS} look-ups without deciding")

    def _reply(self, call: ToolCall) -> Reply:
        if self._desk.is_lookup(call):
            self._lookups += 1
            if self._lookups > MAX_LOOKUPS:
                return Reply(f"refused: {MAX_LOOKUPS} look-ups are used; decide now", "undecided")
        return self._desk.answer(call)

    def _urge(self) -> str:
        left = MAX_LOOKUPS - self._lookups
        return f"{left} look-ups left" if left > 0 else "no look-ups left: decide now"

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

    def _request(self) -> Request:
        tools = self._tools
        if self._lookups >= MAX_LOOKUPS:
            tools = tuple(tool for tool in tools if tool.name not in LOOKUPS)
        self._shrink(tools)
        return Request(
            system=self._system,
            messages=tuple(self._messages),
            tools=tools,
            max_output_tokens=self._settings.max_output_tokens,
        )

    def _shrink(self, tools: tuple[ToolSpec, ...]) -> None:
        """Empty the oldest look-ups' results until the whole request is within its bound."""
        request = Request(system=self._system, messages=tuple(self._messages), tools=tools)
        excess = request.num_bytes - MAX_PROMPT_BYTES
        for i, message in enumerate(self._messages[1:-1], start=1):
            if excess <= 0:
                return
            small = _shrunk(message)
            excess -= len(message.model_dump_json().encode()) - len(small.model_dump_json().encode())
            self._messages[i] = small

    def _unique(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """The calls with identifiers that no other call of this turn has."""
        unique: list[ToolCall] = []
        for call in calls:
            name, number = call.id, 1
            while name in self._ids:
                number += 1
                name = f"{call.id}_{number}"
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
    }
    if same:
        return f"{number} {sentences.get(faults[0], faults[0])}"
    return f"the turn ended without a legal new configuration ({', '.join(faults)}; last: {one_line(words, 160)})"


def clip_reply(text: str) -> str:
    """A result within its bound; what was cut is said."""
    safe = redact(text)
    clipped = clip_bytes(safe, MAX_REPLY_BYTES)
    return safe if clipped == safe else f"{clipped}\n({len(safe) - len(clipped)} characters left out)"


def _echo(text: str) -> str:
    safe = redact(text)
    clipped = clip_bytes(safe, MAX_ECHO_BYTES)
    return safe if clipped == safe else f"{clipped} (cut)"


def _echo_call(call: ToolCall) -> ToolCall:
    """The call as it is sent back: long arguments are elided, the bound holds whatever came."""
    import json

    if len(json.dumps(call.arguments)) <= 3 * MAX_ECHO_BYTES:
        return call.model_copy(update={"arguments": redact_strings(call.arguments), "name": redact(call.name)})
    return call.model_copy(update={"arguments": {"elided": "the arguments were too long to be sent back"}})


def _shrunk(message: Message) -> Message:
    results = tuple(result.model_copy(update={"text": "(left out: no room)"}) for result in message.results)
    calls = tuple(call.model_copy(update={"arguments": {}}) for call in message.calls)
    return message.model_copy(update={"results": results, "calls": calls, "text": clip_bytes(message.text, 400)})
