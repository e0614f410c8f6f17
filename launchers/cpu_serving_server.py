"""A small server of a dense transformer on CPU: continuous batching over a paged KV cache, OpenAI-like completions.

    python cpu_serving_server.py OPTIONS.json PORT

A thread runs the model step by step; the main thread answers HTTP. Prompts are lists of token ids, answers are greedy.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

with open(sys.argv[1], encoding="utf-8") as _file:
    OPTIONS: Mapping[str, Any] = json.load(_file)
os.environ["OMP_NUM_THREADS"] = str(OPTIONS["threads"])

import torch
from common import PeakMemory, limit_memory
from cpu_serving_model import PagedModel
from cpu_serving_scheduler import Answer, Scheduler

MOST_BODY_BYTES = 2**24


class Engine:
    """Runs the scheduler's steps in a thread and hands tokens to the answers that wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.wake, self.lock = loop, threading.Event(), threading.Lock()
        self.new: list[Answer] = []
        limit_memory()
        self.memory = PeakMemory()
        model = PagedModel(OPTIONS)
        self.scheduler, self.num_params = Scheduler(model, OPTIONS), model.num_params
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, answer: Answer) -> None:
        with self.lock:
            self.new.append(answer)
        self.wake.set()

    def read_stats(self) -> dict[str, Any]:
        """Return what happened since the last call, and what the server is."""
        found = self.scheduler.read_stats()
        return {
            **found,
            "num_params": self.num_params,
            "precision": "fp32",
            "peak_memory_bytes": self.memory.peak_bytes(),
        }

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while True:
                    with self.lock:
                        self.scheduler.waiting += self.new
                        self.new = []
                        self.wake.clear()
                    if self.scheduler.is_idle:
                        self.wake.wait()
                        continue
                    produced = self.scheduler.step()
                    self.loop.call_soon_threadsafe(_deliver, produced)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)


def _deliver(produced: list[tuple[Answer, int]]) -> None:
    for answer, token in produced:
        answer.tokens.put_nowait(token)


async def _handle(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        method, path, *_ = (await reader.readline()).decode("latin-1").split(" ")
        length = 0
        while header := (await reader.readline()).strip():
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                length = min(int(value), MOST_BODY_BYTES)
        body = await reader.readexactly(length)
        if path == "/health":
            _reply(writer, "200 OK", {})
        elif path == "/stats":
            _reply(writer, "200 OK", engine.read_stats())
        elif (method, path) == ("POST", "/v1/completions"):
            await _complete(engine, json.loads(body), writer)
        else:
            _reply(writer, "404 Not Found", {"error": "unknown path"})
        await writer.drain()
    except (ValueError, ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


def _reply(writer: asyncio.StreamWriter, status: str, content: Mapping[str, Any]) -> None:
    text = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    writer.write(head.encode() + text)


async def _complete(engine: Engine, asked: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
    prompt, most, vocab = asked.get("prompt"), asked.get("max_tokens", 16), OPTIONS["arch"]["vocab_size"]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(t, int) and 0 <= t < vocab for t in prompt):
        _reply(writer, "400 Bad Request", {"error": f"prompt must be a list of token ids below {vocab}"})
        return
    if not isinstance(most, int) or most < 1 or len(prompt) + most > OPTIONS["max_len"]:
        problem = f"prompt and max_tokens must have at most {OPTIONS['max_len']} tokens together"
        _reply(writer, "400 Bad Request", {"error": problem})
        return
    answer = Answer(prompt, most, asyncio.Queue())
    engine.add(answer)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    for _ in range(most):
        token = await answer.tokens.get()
        event = {"choices": [{"index": 0, "text": "", "token_ids": [token]}]}
        writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await writer.drain()
    usage = {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": most}}
    writer.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")


async def _serve(port: int) -> None:
    engine = Engine(asyncio.get_running_loop())
    server = await asyncio.start_server(lambda r, w: _handle(engine, r, w), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    torch.set_num_threads(int(OPTIONS["threads"]))
    asyncio.run(_serve(int(sys.argv[2])))
