"""The types between the agent and any provider: request, answer, stop reason, error."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Protocol
from urllib.parse import urlsplit

from cclsearch.core.offline import is_local_host
from cclsearch.core.values import Model

# No tokenizer fits all models.
BYTES_PER_TOKEN = 3
"""Rate at which tokens are estimated."""
MAX_BODY_BYTES = 12_000 * BYTES_PER_TOKEN
"""Largest size of one request as it is sent."""


MAX_KEPT_BYTES = 400_000
"""Largest size of one answer's own blocks that are sent back; larger ones are left out."""


class Effort(StrEnum):
    """How much the model thinks before it answers: `--llm-effort`."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    MAX = "max"


class ToolSpec(Model):
    """A tool that the model may call. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]


class ToolCall(Model):
    """One tool call of the model."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    """None if they were not a JSON object; then `fault` says why."""
    fault: str = ""


class ToolResult(Model):
    """The result of the call with that id."""

    id: str
    text: str
    is_error: bool = False


class Role(StrEnum):
    """Author of a message."""

    USER = "user"
    ASSISTANT = "assistant"


class Message(Model):
    """One message; a user message carries tool results, an assistant message carries calls."""

    role: Role
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    kept: tuple[dict[str, Any], ...] = ()
    """The provider's own blocks of an assistant message, thinking included: its API sends them in place of the rest."""


class CompletionRequest(Model):
    """One request to a provider. `system` and `tools` do not change during a search, so a provider may cache them."""

    system: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_output_tokens: int = 16_384

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the whole request as JSON, without the provider's own blocks."""
        return len(self.model_dump_json(exclude={"messages": {"__all__": {"kept"}}}).encode())

    @property
    def num_kept_bytes(self) -> int:
        """UTF-8 bytes of the provider's own blocks in it."""
        return sum(len(json.dumps(block)) for message in self.messages for block in message.kept)


class StopReason(StrEnum):
    """Reason why the model stopped."""

    DONE = "done"
    TOOL = "tool"
    TRUNCATED = "truncated"
    REFUSED = "refused"
    FILTERED = "filtered"
    PAUSED = "paused"
    """The provider interrupted a long answer: sent back unchanged, it is continued."""
    OTHER = "other"


class Usage(Model):
    """Tokens of one answer. Cached input tokens are not part of `input_tokens`."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    """The part of `output_tokens` that the model thought with, as far as the provider says it."""
    is_estimated: bool = False
    """Whether the provider gave no count, so that tokens are estimated as bytes / 3."""

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens + self.cache_read_tokens + self.cache_write_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cache_read_tokens=self.cache_read_tokens + other.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            is_estimated=self.is_estimated or other.is_estimated,
        )


class Answer(Model):
    """A provider's answer, validated; none of its content is trusted."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    stop: StopReason
    stop_word: str = ""
    """The stop reason as the provider wrote it."""
    usage: Usage = Usage()
    kept: tuple[dict[str, Any], ...] = ()
    """The provider's own blocks, to be sent back unchanged with the results of the calls."""


class ErrorKind(StrEnum):
    """The kind of a provider's failure."""

    RATE_LIMIT = "rate_limit"
    OVERLOADED = "overloaded"
    SERVER = "server_error"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    MALFORMED = "malformed_answer"
    TOO_LARGE = "answer_too_large"
    BAD_GENERATION = "bad_generation"
    """The server could not read what the model generated; the model may do better in the next try."""
    FILTERED = "content_filter"
    AUTHENTICATION = "authentication"
    EMPTY_ACCOUNT = "empty_account"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_HOST = "unknown_host"
    CERTIFICATE = "refused_certificate"
    NOT_AN_API = "not_an_api"
    BAD_REQUEST = "bad_request"
    ABSENT = "no_agent"
    """The agent outside of the search did not decide."""

    @property
    def is_retried(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self in {self.RATE_LIMIT, self.OVERLOADED, self.SERVER, self.TIMEOUT, self.CONNECTION}

    @property
    def is_incurable(self) -> bool:
        """Whether no other try helps at the start of a search, when nothing has worked yet."""
        return not self.is_temporary or self in {self.UNKNOWN_HOST, self.CERTIFICATE, self.NOT_AN_API}

    @property
    def is_temporary(self) -> bool:
        """Whether the provider may work again later in the search; a wrong key stays wrong."""
        return self not in {self.AUTHENTICATION, self.EMPTY_ACCOUNT, self.UNKNOWN_MODEL, self.BAD_REQUEST, self.ABSENT}

    @property
    def is_answer(self) -> bool:
        """Whether the model answered, but not in a way that can be read: it is told so, and asked again."""
        return self in {self.MALFORMED, self.TOO_LARGE, self.BAD_GENERATION}


class ProviderError(Exception):
    """A request without an answer. The message is redacted and bounded."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        retry_after_s: float | None = None,
        *,
        refused: str = "",
        may_have_cost: bool = False,
    ) -> None:
        """`refused` is the server's whole complaint about the form of a request: code, type, parameter and message.

        `may_have_cost`: the model may have worked on the request although no answer came.
        """
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s
        self.refused = refused
        self.may_have_cost = may_have_cost


class Provider(Protocol):
    """One model behind one protocol."""

    name: str
    """`anthropic:MODEL`, ...: for people and for prices; contains no key and no address."""

    def ask(self, request: CompletionRequest) -> Answer:
        """Send one request once, and return the answer; raises ProviderError."""
        ...


def name_model(protocol: str, model: str, base_url: str | None) -> str:
    """`protocol:model`, for people and for prices; `local:model` for a compatible server on this machine."""
    host = urlsplit(base_url).hostname if base_url else None
    return f"local:{model}" if protocol == "compatible" and host and is_local_host(host) else f"{protocol}:{model}"
