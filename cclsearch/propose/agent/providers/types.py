"""The types between the agent and any provider: request, answer, stop reason, error."""

from __future__ import annotations

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


class CompletionRequest(Model):
    """One request to a provider. `system` and `tools` do not change during a turn, so a provider may cache them."""

    system: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_output_tokens: int = 4096

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the whole request as JSON."""
        return len(self.model_dump_json().encode())


class StopReason(StrEnum):
    """Reason why the model stopped."""

    DONE = "done"
    TOOL = "tool"
    TRUNCATED = "truncated"
    REFUSED = "refused"
    FILTERED = "filtered"
    OTHER = "other"


class Usage(Model):
    """Tokens of one answer. Cached input tokens are not part of `input_tokens`."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
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


class ErrorKind(StrEnum):
    """The kind of a provider's failure."""

    RATE_LIMIT = "rate_limit"
    OVERLOADED = "overloaded"
    SERVER = "server_error"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    MALFORMED = "malformed_answer"
    TOO_LARGE = "answer_too_large"
    AUTHENTICATION = "authentication"
    UNKNOWN_MODEL = "unknown_model"
    BAD_REQUEST = "bad_request"

    @property
    def is_retried(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self in {self.RATE_LIMIT, self.OVERLOADED, self.SERVER, self.TIMEOUT, self.CONNECTION}

    @property
    def is_temporary(self) -> bool:
        """Whether the provider may work again later in the search; a wrong key stays wrong."""
        return self not in {self.AUTHENTICATION, self.UNKNOWN_MODEL, self.BAD_REQUEST}


class ProviderError(Exception):
    """A request without an answer. The message is redacted and bounded."""

    def __init__(self, kind: ErrorKind, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s


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
