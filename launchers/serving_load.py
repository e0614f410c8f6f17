"""Load generator for servers with an OpenAI-like `/v1/completions`: prompts of token ids, streamed answers, a log.

Standard library only. `docs/serving.md` defines what is measured; the engine computes all metrics from the log again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import json
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OPENAI, SGLANG = "openai", "sglang"
"""What a server answers: `/v1/completions`, or SGLang's own `/generate`, which needs no tokenizer."""
UNANSWERED = "not answered: the load was ended, since the server fell behind"
BEHIND_S, BEHIND_LIFETIMES, BEHIND_SHARE = 10.0, 3, 0.1
"""A server falls behind if, over a time of at least so many seconds and so many request lifetimes, its number of
requests grows by this share of those that arrive, and by more than chance (four standard deviations) explains."""
MOST_LINE_BYTES = 2**20


class BadAnswer(Exception):
    """The server answered with something else than a stream of tokens."""


@dataclass(frozen=True)
class Target:
    """The server, and the model's name and number of tokens that requests state."""

    port: int
    vocab_size: int
    model: str = "model"
    host: str = "127.0.0.1"
    timeout_s: float = 300.0
    """For a whole request."""
    api: str = OPENAI


@dataclass
class Record:
    """One request of the log; times are in seconds since the start of its load."""

    load: int
    number: int
    is_warm_up: bool
    arrival_s: float
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    first_token_id: int | None = None
    token_ids_sha256: str | None = None
    error: str = ""


@dataclass(frozen=True)
class Load:
    """What is sent: planned requests (`arrival_s`, `input_tokens`, `output_tokens`), and how."""

    number: int
    requests: Sequence[Mapping[str, Any]]
    concurrency: int | None
    """Clients of a closed loop; None: each request is sent at its `arrival_s`."""
    seed: int
    shared_prefix: int = 0
    is_warm_up: bool = False
    nonce: str = ""
    """Chooses the prompts; empty: the seed does."""
    may_end: bool = False
    """Whether a load with arrival times ends once the server falls behind."""


def draw_prompt(load: Load, number: int, length: int, vocab_size: int) -> list[int]:
    """Return token ids of a prompt: the first `shared_prefix` are those of every prompt, the others of this one."""
    own = random.Random(f"{load.seed} {load.number} {load.is_warm_up} {number}{load.nonce}")
    prefix = min(load.shared_prefix, length - 1)
    first = _draw_prefix(load.seed, load.shared_prefix, vocab_size)[:prefix]
    if load.nonce:  # it is drawn within the window, so fast
        return first + [token % vocab_size for token in array("I", own.randbytes(4 * (length - prefix)))]
    return first + [own.randrange(vocab_size) for _ in range(length - prefix)]


@functools.cache
def _draw_prefix(seed: int, length: int, vocab_size: int) -> list[int]:
    shared = random.Random(f"{seed}")
    return [shared.randrange(vocab_size) for _ in range(length)]


def run_load(target: Target, load: Load) -> tuple[list[Record], float]:
    """Send a load and wait for every answer; returns the records and the seconds by the kernel's monotonic clock."""
    return asyncio.run(_run(target, load))


def make_body(target: Target, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return what a request asks for: greedy answers of exactly so many tokens, streamed."""
    if target.api == SGLANG:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    return {
        "model": target.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip


async def _run(target: Target, load: Load) -> tuple[list[Record], float]:
    bodies = []
    for number, request in enumerate(load.requests):
        prompt = draw_prompt(load, number, request["input_tokens"], target.vocab_size)
        bodies.append(json.dumps(make_body(target, prompt, request["output_tokens"])).encode())
    waiting = iter(range(len(bodies)))
    records: list[Record] = []
    start_s, window_start_s = time.perf_counter(), time.clock_gettime(time.CLOCK_MONOTONIC)

    def now_s() -> float:
        return time.perf_counter() - start_s

    async def answer(number: int, arrival_s: float) -> None:
        record = Record(load.number, number, load.is_warm_up, arrival_s)
        record.input_tokens = load.requests[number]["input_tokens"]
        records.append(record)
        record.sent_s = max(arrival_s, now_s())
        try:
            async with asyncio.timeout(target.timeout_s):
                await _stream(target, bodies[number], record, now_s)
        except TimeoutError:  # before its base class, OSError
            record.error = f"no whole answer after {target.timeout_s:g} s"
        except (OSError, BadAnswer, ValueError, KeyError, asyncio.IncompleteReadError) as error:
            record.error = f"{type(error).__name__}: {error}"[:300]
        record.end_s = now_s() if record.error or not record.token_times_s else record.token_times_s[-1]

    async def client() -> None:
        for number in waiting:
            await answer(number, now_s())

    async def send_at(number: int) -> None:
        arrival_s = load.requests[number]["arrival_s"]
        await asyncio.sleep(max(0.0, arrival_s - now_s()))
        await answer(number, arrival_s)

    if load.concurrency is not None:
        await asyncio.gather(*(client() for _ in range(load.concurrency)))
    else:
        sent = [asyncio.ensure_future(send_at(number)) for number in range(len(bodies))]
        while (await asyncio.wait(sent, timeout=1.0))[1]:
            if load.may_end and falls_behind(records, load.requests, now_s()):
                _end(sent, records, now_s())
        await asyncio.gather(*(task for task in sent if not task.cancelled()))
    return records, time.clock_gettime(time.CLOCK_MONOTONIC) - window_start_s


def _end(sent: Sequence[asyncio.Future[None]], records: Sequence[Record], now: float) -> None:
    for task in sent:
        task.cancel()
    for record in records:
        if not record.end_s:
            record.error, record.end_s = UNANSWERED, now


def falls_behind(records: Sequence[Record], planned: Sequence[Mapping[str, Any]], now: float) -> bool:
    """Return whether the number of requests at the server has grown beyond doubt over the second half of the time."""
    ended = sorted((r for r in records if r.end_s), key=lambda r: r.end_s)
    if len(ended) < 10 or now > planned[-1]["arrival_s"]:
        return False
    lifetime = sorted(r.end_s - r.arrival_s for r in ended[:10])[5]  # of the first: the server was nearly empty
    if now / 2 < max(BEHIND_S, BEHIND_LIFETIMES * lifetime):
        return False
    arrived = sum(r.arrival_s > now / 2 for r in records)
    before = sum(r.arrival_s <= now / 2 and (not r.end_s or r.end_s > now / 2) for r in records)
    grown = sum(not r.end_s for r in records) - before
    gaps = [b["arrival_s"] - a["arrival_s"] for a, b in itertools.pairwise(planned)]
    mean = sum(gaps) / len(gaps)
    spread = max(1.0, (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean)
    return grown > max(BEHIND_SHARE * arrived, 10 + 4 * spread * arrived**0.5)


async def _stream(target: Target, body: bytes, record: Record, now_s: Callable[[], float]) -> None:
    """Send one request and note when each token arrives."""
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=MOST_LINE_BYTES)
    try:
        path = "/generate" if target.api == SGLANG else "/v1/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        status = (await reader.readline()).decode("latin-1").split(" ", 2)
        while (await reader.readline()).strip():
            pass
        if len(status) < 2 or status[1] != "200":
            text = (await reader.read(500)).decode("utf-8", "replace").strip()
            code = status[1] if len(status) > 1 else "no status"
            raise BadAnswer(f"HTTP {code}: {text}")
        await _read_events(reader, record, now_s)
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, record: Record, now_s: Callable[[], float]) -> None:
    """Read `data:` lines until `[DONE]`; the lines between, such as sizes of HTTP chunks, are skipped."""
    counted = None
    answer: list[int] = []
    while line := await reader.readline():
        if not line.startswith(b"data:"):
            continue
        text = line[5:].strip()
        if text == b"[DONE]":
            break
        event = json.loads(text)
        if "error" in event:
            raise BadAnswer(str(event["error"])[:300])
        meta = event.get("meta_info") or {}
        if isinstance(reason := meta.get("finish_reason"), dict) and reason.get("type") == "abort":  # of SGLang
            raise BadAnswer(f"aborted: {reason.get('message')}"[:300])
        if (usage := event.get("usage")) is not None:
            counted = int(usage["completion_tokens"])
        if "output_ids" in event:  # of SGLang: the tokens of this event
            counted = int(meta["completion_tokens"])
        for choice in event.get("choices", [event] if "output_ids" in event else ()):
            ids = choice.get("token_ids", choice.get("output_ids"))
            number = 1 if ids is None else len(ids)
            record.token_times_s += [now_s()] * number
            answer += ids or []
    else:
        raise BadAnswer("the answer broke off")
    record.output_tokens = len(record.token_times_s) if counted is None else counted
    if record.output_tokens != len(record.token_times_s):  # a chunk may have several tokens: only the ends are known
        ends = (record.token_times_s[:1] + record.token_times_s[-1:])[: record.output_tokens]
        record.token_times_s = ends
    if answer and len(answer) == record.output_tokens:  # the server returns ids, and has returned those of all tokens
        record.first_token_id = int(answer[0])
        record.token_ids_sha256 = hashlib.sha256(" ".join(str(int(token)) for token in answer).encode()).hexdigest()


def summarize_load(records: Sequence[Record], num_accelerators: int = 1) -> dict[str, float]:
    """Return metrics of a load by name, to decide which load comes next: means and percentiles of each latency."""
    records = [record for record in records if not record.error]
    window_s = max(r.end_s for r in records) - min(r.arrival_s for r in records)
    tokens = sum(r.output_tokens for r in records)
    latencies = {
        "ttft": [r.token_times_s[0] - r.arrival_s for r in records],
        "e2e": [r.end_s - r.arrival_s for r in records],
        "tpot": [
            (r.token_times_s[-1] - r.token_times_s[0]) / (r.output_tokens - 1) for r in records if r.output_tokens > 1
        ],
        "itl": [
            later - earlier
            for r in records
            if len(r.token_times_s) == r.output_tokens
            for earlier, later in itertools.pairwise(r.token_times_s)
        ],
    }
    found = {
        "requests_per_s": len(records) / window_s,
        "output_tokens_per_s": tokens / window_s,
        "output_tokens_per_s_per_accelerator": tokens / window_s / num_accelerators,
        "total_tokens_per_s": (tokens + sum(r.input_tokens for r in records)) / window_s,
    }
    for name, values in latencies.items():
        if values:
            found[f"{name}_mean_s"] = sum(values) / len(values)
            found |= {f"{name}_p{share}_s": find_percentile(values, share) for share in (50, 90, 99)}
    if found.get("tpot_mean_s"):
        found["output_tokens_per_s_per_user"] = 1 / found["tpot_mean_s"]
    return found


def find_percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile, interpolated linearly between the two nearest values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def keeps_limits(metrics: Mapping[str, float], limits: Mapping[str, Sequence[float | None]]) -> bool:
    """Return whether every limit on a known metric is kept; a limit is the least and the greatest value."""
    return all(
        (least is None or metrics[name] >= least) and (most is None or metrics[name] <= most)
        for name, (least, most) in limits.items()
        if name in metrics
    )


def search_concurrency(most: int, keeps: Callable[[int], bool]) -> int:
    """Return the largest concurrency from 1 to `most` that keeps the limits, to within an eighth; 0 if none does.

    `keeps` measures one load. It is asked for `most` first, then between the largest kept and the least broken one.
    """
    if keeps(most):
        return most
    kept, broken = 0, most
    while broken - kept > max(1, kept // 8):
        middle = max(kept + 1, min(broken - 1, round((max(kept, 1) * broken) ** 0.5)))
        if keeps(middle):
            kept = middle
        else:
            broken = middle
    return kept
