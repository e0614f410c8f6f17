"""`--llm house:MODEL`: posts the engine's request as JSON; the server answers with text, calls and tokens."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.plugins import PROVIDERS
from cclsearch.propose.agent.providers.cost import Price
from cclsearch.propose.agent.providers.kind import ProviderKind
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    ErrorKind,
    ProviderError,
    StopReason,
    ToolCall,
    Usage,
)

MAX_BYTES = 4_000_000
KINDS = {401: ErrorKind.AUTHENTICATION, 403: ErrorKind.AUTHENTICATION, 404: ErrorKind.UNKNOWN_MODEL}
KINDS |= {429: ErrorKind.RATE_LIMIT, 503: ErrorKind.OVERLOADED}


class HouseProvider:
    """One model of the house's server."""

    def __init__(self, model: str, url: str, key: str, timeout_s: float) -> None:
        self.name = f"house:{model}"
        self._model, self._url, self._key, self._timeout_s = model, url, key, timeout_s

    def ask(self, request: CompletionRequest) -> Answer:
        """Send the request once."""
        body = json.dumps({"model": self._model, "request": request.model_dump(mode="json")}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        asked = urllib.request.Request(f"{self._url}/ask", body, headers, method="POST")
        try:
            with urllib.request.urlopen(asked, timeout=self._timeout_s) as answer:
                content = answer.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            kind = KINDS.get(error.code, ErrorKind.SERVER if error.code >= 500 else ErrorKind.BAD_REQUEST)
            said = error.read(2000).decode(errors="replace").replace(self._key, "[secret]")
            raise ProviderError(kind, f"status {error.code}: {one_line(redact(said))}") from None
        except TimeoutError:
            raise ProviderError(ErrorKind.TIMEOUT, f"no answer within {self._timeout_s:g} s") from None
        except (OSError, HTTPException) as error:
            is_late = isinstance(getattr(error, "reason", None), TimeoutError)
            kind = ErrorKind.TIMEOUT if is_late else ErrorKind.CONNECTION
            raise ProviderError(kind, one_line(redact(str(error)))) from None
        if len(content) > MAX_BYTES:
            raise ProviderError(ErrorKind.TOO_LARGE, f"the answer is longer than {MAX_BYTES:,} bytes")
        return read_answer(content)


def read_answer(content: bytes) -> Answer:
    """Return the answer; whatever the server sent is data."""
    try:
        data = json.loads(content)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ProviderError(ErrorKind.MALFORMED, "the answer is no JSON object")
    calls = [call for call in as_list(data.get("calls")) if isinstance(call, dict)]
    used = data.get("tokens")
    tokens = used if isinstance(used, dict) else {}
    return Answer(
        text=text if isinstance(text := data.get("text"), str) else "",
        calls=tuple(read_call(number, call) for number, call in enumerate(calls)),
        stop=StopReason.TOOL if calls else StopReason.DONE,
        usage=Usage(input_tokens=as_count(tokens.get("in")), output_tokens=as_count(tokens.get("out"))),
    )


def read_call(number: int, call: dict[str, Any]) -> ToolCall:
    """Return one call; arguments that are no object are the model's fault."""
    arguments = call.get("arguments")
    is_object = isinstance(arguments, dict)
    fault = "" if is_object else "the arguments must be an object"
    return ToolCall(
        id=f"call-{number}", name=str(call.get("tool")), arguments=arguments if is_object else None, fault=fault
    )


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


@PROVIDERS.register("house")
class HouseKind(ProviderKind):
    """The house's server, whose address is in `HOUSE_LLM_URL`."""

    word = "house"
    key_name = "HOUSE_LOGIN"
    prices = (Price(model="small*", input_usd=1.0, output_usd=2.0),)

    def make_provider(self, model: str, *, api_key: str, base_url: str | None, timeout_s: float) -> HouseProvider:
        """Return the provider; it does not connect yet."""
        return HouseProvider(model, base_url or os.environ.get("HOUSE_LLM_URL", ""), api_key, timeout_s)
