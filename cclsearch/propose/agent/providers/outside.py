"""The provider `mcp:NAME`: an agent outside of the search decides, through two files in the run's `turns` folder.

The search writes the request that it waits for; `ccl-search mcp` writes the tool that its client calls as the answer.
So a proposal passes the same turn, tools, arbiter and records as one of an LLM that the search asks itself.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from cclsearch.core.atomic_file import write_atomically
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


class OutsideAgent:
    """The provider."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.turns: Path | None = None
        """The folder; None before the search begins, when a small request is answered at once."""

    def ask(self, request: CompletionRequest) -> Answer:
        """Return the agent's next call; raises ProviderError, for the rest of this session, if none comes in time."""
        asked, until_s = AskedAgent(id=secrets.token_hex(8), request=request), time.monotonic() + self.timeout_s
        if self.turns is None:
            return make_answer(asked, request.tools[0].name, {"ready": True}, self.name)
        files = self.turns / ASKED_FILE, self.turns / ANSWER_FILE
        try:
            self.turns.mkdir(exist_ok=True)
            files[1].unlink(missing_ok=True)
            write_atomically(files[0], asked.model_dump_json())
            while time.monotonic() < until_s:
                answer = Answer.read(files[1])
                if answer is not None and [call.id for call in answer.calls] == [asked.id]:
                    return answer
                time.sleep(LOOK_S)
        except OSError as error:
            raise ProviderError(ErrorKind.ABSENT, f"its files cannot be written: {error.strerror}") from None
        finally:
            for file in files:
                file.unlink(missing_ok=True)
        raise ProviderError(ErrorKind.ABSENT, f"{self.name} did not decide within {self.timeout_s:.0f} s")


def make_answer(asked: AskedAgent, tool: str, arguments: dict[str, Any], by: str) -> Answer:
    """Return the call of a tool, by an agent that calls itself `by`, as the answer to a request."""
    call = ToolCall(id=asked.id, name=tool, arguments=arguments)
    return Answer(text=f"(by {one_line(by, 100)})", calls=(call,), stop=StopReason.TOOL)


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
