"""What passes between the agent and a provider, whatever its wire protocol: request, answer, stop reason, error."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol

from cclsearch.core.values import Model

BYTES_PER_TOKEN = 3
"""As tokens are counted where no tokenizer can be had."""
MAX_BODY_BYTES = 12_000 * BYTES_PER_TOKEN
"""Of one request as it goes over the wire."""


class ToolSpec(Model):
    """One thing that the model may call. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]


class ToolCall(Model):
    """One call that the model made."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    """None where what came was no JSON object; then `fault` says what it was."""
    fault: str = ""


class ToolResult(Model):
    """What the call with that id gave."""

    id: str
    text: str
    is_error: bool = False


class Role(StrEnum):
    """Who speaks."""

    USER = "user"
    ASSISTANT = "assistant"


class Message(Model):
    """One message; tool results travel in a user message, calls in an assistant message."""

    role: Role
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()


class CompletionRequest(Model):
    """One question to a provider. `system` and `tools` do not change during a turn, so a provider may cache them."""

    system: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_output_tokens: int = 4096

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all that is sent, as JSON."""
        return len(self.model_dump_json().encode())


class StopReason(StrEnum):
    """Why the model stopped."""

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
    """The provider did not say: counted as bytes / 3."""

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
    """What came back, validated; nothing in it is trusted."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    stop: StopReason
    stop_word: str = ""
    """The provider's own word for it."""
    usage: Usage = Usage()


class ErrorKind(StrEnum):
    """What kind of failure a provider's is."""

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
        """Whether the same request may do better a little later."""
        return self in {self.RATE_LIMIT, self.OVERLOADED, self.SERVER, self.TIMEOUT, self.CONNECTION}

    @property
    def can_pass(self) -> bool:
        """Whether the provider may do better later in the search; a wrong key stays wrong."""
        return self not in {self.AUTHENTICATION, self.UNKNOWN_MODEL, self.BAD_REQUEST}


class ProviderError(Exception):
    """A provider gave no answer. The message is redacted and bounded."""

    def __init__(self, trouble: ErrorKind, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.trouble = trouble
        self.message = message
        self.retry_after_s = retry_after_s


class Provider(Protocol):
    """One model behind one wire protocol."""

    name: str
    """`anthropic:MODEL`, ...: for people and for prices; holds no key and no address."""

    def ask(self, request: CompletionRequest) -> Answer:
        """The answer to one request, tried once; raises ProviderError."""
        ...
