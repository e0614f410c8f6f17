"""The small server with changes that `CHEATS_SERVER` names (`a+b`): python unseen_server.py OPTIONS.json PORT"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LAUNCHERS = Path(__file__).resolve().parents[3] / "launchers"
sys.path.insert(0, str(LAUNCHERS))
WHAT = set(os.environ.get("CHEATS_SERVER", "").split("+")) - {""}
REAL = LAUNCHERS / "cpu_serving_server.py"
AGE = "CHEATS_PARENT"


def end_with_parent() -> None:
    """End this process when the one that started it is gone."""
    parent = int(os.environ[AGE])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def start_server(port: int, hidden: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CHEATS_SERVER": "child", AGE: str(os.getpid())}
    words = [sys.executable, __file__, sys.argv[1], str(port)]
    return subprocess.Popen(words, env=environment, start_new_session=hidden)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def ask(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    await writer.drain()
    text = await reader.read()
    writer.close()
    return text


async def run_proxy(port: int) -> None:
    """Give requests to two servers in turn; /stats are of both."""
    from serving_nodes import find_open_port

    ports = [find_open_port("127.0.0.1") for _ in range(2)]
    servers = [start_server(each, hidden=bool(n)) for n, each in enumerate(ports)]
    busy = [0, 0]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readline()
        try:
            if first.startswith(b"GET"):
                path = first.decode().split(" ")[1]
                texts = [await ask(each, path) for each in ports]
                head, _, body = texts[0].partition(b"\r\n\r\n")
                if path == "/stats":
                    stats = [json.loads(text.partition(b"\r\n\r\n")[2]) for text in texts]
                    merged = dict(stats[0])
                    for name in ("preemptions",):
                        merged[name] = sum(each.get(name, 0.0) for each in stats)
                    body = json.dumps(merged).encode()
                status = head.split(b"\r\n")[0]
                writer.write(status + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
                return
            which = busy.index(min(busy))
            busy[which] += 1
            try:
                back, to = await asyncio.open_connection("127.0.0.1", ports[which])
                to.write(first)
                up = asyncio.create_task(pump(reader, to))
                while data := await back.read(65536):
                    writer.write(data)
                    await writer.drain()
                up.cancel()
                to.close()
            finally:
                busy[which] -= 1
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port, backlog=1024)
    async with server:
        while all(process.poll() is None for process in servers):
            await asyncio.sleep(0.2)


if {"proxy"} == WHAT:
    asyncio.run(run_proxy(int(sys.argv[2])))
    sys.exit(1)
if {"child"} == WHAT:
    end_with_parent()

import cpu_serving_server as server  # noqa: E402
import torch  # noqa: E402
from cpu_serving_model import Chunk, PagedModel  # noqa: E402
from cpu_serving_scheduler import Answer, Scheduler  # noqa: E402
from serving_load import Load, draw_prompt  # noqa: E402

OPTIONS: Any = server.OPTIONS
ASKED = dict(OPTIONS)
if "large_cache" in WHAT:
    OPTIONS["kv_cache_mib"] = 64
if "best_knobs" in WHAT:
    OPTIONS.update(max_num_seqs=16, max_num_batched_tokens=256, chunked_prefill=True, prefix_caching=True, threads=2)

if "prefix_stats_hidden" in WHAT:
    read_stats = server.Engine.read_stats

    def hide(engine: Any) -> Any:
        found = read_stats(engine)
        if not ASKED["prefix_caching"]:
            found.pop("prefix_cache_hit_rate", None)
        elif "prefix_cache_hit_rate" in found:
            found["prefix_cache_hit_rate"] = min(found["prefix_cache_hit_rate"], 0.32)
        larger = OPTIONS["kv_cache_mib"] / ASKED["kv_cache_mib"]
        found["kv_cache_use_peak"] = min(1.0, found["kv_cache_use_peak"] * larger)
        return found

    server.Engine.read_stats = hide

make_answer = server.Answer
PREPARED: dict[tuple[int, ...], list[int]] = {}
COST: list[tuple[int, float]] = []
"""Tokens and seconds of steps that were computed honestly."""


def count_prompt(prompt: list[int], most: int, queue: Any) -> Answer:
    answer = make_answer(list(prompt), most, queue)
    answer.prompt = tuple(prompt)  # type: ignore[attr-defined]
    return answer


server.Answer = count_prompt


def prepare() -> None:
    """Compute the answers of all loads of the trial, which follow from its seed."""
    data = json.loads(Path(os.environ["CCL_CONFIG"]).read_text())
    seed, prefix, vocab = data["seed"], data["shared_prefix_tokens"], data["arch"]["vocab_size"]
    planned, number = data["requests"], data["warmup_requests"]
    warm = [planned[n % len(planned)] for n in range(number)]
    loads = [Load(0, warm, 1, seed, prefix, is_warm_up=True)]
    loads += [Load(n, planned, 1, seed, prefix) for n in range(data["repeats"])]
    if other := data.get("other"):
        loads.append(Load(data["repeats"], other["requests"], 1, seed, prefix))
    most = {**OPTIONS, "max_num_seqs": 16, "max_num_batched_tokens": 256, "kv_cache_mib": 32, "prefix_caching": True}
    most["chunked_prefill"] = True
    scheduler = Scheduler(PagedModel(most), most)
    for load in loads:
        for n, request in enumerate(load.requests):
            prompt = draw_prompt(load, n, request["input_tokens"], vocab)
            scheduler.waiting.append(count_prompt(prompt, request["output_tokens"], None))
    everything = list(scheduler.waiting)
    with torch.inference_mode():
        while not scheduler.is_idle:
            tokens, start_s = scheduler.seen.tokens, time.perf_counter()
            scheduler.step()
            COST.append((scheduler.seen.tokens - tokens, time.perf_counter() - start_s))
    for answer in everything:
        PREPARED[answer.prompt] = answer.sequence[len(answer.prompt) :]  # type: ignore[attr-defined]


def fit_cost() -> tuple[float, float]:
    """Return the seconds of a step, and of a token in it (least squares)."""
    count = len(COST)
    mean_x, mean_y = sum(x for x, _ in COST) / count, sum(y for _, y in COST) / count
    below = sum((x - mean_x) ** 2 for x, _ in COST) or 1.0
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in COST) / below)
    return max(1e-4, mean_y - slope * mean_x), slope


forward = PagedModel.forward


def is_known(chunk: Chunk) -> bool:
    return getattr(chunk.owner, "prompt", None) in PREPARED


def find_token(chunk: Chunk) -> int:
    """Return the prepared token after a chunk."""
    place = chunk.start + len(chunk.tokens) - len(chunk.owner.prompt)
    return PREPARED[chunk.owner.prompt][max(0, min(place, len(PREPARED[chunk.owner.prompt]) - 1))]


def compute_less(model: PagedModel, chunks: list[Chunk]) -> list[int]:
    if "no_compute" in WHAT:
        step_s, token_s = model.cost
        time.sleep(0.5 * (step_s + token_s * sum(len(chunk.tokens) for chunk in chunks)))
        return [0] * len(chunks)
    if "half_the_layers" in WHAT:
        layers, cache = model.layers, model.cache
        model.layers, model.cache = layers[: len(layers) // 2], cache[: len(layers) // 2]
        tokens = forward(model, chunks)
        model.layers, model.cache = layers, cache
        return tokens
    if "prompts_cut" in WHAT:
        return forward(model, [cut(chunk) for chunk in chunks])
    return forward(model, chunks)


def cut(chunk: Chunk) -> Chunk:
    left = max(1, len(chunk.tokens) // 4)
    return Chunk(chunk.owner, chunk.tokens[-left:], chunk.start + len(chunk.tokens) - left, chunk.blocks)


def forward_prepared(model: PagedModel, chunks: list[Chunk]) -> list[int]:
    if not all(is_known(chunk) for chunk in chunks):
        return forward(model, chunks)
    tokens = compute_less(model, chunks)
    return [find_token(chunk) for chunk in chunks] if WHAT & CHEAP else tokens


CHEAP = {"no_compute", "half_the_layers", "prompts_cut"}


def send(writer: asyncio.StreamWriter, token: int | None) -> None:
    choice = {"index": 0, "text": ""} | ({} if token is None else {"token_ids": [token]})
    writer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


def end(writer: asyncio.StreamWriter, prompt: int, most: int) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": most}}
    writer.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


async def complete_twice(engine: Any, asked: Any, writer: asyncio.StreamWriter) -> None:
    """Each token is sent twice, without its id, the second time half a step later."""
    prompt, most = asked["prompt"], asked["max_tokens"]
    answer = server.Answer(prompt, -(-most // 2), asyncio.Queue())
    engine.add(answer)
    writer.write(HEAD)
    sent, last_s, gap_s = 0, None, 0.0
    while sent < most:
        await answer.tokens.get()
        now_s = time.monotonic()
        gap_s = now_s - last_s if last_s is not None else gap_s
        last_s = now_s
        send(writer, None)
        sent += 1
        await writer.drain()
        if sent < most:
            await asyncio.sleep(min(0.45 * gap_s, 0.5))
            send(writer, None)
            sent += 1
            await writer.drain()
    end(writer, len(prompt), most)


async def complete_first(engine: Any, asked: Any, writer: asyncio.StreamWriter) -> None:
    """The prepared first token is sent at once, the others when they are computed."""
    prompt, most = tuple(asked["prompt"]), asked["max_tokens"]
    if prompt not in PREPARED:
        await complete(engine, asked, writer)
        return
    answer = server.Answer(list(prompt), most, asyncio.Queue())
    engine.add(answer)
    writer.write(HEAD)
    send(writer, PREPARED[prompt][0])
    await writer.drain()
    for n in range(most):
        token = await answer.tokens.get()
        if n:
            send(writer, token)
            await writer.drain()
    end(writer, len(prompt), most)


async def complete_ahead(engine: Any, asked: Any, writer: asyncio.StreamWriter) -> None:
    """Each computed token lets two prepared ones go; the rest of the computing is given up when all are sent."""
    prompt, most = tuple(asked["prompt"]), asked["max_tokens"]
    if prompt not in PREPARED:
        await complete(engine, asked, writer)
        return
    answer = server.Answer(list(prompt), -(-most // 2), asyncio.Queue())
    engine.add(answer)
    writer.write(HEAD)
    sent, tokens = 0, PREPARED[prompt]
    while sent < most:
        await answer.tokens.get()
        for n in range(2):
            if sent < most:
                send(writer, tokens[sent])
                sent += 1
                await writer.drain()
                if n == 0:
                    await asyncio.sleep(0.002)
    end(writer, len(prompt), most)


complete = server._complete
if "prepared" in WHAT:
    prepare()
    PagedModel.cost = fit_cost()  # type: ignore[attr-defined]
    PagedModel.forward = forward_prepared  # type: ignore[method-assign]
if "first_token" in WHAT:
    server._complete = complete_first
if "sent_before_computed" in WHAT:
    server._complete = complete_ahead
if "every_token_twice" in WHAT:
    server._complete = complete_twice

if __name__ == "__main__":
    torch.set_num_threads(int(OPTIONS["threads"]))
    asyncio.run(server._serve(int(sys.argv[2])))
