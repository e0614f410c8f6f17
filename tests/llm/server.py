"""A scripted local HTTP server that speaks the Messages API, the Responses API and chat completions.

Developers can put any model (or a person) behind it:

    python -m tests.llm.server --files FOLDER     writes each request to FOLDER/0001.request.json and
                                                  waits for its answer in 0001.answer.json
    python -m tests.llm.server --person           prints each request; the answer is one JSON line

and run `ccl-search run --llm http://127.0.0.1:PORT/v1#any` with it. An answer is
`{"text": "...", "calls": [{"name": "submit", "arguments": {...}}]}`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast

from cclsearch.propose.agent.providers.client import Client
from cclsearch.propose.agent.providers.forms import Api, Form
from cclsearch.propose.agent.providers.kind import PROVIDERS
from cclsearch.propose.agent.providers.types import CompletionRequest

from .read_requests import BadRequest, read_anthropic, read_openai, read_responses
from .streams import stream_anthropic, stream_chat, stream_responses

KEY = "sk-test-0123456789abcdefghij"
MODEL = "stand-in"


@dataclass(frozen=True)
class Say:
    """An ordinary answer."""

    calls: tuple[tuple[str, Any], ...] = ()
    """(tool, arguments); arguments that are text are sent unchanged if the protocol allows it."""
    text: str = ""
    stop: str = ""
    """`truncated`, `refused`, `filtered`; empty for an ordinary stop."""
    usage: tuple[int, int] | None = (1000, 100)
    cached: int = 0
    thinking: str = ""
    """What the model thought before it answered, which has to come back with the results of its calls."""


@dataclass(frozen=True)
class Status:
    """An error."""

    code: int
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "scripted"


@dataclass(frozen=True)
class Raw:
    """These bytes, by default with status 200."""

    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    code: int = 200


@dataclass(frozen=True)
class Cut:
    """The connection is cut in the middle of the body."""


@dataclass(frozen=True)
class Drip:
    """Ten headers per second, for that many seconds."""

    seconds: float


@dataclass(frozen=True)
class Hang:
    """No bytes for that many seconds."""

    seconds: float


Reaction = Say | Status | Raw | Cut | Drip | Hang
Script = Callable[[CompletionRequest], Reaction]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected; show any other error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class ProviderServer:
    """A running server; `requests` contains all requests in order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[CompletionRequest] = []
        self.bodies: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.lock = threading.Lock()
        self._http = _Server(("127.0.0.1", 0), _make_handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base address, without `/v1`."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)


@contextlib.contextmanager
def serve(script: Script) -> Iterator[ProviderServer]:
    """The server, which runs until the block ends."""
    server = ProviderServer(script)
    try:
        yield server
    finally:
        server.close()


def one_by_one(*reactions: Reaction) -> Script:
    """A script that returns these reactions one after another, and the last one for all further requests."""
    left = list(reactions)

    def script(request: CompletionRequest) -> Reaction:
        return left.pop(0) if len(left) > 1 else left[0]

    return script


def check_first(script: Script) -> Script:
    """The script for a search: the small request before it is answered."""

    def answer(request: CompletionRequest) -> Reaction:
        return Say((("ready", {"ready": True}),)) if is_check(request) else script(request)

    return answer


def is_check(request: CompletionRequest) -> bool:
    """Whether this is the small request that a search sends before its first trial."""
    return "Call the tool `ready`" in request.model_dump_json()


class _Handler(BaseHTTPRequestHandler):
    """One connection; `_make_handler` binds it to its server."""

    owner: ClassVar[ProviderServer]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        paths = {"/v1/messages": "anthropic", "/v1/chat/completions": "openai", "/v1/responses": "responses"}
        protocol = paths.get(self.path)
        if protocol is None:
            return self._send_error(404, "not found", "openai")
        if not self._has_key(protocol):
            return self._send_error(401, "invalid api key", protocol)
        try:
            raw = json.loads(body)
            request = READERS[protocol](raw)
        except (BadRequest, KeyError, ValueError, AttributeError, TypeError) as error:
            self.owner.refused.append(f"{type(error).__name__}: {error}")
            return self._send_error(400, str(error), protocol)
        if raw.get("model") != MODEL:
            return self._send_error(404, f"model: {raw.get('model')}", protocol)
        with self.owner.lock:
            self.owner.requests.append(request)
            self.owner.bodies.append(raw)
            try:
                reaction = self.owner.script(request)
            except Exception as error:  # a failed assertion must fail the test, not look like a cut connection
                self.owner.refused.append(f"{type(error).__name__}: {error}")
                reaction = Status(400, message="the script failed")
        self._react(reaction, protocol, is_json="response_format" in raw, is_stream=bool(raw.get("stream")))
        return None

    def _has_key(self, protocol: str) -> bool:
        given = self.headers.get("x-api-key") or self.headers.get("authorization", "").removeprefix("Bearer ")
        is_valid = self.headers.get("anthropic-version") if protocol == "anthropic" else True
        return given == KEY and bool(is_valid)

    def _react(self, reaction: Reaction, protocol: str, *, is_json: bool, is_stream: bool) -> None:
        if isinstance(reaction, Hang):
            time.sleep(reaction.seconds)
            self.close_connection = True
        elif isinstance(reaction, Drip):
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                for i in range(int(reaction.seconds * 10)):
                    self.wfile.write(b"x-%d: y\r\n" % i)
                    time.sleep(0.1)
            self.close_connection = True
        elif isinstance(reaction, Cut):
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", "100000")
            self.end_headers()
            self.wfile.write(b'{"id": "x", ')
            self.close_connection = True
        elif isinstance(reaction, Status):
            self._send_error(reaction.code, reaction.message, protocol, reaction.headers)
        elif isinstance(reaction, Raw):
            self._send(reaction.code, reaction.body, reaction.headers)
        else:
            make, stream = WRITERS[protocol]
            body = make(reaction, is_json)
            if is_stream:
                return self._send(200, stream(body), {"content-type": "text/event-stream"})
            self._send(200, json.dumps(body).encode())
        return None

    def _send_error(self, code: int, message: str, protocol: str, headers: dict[str, str] | None = None) -> None:
        error = {"type": "not_found_error" if code == 404 else "error", "message": message}
        body = {"type": "error", "error": error} if protocol == "anthropic" else {"error": error}
        self._send(code, json.dumps(body).encode(), headers)

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body)


def _make_handler(owner: ProviderServer) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"owner": owner})


def anthropic_answer(say: Say, is_json: bool = False) -> dict[str, Any]:
    """A message as Anthropic sends it."""
    thought = {"type": "thinking", "thinking": say.thinking, "signature": f"signed {say.thinking}"}
    content: list[dict[str, Any]] = [thought] if say.thinking else []
    content += [{"type": "text", "text": say.text}] if say.text else []
    content += [
        {"type": "tool_use", "id": f"toolu_{i}", "name": name, "input": arguments}
        for i, (name, arguments) in enumerate(say.calls)
    ]
    stop = {"truncated": "max_tokens", "refused": "refusal", "filtered": "refusal"}.get(say.stop)
    body: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": stop or ("tool_use" if say.calls else "end_turn"),
        "stop_sequence": None,
    }
    if say.usage:
        inputs, outputs = say.usage
        body["usage"] = {"input_tokens": inputs, "output_tokens": outputs, "cache_read_input_tokens": say.cached}
    return body


def openai_answer(say: Say, is_json: bool = False) -> dict[str, Any]:
    """A chat completion as OpenAI sends it."""
    stop = {"truncated": "length", "refused": "stop", "filtered": "content_filter"}.get(say.stop)
    message: dict[str, Any] = {"role": "assistant", "content": say.text or None, "refusal": None}
    if say.thinking:
        message["reasoning_content"] = say.thinking
    if say.stop == "refused":
        message["refusal"], message["content"] = say.text or "no", None
    if say.calls and is_json:
        name, arguments = say.calls[0]
        message["content"] = json.dumps({"tool": name, "arguments": arguments})
    elif say.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for i, (name, arguments) in enumerate(say.calls)
        ]
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": stop or ("tool_calls" if say.calls else "stop")}],
    }
    if say.usage:
        body["usage"] = {
            "prompt_tokens": say.usage[0] + say.cached,
            "completion_tokens": say.usage[1],
            "total_tokens": sum(say.usage) + say.cached,
            "prompt_tokens_details": {"cached_tokens": say.cached},
        }
    return body


def responses_answer(say: Say, is_json: bool = False) -> dict[str, Any]:
    """An answer of the Responses API."""
    output: list[dict[str, Any]] = []
    if say.thinking:
        output.append({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": f"sealed {say.thinking}"})
    if say.text:
        part = (
            {"type": "refusal", "refusal": say.text}
            if say.stop == "refused"
            else {"type": "output_text", "text": say.text}
        )
        output.append({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]})
    output += [
        {
            "type": "function_call",
            "id": f"fc_{i}",
            "call_id": f"call_{i}",
            "name": name,
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        }
        for i, (name, arguments) in enumerate(say.calls)
    ]
    reason = {"truncated": "max_output_tokens", "filtered": "content_filter"}.get(say.stop)
    body: dict[str, Any] = {"id": "resp_1", "object": "response", "model": MODEL, "output": output}
    body |= {"status": "incomplete" if reason else "completed", "incomplete_details": reason and {"reason": reason}}
    if say.usage:
        inputs = {"input_tokens": say.usage[0] + say.cached, "input_tokens_details": {"cached_tokens": say.cached}}
        body["usage"] = {**inputs, "output_tokens": say.usage[1]}
    return body


READERS = {"anthropic": read_anthropic, "openai": read_openai, "responses": read_responses}
WRITERS = {
    "anthropic": (anthropic_answer, stream_anthropic),
    "openai": (openai_answer, stream_chat),
    "responses": (responses_answer, stream_responses),
}
"""Protocol -> its answer and its stream."""


def connect(
    protocol: str, server: ProviderServer, *, key: str = KEY, model: str = MODEL, timeout_s: float = 30.0
) -> Client:
    """The provider that asks this server: `anthropic`, `compatible`, or `responses` of the latter."""
    kind = PROVIDERS.get("compatible" if protocol == "responses" else protocol)()
    url = server.url if protocol == "anthropic" else f"{server.url}/v1"
    client = cast("Client", kind.make_provider(model, api_key=key, base_url=url, timeout_s=timeout_s))
    if protocol == "responses":
        client.form = Form(api=Api.RESPONSES, streams=True)
    return client


def answer_from_files(folder: Path, *, poll_s: float = 0.2, wait_s: float = 3600.0) -> Script:
    """A script that writes each request to a file and waits for the file of its answer."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0

    def script(request: CompletionRequest) -> Reaction:
        nonlocal number
        number += 1
        answer = folder / f"{number:04d}.answer.json"
        part = folder / f"{number:04d}.request.part"
        part.write_text(request.model_dump_json(indent=1), encoding="utf-8")
        part.rename(folder / f"{number:04d}.request.json")
        deadline = time.monotonic() + wait_s
        before, text = "", ""
        # The file may be incomplete: it is read once its text has not changed for one poll.
        while not text.strip() or text != before:
            if time.monotonic() > deadline:
                return Status(504, message="no answer in time")
            time.sleep(poll_s)
            before, text = text, answer.read_text(encoding="utf-8") if answer.exists() else ""
        return read_answer(text)

    return script


def answer_from_person() -> Script:
    """A script that shows each request and reads one JSON line."""

    def script(request: CompletionRequest) -> Reaction:
        for message in request.messages[-1:]:
            print(request.system if len(request.messages) == 1 else "", message.text, sep="\n")
            for result in message.results:
                print(f"--- {result.id}\n{result.text}")
        return read_answer(input("answer> "))

    return script


def answer_once(script: Script) -> Script:
    """The script, except that a repeated request (its sender timed out) gets the earlier answer."""
    given: dict[str, Reaction] = {}

    def repeat(request: CompletionRequest) -> Reaction:
        words = request.model_dump_json()
        reaction = given.get(words) or script(request)
        if isinstance(reaction, Say):
            given[words] = reaction
        return reaction

    return repeat


def read_answer(text: str) -> Reaction:
    """The answer in this text; text that is not a JSON object is sent as plain text."""
    try:
        data = json.loads(text)
    except ValueError:
        return Say(text=text)
    if not isinstance(data, dict):
        return Say(text=text)
    calls = tuple((str(call["name"]), call.get("arguments", {})) for call in data.get("calls", []))
    return Say(calls=calls, text=str(data.get("text", "")), stop=str(data.get("stop", "")))


def main() -> None:
    parser = argparse.ArgumentParser(description="A local provider that gets its answers from files or from a person.")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--files", type=Path, metavar="FOLDER")
    group.add_argument("--person", action="store_true")
    args = parser.parse_args()
    with serve(
        check_first(answer_once(answer_from_person() if args.person else answer_from_files(args.files)))
    ) as server:
        print(f"export CCL_SEARCH_LLM_API_KEY={KEY} CCL_SEARCH_LLM_TIMEOUT_S=3600", flush=True)
        print(f"--llm '{server.url}/v1#{MODEL}'", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
