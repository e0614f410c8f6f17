"""The provider `mcp:NAME`: an agent outside of the search decides, through two files in the run's `turns` folder.

The search writes the request that it waits for; `ccl-search mcp` writes the tool that its client calls as the answer.
So a proposal passes the same turn, tools, arbiter and records as one of an LLM that the search asks itself.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.kind import PROVIDERS, ProviderKind
from cclsearch.propose.agent.providers.prices import Price
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    ErrorKind,
    ProviderError,
    StopReason,
    ToolCall,
)

ASKED_FILE, ANSWER_FILE = "asked.json", "answer.json"
LOOK_S = 0.1


class AskedAgent(Model):
    """The request that the search waits for."""

    id: str
    request: CompletionRequest


class OutsideAnswer(Model):
    """The outside agent's call of one tool."""

    id: str
    """Of the request that it answers."""
    name: str
    arguments: dict[str, Any]
    by: str
    """Name that the agent gave itself."""


class OutsideAgent:
    """The provider."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._turns: Path | None = None

    def open(self, turns: Path) -> None:
        """Ask in this folder from now on; before, a small request is answered at once."""
        self._turns = turns
        self._forget()

    def ask(self, request: CompletionRequest) -> Answer:
        """Return the agent's next call; raises ProviderError, for the rest of this session, if none comes in time."""
        if self._turns is None:
            ready = ToolCall(id="1", name=request.tools[0].name, arguments={"ready": True})
            return Answer(calls=(ready,), stop=StopReason.TOOL)
        asked, until_s = AskedAgent(id=secrets.token_hex(8), request=request), time.monotonic() + self.timeout_s
        try:
            self._turns.mkdir(exist_ok=True)
            write_atomically(self._turns / ASKED_FILE, asked.model_dump_json())
            while time.monotonic() < until_s:
                given = OutsideAnswer.read(self._turns / ANSWER_FILE)
                if given is not None and given.id == asked.id:
                    call = ToolCall(id=asked.id, name=given.name, arguments=given.arguments)
                    return Answer(text=f"(by {given.by})", calls=(call,), stop=StopReason.TOOL)
                time.sleep(LOOK_S)
        except OSError as error:
            raise ProviderError(ErrorKind.ABSENT, f"its files cannot be written: {error.strerror}") from None
        finally:
            self._forget()
        raise ProviderError(ErrorKind.ABSENT, f"{self.name} did not decide within {self.timeout_s:.0f} s")

    def _forget(self) -> None:
        for name in (ASKED_FILE, ANSWER_FILE):
            if self._turns is not None:
                (self._turns / name).unlink(missing_ok=True)


def answer_search(turns: Path, asked: AskedAgent, name: str, arguments: dict[str, Any], by: str) -> None:
    """Answer the request with the call of a tool; raises UserError if it has an answer already."""
    answer = OutsideAnswer(id=asked.id, name=name, arguments=arguments, by=one_line(by, 100))
    whole = turns / f".{ANSWER_FILE}.{secrets.token_hex(8)}"
    write_atomically(whole, answer.model_dump_json())
    try:
        os.link(whole, turns / ANSWER_FILE)  # fails if there is one: only one of two agents decides
    except FileExistsError:
        raise UserError("another call is being answered: send this one again after it") from None
    finally:
        whole.unlink()


@PROVIDERS.register("mcp")
class OutsideKind(ProviderKind):
    """An agent that calls the tools of `ccl-search mcp`."""

    word = "mcp"
    address = "http://127.0.0.1"
    timeout_s = 3600.0
    prices = (Price(model="*", input_usd=0.0, output_usd=0.0, source="the agent's user pays for it"),)

    def make_provider(self, model: str, *, api_key: str, base_url: str | None, timeout_s: float) -> OutsideAgent:
        """See `ProviderKind`."""
        return OutsideAgent(self.name_model(model, base_url), timeout_s)
