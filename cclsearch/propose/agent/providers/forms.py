"""The forms in which a server can be asked, and the next one if it refuses one.

tools forced > tools auto > JSON schema > JSON in text; beside that thinking, effort, the model's own blocks, cache
marks, streaming, system text, the name and size of the limit on output tokens, and the API itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.types import CompletionRequest, ErrorKind, ProviderError

MIN_OUTPUT_TOKENS = 512
"""Output tokens below which no answer is asked for: a decision has about 300."""
NEEDED_CONTEXT = 16_000
"""Tokens of context that a self-hosted server needs."""


class Api(StrEnum):
    """An API that a server may speak."""

    MESSAGES = "messages"
    RESPONSES = "responses"
    CHAT = "chat"


API_NAMES = {Api.MESSAGES: "Messages API", Api.RESPONSES: "Responses API", Api.CHAT: "chat completions"}


class CallForm(StrEnum):
    """The way in which a request makes the model answer with a call."""

    FORCED = "forced"
    AUTO = "auto"
    SCHEMA = "schema"
    TEXT = "text"


class Thinking(StrEnum):
    """The way in which a request lets a model of Anthropic's think."""

    ADAPTIVE = "adaptive"
    BUDGET = "budget"
    NONE = "none"


class Form(Model):
    """The form of all requests to one server; it changes only if the server refuses it."""

    api: Api
    call: CallForm = CallForm.FORCED
    thinking: Thinking = Thinking.NONE
    effort: str = ""
    """The word for it that the server accepts; empty leaves it to the model."""
    keeps: bool = True
    """Whether the model's own blocks, with its reasoning, are sent back in a turn."""
    says_store: bool = True
    """Whether requests to the Responses API say that nothing is to be stored."""
    marks_cache: bool = False
    streams: bool = False
    system_apart: bool = True
    """Whether the system text has a role of its own; else it begins the first message."""
    limit_name: str = "max_tokens"
    """Parameter of chat completions for the limit on output tokens."""
    max_output: int | None = None
    """Largest limit on output tokens that the server accepts, as far as it is known."""
    path: str = ""
    """Part that the address lacked, such as `/v1`."""

    def describe(self) -> str:
        """`Responses API, tools, effort high, its reasoning sent back, streamed`."""
        call = {
            CallForm.FORCED: "tools (a call is required)",
            CallForm.AUTO: "tools",
            CallForm.SCHEMA: "JSON by schema",
            CallForm.TEXT: "JSON in text",
        }[self.call]
        thinking = {Thinking.ADAPTIVE: "adaptive thinking", Thinking.BUDGET: "thinking"}.get(self.thinking, "")
        effort = f"effort {self.effort}" if self.effort else ""
        limit = f"at most {self.max_output:,} output tokens" if self.max_output else ""
        return ", ".join(filter(None, (API_NAMES[self.api], call, thinking, effort, limit, "streamed" * self.streams)))


_OUTPUT_WORDS = (
    r"max(imum)?[_ ](completion_|output_|new_)?tokens|num_predict|(completion|output|new) tokens|"
    r"context[_ ](length|window|size|limit)|"
    r"maxoutputtokens|tokens? limit|can only afford|prompt is too long|exceed_context_size|too many tokens|"
    r"input is too long|max_model_len|maximum (allowed|number of).{0,30}tokens"
)
_TOO_LONG = (
    r"prompt is too long|input is too long|exceed_context_size|input exceeds the context|the input \(\d|"
    r"input length \(|longer than the (model's|maximum model)|keep the first|decoder prompt|inputs? must have less|"
    r"context_length_exceeded(?!.*completion)"
)
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_ABOUT = {
    "api": r"v1/responses|responses api|v1/chat/completions endpoint|not a chat model|/v1/completions|"
    r"operationnotsupported",
    "limit name": r"max_completion_tokens'? instead|param=max_tokens.*unsupported|unsupported.*param=max_tokens|"
    r"loc=max_\w*tokens.*(extra|permitted|unknown|unrecognized)",
    "input": _TOO_LONG,
    "limit": rf"(?=.*(\d{{3,}}|too (large|long|big|high)|is limited))(?=.*({_OUTPUT_WORDS}))",
    "stream": r"\bstream",
    "tool choice": r"tool[_ ]?choice|forced (tool|function)",
    "own blocks": r"reasoning_content|reasoning_details|reasoning_text|encrypted|signature|block is bound|"
    r"thinking. (or|blocks?)|without its required|not persisted|could not be verified|expected .thinking",
    "cache": r"cache_control|\bttl\b",
    "effort": r"effort|output_config|param=reasoning",
    "thinking": r"thinking|budget_tokens",
    "reasoning": r"\breasoning\b|param=(include|store)|zero data retention",
    "turns": r"alternate|roles? (are|is) (not )?supported|role.{0,20}(tool|system|developer)",
    "schema": r"response_format|json_schema|schema|grammar|text\.format|structured output|json mode",
    "tools": r"\btools?\b|function[_ ]?call|functions?\b|jinja",
    "roles": r"alternate|\broles?\b|system (message|prompt|instruction)|developer (message|instruction)",
}
"""A part of the request -> what a complaint about it says; the first that matches counts."""
_FEATURES = {"own blocks": "kept", "reasoning": "kept", "turns": "roles"}


def step_down(
    form: Form, error: ProviderError, request: CompletionRequest, apis: tuple[Api, ...], tried: Sequence[Form] = ()
) -> tuple[Form, str]:
    """Return the form to ask in after that refusal, and one line about it; raises `error` if there is none."""
    about = find_feature(error)
    step = _STEPS[about](form, error.refused.lower(), request, apis) if about else None
    if step is None and error.kind is ErrorKind.BAD_REQUEST and about not in {"limit", "input", "path"}:
        step = _step_blindly(form, request)
    if step is None:
        if about in {"limit", "input"}:
            raise ProviderError(error.kind, f"{error.message}; a context of {NEEDED_CONTEXT:,} tokens is needed")
        raise error
    changes, text = step
    found = form.model_copy(update=changes)
    # A form that was refused before does not help: go on below it.
    for go_on in (_step_tools(found, "", request, apis), _step_blindly(found, request)):
        if found not in tried:
            break
        if go_on:
            found, text = found.model_copy(update=go_on[0]), go_on[1]
    if found in tried:
        raise error
    return found, text


def find_feature(error: ProviderError) -> str | None:
    """Return the part of the request that the server refuses, by the parameter it names, else by its words."""
    low = error.refused.lower()
    if error.kind is ErrorKind.NOT_AN_API:
        return "path"
    if error.kind is ErrorKind.TIMEOUT and re.match(r"HTTP 5\d\d", error.message):
        return "gateway"
    if not low or error.kind not in {ErrorKind.BAD_REQUEST, ErrorKind.SERVER}:
        return None
    named = " ".join(re.findall(r"(?:param|loc)=[^ ]+", low))
    for about in ("api", "limit name"):
        if re.search(_ABOUT[about], low):
            return about
    if re.search(r"[._]", named):
        by_name = (about for about, pattern in _ABOUT.items() if about != "limit" and re.search(pattern, named))
        if found := next(by_name, None):
            return _FEATURES.get(found, found)
    found = next((about for about, pattern in _ABOUT.items() if re.search(pattern, low, re.DOTALL)), None)
    return _FEATURES.get(found, found) if found else None


Step = tuple[dict[str, Any], str] | None


def _step_api(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    other = {Api.CHAT: Api.RESPONSES, Api.RESPONSES: Api.CHAT}.get(form.api)
    if other is None or other not in apis:
        return None
    return {"api": other}, f"the server refuses this model by {API_NAMES[form.api]}; asking by {API_NAMES[other]}"


def _step_path(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if form.api is Api.RESPONSES and Api.CHAT in apis:
        return {"api": Api.CHAT}, "the server has no Responses API; asking by chat completions"
    if not form.path and form.api is Api.CHAT:
        return {"path": "/v1"}, "nothing answers at this address; asking again with /v1 added"
    return None


def _step_limit_name(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if form.limit_name == "max_completion_tokens":
        return {"limit_name": "max_tokens"}, "the server calls the limit on output tokens max_tokens"
    return {"limit_name": "max_completion_tokens"}, "the server calls the limit on output tokens max_completion_tokens"


def _step_limit(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    asked = min(request.max_output_tokens, form.max_output or request.max_output_tokens)
    allowed = find_allowed_output(low, asked)
    if allowed is None or allowed < MIN_OUTPUT_TOKENS:
        return None
    return {"max_output": allowed}, f"the server accepts at most {allowed:,} output tokens"


def find_allowed_output(low: str, asked: int) -> int | None:
    """Return the limit on output tokens that a complaint about `asked` allows; half of it if it says no number."""
    numbers = [int(text.replace(",", "")) for text in re.findall(r"\d{1,3}(?:,\d{3})+|\d+", low)]
    for context, used in (
        (r"(\d[\d,]*) \+ \d[\d,]* > (\d[\d,]*)", (2, 1)),
        (r"(\d[\d,]*) input tokens.*?context length is only (\d[\d,]*)", (2, 1)),
        (r"<= ?(\d[\d,]*).{0,40}?(\d[\d,]*) .?inputs?\b", (1, 2)),
        (
            r"(?:context|maximum) (?:length|window|size|limit)\D{0,40}?(\d[\d,]*).*?(\d[\d,]*) "
            r"(?:input tokens|in the messages|tokens from the input|in the input|of text input|prompt tokens|input)",
            (1, 2),
        ),
    ):
        if found := re.search(context, low, re.DOTALL):
            return _number(found[used[0]]) - _number(found[used[1]])
    smaller = [number for number in numbers if MIN_OUTPUT_TOKENS <= number < asked]
    return max(smaller) if smaller else asked // 2


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _step_stream(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if form.streams:
        return {"streams": False}, "the server does not stream; asking for whole answers"
    return {"streams": True}, "the server only streams; reading its stream"


def _step_gateway(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if form.streams:
        return None
    return {"streams": True}, "a gateway does not wait for a whole answer; reading a stream"


def _step_tool_choice(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if form.call is CallForm.FORCED:
        return {"call": CallForm.AUTO}, "the server refuses a required call; leaving the call to the model"
    return _step_tools(form, low, request, apis)


def _step_tools(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if form.call in {CallForm.SCHEMA, CallForm.TEXT}:
        return None
    if form.api is Api.MESSAGES or re.search(r"schema|grammar|response_format", low):
        return {"call": CallForm.TEXT}, "the server refuses tools; asking for JSON in text"
    return {"call": CallForm.SCHEMA}, "the server refuses tools; asking for JSON"


def _step_schema(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if form.call is CallForm.FORCED:
        return {"call": CallForm.AUTO}, "the server refuses the tools' schema; leaving the call to the model"
    if form.call is CallForm.TEXT:
        return None
    return {"call": CallForm.TEXT}, "the server refuses the schema; asking for JSON in text"


def _step_kept(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if re.search(r"passed back|is missing", low) and form.call is not CallForm.TEXT:
        return {"call": CallForm.TEXT}, "the server wants reasoning that is gone; asking for JSON in text"
    if re.search(r"param=store|\bstore\b", low) and form.says_store:
        return {"says_store": False}, "the server does not know that nothing is to be stored"
    if form.thinking is not Thinking.NONE and "expected" in low and not form.keeps:
        return {
            "thinking": Thinking.NONE,
            "call": CallForm.FORCED,
        }, "the server wants reasoning that is gone; no thinking"
    return ({"keeps": False}, "the server refuses the model's own reasoning; leaving it out") if form.keeps else None


def _step_cache(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    return ({"marks_cache": False}, "the server refuses marks for its cache") if form.marks_cache else None


def _step_effort(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if not form.effort:
        return _step_thinking(form, low, request, apis)
    found = re.search(r"supported (?:value|level)s?(.*)", low, re.DOTALL)
    listed = found[1] if found else ""
    lower = _EFFORTS[: _EFFORTS.index(form.effort)]
    accepted = next((word for word in reversed(lower) if re.search(rf"\b{word}\b", listed)), "")
    if accepted:
        return {"effort": accepted}, f"the server refuses effort {form.effort}; asking with {accepted}"
    return {"effort": ""}, f"the server refuses effort {form.effort}; leaving it to the model"


def _step_thinking(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if form.thinking is Thinking.ADAPTIVE and not re.search(r"extra inputs|unknown|unrecognized|unexpected", low):
        return {"thinking": Thinking.BUDGET}, "the model has no adaptive thinking; asking with a budget for it"
    if form.thinking is not Thinking.NONE:
        changes: dict[str, Any] = {"thinking": Thinking.NONE}
        if form.call is CallForm.AUTO:
            changes["call"] = CallForm.FORCED
        return changes, "the server refuses thinking; asking without"
    return None


def _step_roles(form: Form, low: str, request: CompletionRequest, apis: tuple[Api, ...]) -> Step:
    if form.system_apart and re.search(r"system|developer", low) and not re.search(r"alternate|role.{0,20}tool", low):
        return {"system_apart": False}, "the server refuses system text; it begins the first message"
    if form.call is not CallForm.TEXT:
        return {"call": CallForm.TEXT}, "the server refuses the roles of tool calls; asking for JSON in text"
    if form.system_apart:
        return {"system_apart": False}, "the server refuses the roles; the system text begins the first message"
    return None


def _step_blindly(form: Form, request: CompletionRequest) -> Step:
    """Return the next form after a refusal that says nothing that is known here."""
    keeps = form.keeps and (form.api is Api.RESPONSES or request.num_kept_bytes > 0)
    if form.effort or form.thinking is not Thinking.NONE or form.marks_cache or keeps:
        extras: dict[str, Any] = {"effort": "", "thinking": Thinking.NONE, "marks_cache": False, "keeps": False}
        return extras, "the server refuses the request; asking without optional parts"
    if form.call is CallForm.FORCED:
        return {"call": CallForm.AUTO}, "the server refuses the request; leaving the call to the model"
    if form.call is not CallForm.TEXT:
        return {"call": CallForm.TEXT}, "the server refuses the request; asking for JSON in text"
    if form.system_apart:
        return {"system_apart": False}, "the server refuses the request; the system text begins the first message"
    return None


_STEPS = {
    "api": _step_api,
    "path": _step_path,
    "limit name": _step_limit_name,
    "limit": _step_limit,
    "stream": _step_stream,
    "gateway": _step_gateway,
    "input": lambda *given: None,
    "tool choice": _step_tool_choice,
    "kept": _step_kept,
    "cache": _step_cache,
    "effort": _step_effort,
    "thinking": _step_thinking,
    "schema": _step_schema,
    "tools": _step_tools,
    "roles": _step_roles,
}
