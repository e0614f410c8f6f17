"""Servers that only prefill, others that only decode, and what clients see of them: `serving_proxy.py PLAN PORT`.

A request goes to a prefill server for one token and then, with what that server says about its KV cache, to a decode
server, whose answer is passed on as it comes. Either is the one with the fewest requests. The servers of this node are
started here, in the process group of this program; if one ends, all end.

On several nodes this program runs on each, and clients ask that of node 0. All servers listen on the loopback interface
of their node: vLLM's calls of its workers are not for everyone on the network. The programs of the other nodes pass on
connections that begin with the trial's secret and the server's number. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFILL, DECODE = "prefill", "decode"
MOST_HEAD_BYTES, MOST_BODY_BYTES = 2**16, 2**26
MOST_GREETING_BYTES, PART_BYTES = 512, 2**16
POLL_S = 0.2
REMOTE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""Asks a prefill server of vLLM to keep a request's KV cache for another (vllm/distributed/kv_transfer, NIXL)."""


class WorkerFailed(Exception):
    """A server answered otherwise than with a result; `status` and `body` are passed on."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


@dataclass
class Worker:
    """One server of a kind, of this node or of another one."""

    number: int
    """Of all servers of the trial."""
    role: str
    host: str
    port: int
    greeting: bytes = b""
    """What the program of the server's node wants to hear first."""
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(default_factory=Path)
    busy: int = 0
    """Requests that it answers now."""

    @property
    def name(self) -> str:
        """For people."""
        return f"the {self.role} server on port {self.port}" + (f" of {self.host}" if self.greeting else "")


def greet(secret: str, number: int) -> bytes:
    """Return the line with which a connection to another node's server begins."""
    return json.dumps([secret, number]).encode() + b"\n"


def start_workers(plan: list[dict[str, Any]], folder: Path, secret: str = "") -> list[Worker]:
    """Start those servers of a plan that have a `command` (and `environment` and `port`); others have `host` and `port`
    of the program that passes connections on to them. Each has `role`, and `number` if it is not its place in the plan.
    """
    workers = []
    for place, planned in enumerate(plan):
        number, role = int(planned.get("number", place)), planned["role"]
        if "command" not in planned:
            workers.append(Worker(number, role, planned["host"], planned["port"], greet(secret, number)))
            continue
        log = folder / f"server-{role}-{number}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                planned["command"], env={**os.environ, **planned["environment"]}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        workers.append(Worker(number, role, "127.0.0.1", planned["port"], process=process, log=log))
    return workers


async def watch_workers(workers: Iterable[Worker]) -> str:
    """Return why, as soon as a server has ended."""
    while True:
        for worker in workers:
            code = worker.process.poll() if worker.process is not None else None
            if code is not None:
                how = f"signal {-code}" if code < 0 else f"code {code}"
                return f"Error: {worker.name} ended with {how}{quote(worker.log)}"
        await asyncio.sleep(POLL_S)


def quote(log: Path) -> str:
    """Return the last line of a log that names an error, else the last."""
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in said if "error" in line.lower() and "://" not in line]
    last = next(iter([*errors[-1:], *said[-1:]]), "")
    return f": {last[:300]}" if last else ""


@dataclass(frozen=True)
class Asked:
    """A request as read from a connection."""

    method: str
    path: str
    body: bytes


async def read_request(reader: asyncio.StreamReader) -> Asked:
    """Return the request; ValueError if it is none."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path = head[0].split(" ")[:2]
    lengths = [line.split(":", 1)[1] for line in head[1:] if line.lower().startswith("content-length:")]
    length = int(lengths[0]) if lengths else 0
    if length > MOST_BODY_BYTES:
        raise ValueError("the body is too long")
    return Asked(method, path, await reader.readexactly(length))


async def ask(worker: Worker, asked: Asked) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request to a server; returns its connection after the head of an answer with status 200."""
    reader, writer = await asyncio.open_connection(worker.host, worker.port, limit=MOST_HEAD_BYTES)
    try:
        head = (
            f"{asked.method} {asked.path} HTTP/1.0\r\nHost: 127.0.0.1:{worker.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(asked.body)}\r\n\r\n"
        )
        writer.write(worker.greeting + head.encode() + asked.body)
        await writer.drain()
        status = int((await reader.readline()).decode("latin-1").split(" ", 2)[1])
        while (await reader.readline()).strip():
            pass
        if status != 200:
            raise WorkerFailed(status, await reader.read(MOST_HEAD_BYTES))
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def ask_whole(worker: Worker, asked: Asked) -> bytes:
    """Return the body of a server's answer."""
    reader, writer = await ask(worker, asked)
    try:
        return await reader.read()
    finally:
        writer.close()


class Relay:
    """What node 0 sees of another node: connections to its servers, for who knows the trial's secret."""

    def __init__(self, workers: list[Worker], secret: str) -> None:
        self.workers, self.secret = {worker.number: worker for worker in workers}, secret

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on to the server that its first line asks for."""
        back: asyncio.StreamWriter | None = None
        try:
            greeting = await reader.readuntil(b"\n")
            secret, number = json.loads(greeting) if len(greeting) <= MOST_GREETING_BYTES else ("", -1)
            if not hmac.compare_digest(str(secret).encode(), self.secret.encode()):
                return
            front, back = await asyncio.open_connection("127.0.0.1", self.workers[number].port)
            await asyncio.gather(pass_on(reader, back), pass_on(front, writer))
        except (OSError, ValueError, TypeError, KeyError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the other side sees the connection end
        finally:
            for each in (back, writer):
                if each is not None:
                    each.close()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write what is read as it comes; then say that nothing more comes."""
    while part := await reader.read(PART_BYTES):
        writer.write(part)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


class Proxy:
    """What clients see: completions over both kinds of servers; health, metrics and calls of all of them."""

    def __init__(self, workers: list[Worker], *, passes_parameters: bool) -> None:
        self.workers, self.passes_parameters = workers, passes_parameters
        self._said = ""

    def choose(self, role: str) -> Worker:
        return min((worker for worker in self.workers if worker.role == role), key=lambda worker: worker.busy)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, which has one request."""
        try:
            asked = await read_request(reader)
            if asked.path == "/v1/completions":
                await self._complete(asked, writer)
            else:
                _answer(writer, 200, await self._ask_all(asked))
            await writer.drain()
        except WorkerFailed as error:
            _answer(writer, error.status, error.body)
        except (OSError, ValueError, IndexError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            _answer(writer, 502, f"{type(error).__name__}: {error}".encode())
        finally:
            writer.close()

    async def _complete(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        body = json.loads(asked.body)
        if self.passes_parameters:
            body["kv_transfer_params"] = REMOTE
        once = {**body, "max_tokens": 1, "stream": False}
        once.pop("stream_options", None)
        first = json.loads(await self._prefill(Asked("POST", asked.path, json.dumps(once).encode())))
        if self.passes_parameters:
            body["kv_transfer_params"] = first["kv_transfer_params"]
        worker = self.choose(DECODE)
        worker.busy += 1
        try:
            answer, connection = await ask(worker, Asked("POST", asked.path, json.dumps(body).encode()))
            try:
                writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
                while part := await answer.read(MOST_HEAD_BYTES):
                    writer.write(part)
                    await writer.drain()
            finally:
                connection.close()
        finally:
            worker.busy -= 1

    async def _prefill(self, asked: Asked) -> bytes:
        worker = self.choose(PREFILL)
        worker.busy += 1
        try:
            return await ask_whole(worker, asked)
        finally:
            worker.busy -= 1

    async def _ask_all(self, asked: Asked) -> bytes:
        """Return the answers of all servers together: `results` of calls in one list, other texts one after another."""
        asking = (ask_whole(worker, asked) for worker in self.workers)
        answers: list[bytes] = []
        for worker, answer in zip(self.workers, await asyncio.gather(*asking, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                if asked.path == "/health":
                    self._say(f"{worker.name} is not healthy: see server-{worker.role}-{worker.number}.log")
                raise answer
            answers.append(answer)
        if asked.path != "/collective_rpc":
            return b"\n".join(answers)
        return json.dumps({"results": [each for answer in answers for each in json.loads(answer)["results"]]}).encode()

    def _say(self, words: str) -> None:
        """Print something, once: health is asked for many times a second."""
        if words != self._said:
            print(words, flush=True)
        self._said = words


def _answer(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(f"HTTP/1.0 {status} -\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)


async def run(path: Path, port: int) -> str:
    """Start the servers and answer until one of them ends; returns why it did."""
    plan = json.loads(path.read_text(encoding="utf-8"))
    secret = str(plan.get("secret", ""))
    async with contextlib.AsyncExitStack() as listening:
        workers = start_workers(plan["workers"], path.parent, secret)
        relay, proxy = plan.get("relay"), Proxy(workers, passes_parameters=plan["passes_parameters"])
        if relay is None:
            server = await asyncio.start_server(proxy.serve, "127.0.0.1", port, limit=MOST_HEAD_BYTES)
        else:
            server = await asyncio.start_server(Relay(workers, secret).serve, relay["host"], relay["port"])
        await listening.enter_async_context(server)
        return await watch_workers(workers)


if __name__ == "__main__":
    sys.exit(asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]))))
