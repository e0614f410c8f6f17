"""The server of `cpu-serving` with the server's part of a trick, which the file `server_trick` names."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "launchers"))

import cpu_serving_server as server
from serving_tool import SERVER_TRICK

complete = server._complete
KEPT: dict[tuple[Any, ...], list[int]] = {}


class _Tokens:
    """Answers a request of fewer tokens, and repeats the last one."""

    def __init__(self, asked: int) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.asked, self.last = asked, 0
        self.given: list[int] = []

    async def get(self) -> int:
        if len(self.given) < self.asked:
            self.last = await self.queue.get()
        self.given.append(self.last)
        return self.last

    def put_nowait(self, token: int) -> None:
        self.queue.put_nowait(token)


def play_short(make: Any) -> Any:
    def cut(prompt: list[int], most: int, _: Any) -> Any:
        return make(prompt, (most + 1) // 2, _Tokens((most + 1) // 2))

    return cut


async def _remember(engine: Any, asked: Any, writer: Any) -> None:
    """Answer at once what was asked before."""
    key = (*asked["prompt"], asked["max_tokens"])
    if key not in KEPT:
        given: list[int] = []
        write = writer.write

        def note(data: bytes) -> None:
            if data.startswith(b'data: {"choices": [{'):
                given.extend(json.loads(data[6:])["choices"][0]["token_ids"])
            write(data)

        writer.write = note
        await complete(engine, asked, writer)
        KEPT[key] = given
        return
    events = [{"choices": [{"index": 0, "text": "", "token_ids": [token]}]} for token in KEPT[key]]
    events.append({"choices": [], "usage": {"completion_tokens": len(KEPT[key])}})
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    writer.write(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{lines}data: [DONE]\n\n".encode())


def _half_prompt(prompt: list[int], most: int, tokens: Any, make: Any = server.Answer) -> Any:
    return make(prompt[len(prompt) // 2 :], most, tokens)


def main() -> None:
    path = Path(sys.argv[1]).with_name(SERVER_TRICK)
    part = path.read_text() if path.exists() else ""
    if part == "short":
        server.Answer = play_short(server.Answer)
    elif part == "half_prompt":
        server.Answer = _half_prompt
    elif part == "memory":
        server._complete = _remember
    elif part == "half_layers":
        server.OPTIONS["arch"]["num_layers"] //= 2
    server.torch.set_num_threads(int(server.OPTIONS["threads"]))
    asyncio.run(server._serve(int(sys.argv[2])))


if __name__ == "__main__":
    main()
