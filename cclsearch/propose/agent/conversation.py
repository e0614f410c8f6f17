"""The conversation of a search: the model's own words from turn to turn, append-only within a budget.

Providers bind a model's thinking to an unchanged prefix: system, tools, and all messages before it. So a turn continues
the conversation as it is, or begins it anew with notes: the model's earlier words, shortened by rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cclsearch.core.secrets.redact import redact
from cclsearch.propose.agent.prompt.quoting import clip_bytes
from cclsearch.propose.agent.providers.types import (
    BYTES_PER_TOKEN,
    MAX_BODY_BYTES,
    CompletionRequest,
    Message,
    Role,
    ToolResult,
    ToolSpec,
)

DEFAULT_TOKENS = 60_000
"""Largest size of a request, `--llm-context`; a turn alone has up to 12,000 tokens."""
NOTES_SHARE = 0.25
"""Share of the budget for the notes of a conversation that begins anew."""
MAX_NOTE_BYTES = 900
"""Bytes of the model's words of one answer in the notes."""
THOUGHTS = ("thinking", "reasoning_content", "reasoning", "summary", "text")
"""Fields of a provider's blocks that hold words of the model."""


@dataclass(frozen=True)
class Conversation:
    """The messages of earlier turns; the last one has the results of the latest decision's calls."""

    messages: tuple[Message, ...] = ()
    system: str = ""
    tools: tuple[ToolSpec, ...] = ()

    def open(self, system: str, tools: tuple[ToolSpec, ...], max_tokens: int) -> tuple[Message, ...]:
        """Return the messages before a turn with this system text and these tools; none without a budget."""
        size = CompletionRequest(system=system, messages=self.messages, tools=tools)
        most = max_tokens * BYTES_PER_TOKEN - MAX_BODY_BYTES
        if most <= 0 or not self.messages:
            return ()
        is_same = self.system == system and self.tools == tools
        if is_same and size.num_bytes + size.num_kept_bytes <= most:
            return self.messages
        return write_notes(self.messages, int(NOTES_SHARE * most))


def split_opening(messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[ToolResult, ...]]:
    """Return the messages before a turn, and the results of the latest decision, which go with the turn's prompt."""
    if messages and messages[-1].role is Role.USER:
        return tuple(messages[:-1]), messages[-1].results
    return tuple(messages), ()


def join(opening: Sequence[Message], own: Sequence[Message]) -> tuple[Message, ...]:
    """Return the conversation after a turn; one without a decision leaves no trace."""
    return (*split_opening(opening)[0], *own) if own else tuple(opening)


def write_notes(messages: Sequence[Message], max_bytes: int) -> tuple[Message, ...]:
    """Return two messages in place of a conversation: what the model wrote in it, the latest kept whole."""
    notes: list[str] = []
    for message in reversed(messages):
        words = " ".join(_find_words(message)) if message.role is Role.ASSISTANT else ""
        calls = "".join(f"\n{call.name} {clip_bytes(json.dumps(call.arguments), 300)}" for call in message.calls)
        note = clip_bytes(redact(words), MAX_NOTE_BYTES) + calls
        max_bytes -= len(note.encode())
        if max_bytes < 0:
            break
        notes += [note] if note else []
    if not notes:
        return ()
    text = "Earlier in this search you wrote, shortened:\n\n" + "\n\n".join(reversed(notes))
    return Message(role=Role.USER, text=text), Message(role=Role.ASSISTANT, text="I continue from these notes.")


def _find_words(message: Message) -> Iterator[str]:
    """Yield the model's words of one answer: its text, and its thinking as far as the provider shows it."""
    yield message.text
    for block in message.kept:
        for name in THOUGHTS:
            value = block.get(name)
            parts = value if isinstance(value, list) else [value]
            yield from (part if isinstance(part, str) else str(part.get("text", "")) for part in parts if part)
