"""The scheduler of the small CPU server: which sequences a step computes, and the blocks of the KV cache they hold."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cpu_serving_model import Chunk, PagedModel


@dataclass(eq=False)
class Answer:
    """One request: its prompt and tokens so far, and the blocks that hold their keys and values."""

    sequence: list[int]
    left: int
    """Tokens that are still to be produced."""
    tokens: asyncio.Queue[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    arrived_s: float = field(default_factory=time.monotonic)
    is_new: bool = True
    """Whether no step has computed a part of it yet."""


class Blocks:
    """The free and cached blocks. With prefix caching, a full block stays findable by the tokens up to its end."""

    def __init__(self, number: int, size: int, *, is_cached: bool) -> None:
        self.number, self.size, self.is_cached = number, size, is_cached
        self.free = list(range(number))
        self.users = [0] * number
        self.by_prefix: dict[tuple[int, ...], int] = {}
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that no sequence uses, but whose content may be used again, least recent first."""

    @property
    def share_used(self) -> float:
        return 1 - (len(self.free) + len(self.idle)) / self.number

    def take(self) -> int | None:
        """Return a block for new content; None if all are in use."""
        if self.free:
            block = self.free.pop()
        elif self.idle:
            block, _ = self.idle.popitem(last=False)
            self.by_prefix.pop(self.prefix_of.pop(block), None)
        else:
            return None
        self.users[block] = 1
        return block

    def find(self, prefix: tuple[int, ...]) -> int | None:
        """Return the block with the end of that prefix, now in use once more; None if there is none."""
        block = self.by_prefix.get(prefix)
        if block is not None:
            self.users[block] += 1
            self.idle.pop(block, None)
        return block

    def remember(self, block: int, prefix: tuple[int, ...]) -> None:
        if self.is_cached and prefix not in self.by_prefix:
            self.by_prefix[prefix], self.prefix_of[block] = block, prefix

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                if block in self.prefix_of:
                    self.idle[block] = None
                else:
                    self.free.append(block)


@dataclass
class Seen:
    """Sums over requests and steps."""

    requests: int = 0
    """Requests of which a step computed the first part."""
    queue_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of these prompts that were in the cache of prefixes."""
    steps: int = 0
    tokens: int = 0

    def add(self, answer: Answer) -> None:
        """Count a request that starts now."""
        self.requests += 1
        self.queue_s += time.monotonic() - answer.arrived_s
        self.prompt_tokens += len(answer.sequence)
        self.cached_tokens += answer.computed

    def summarize(self, *, has_prefixes: bool) -> dict[str, float]:
        """Return the means by the names of the metrics; none of what was not seen."""
        found = {"tokens_per_step": self.tokens / self.steps} if self.steps else {}
        if self.requests:
            found |= {"queue_mean_s": self.queue_s / self.requests}
        if self.requests and has_prefixes:
            found |= {"prefix_cache_hit_rate": self.cached_tokens / self.prompt_tokens}
        return found


class Scheduler:
    """Continuous batching: each step computes some tokens of some sequences, at most `max_num_batched_tokens`."""

    def __init__(self, model: PagedModel, options: Mapping[str, Any]) -> None:
        self.model = model
        self.most_running, self.most_tokens = options["max_num_seqs"], options["max_num_batched_tokens"]
        self.is_chunked, self.reserves = options["chunked_prefill"], options.get("reserve_kv_cache", False)
        self.blocks = Blocks(model.num_blocks, options["block_size"], is_cached=options["prefix_caching"])
        self.waiting: list[Answer] = []
        self.running: list[Answer] = []
        self.preemptions, self.use_peak, self.seen = 0, 0.0, Seen()

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def read_stats(self) -> dict[str, float]:
        """Return what happened since the last call, by the names of the metrics."""
        found = {"preemptions": float(self.preemptions), "kv_cache_use_peak": self.use_peak}
        found |= self.seen.summarize(has_prefixes=self.blocks.is_cached)
        self.preemptions, self.use_peak, self.seen = 0, self.blocks.share_used, Seen()
        return found

    def step(self) -> list[tuple[Answer, int]]:
        """Compute one step; returns the tokens that it produced."""
        chunks = self._plan()
        self.use_peak = max(self.use_peak, self.blocks.share_used)
        self.seen.steps += 1
        self.seen.tokens += sum(len(chunk.tokens) for chunk in chunks)
        tokens = self.model.forward(chunks)
        produced = []
        for chunk, token in zip(chunks, tokens, strict=True):
            answer: Answer = chunk.owner
            answer.computed = chunk.start + len(chunk.tokens)
            self._remember(answer, chunk.start)
            if answer.computed == len(answer.sequence):
                answer.sequence.append(token)
                answer.left -= 1
                produced.append((answer, token))
                if answer.left == 0:
                    self.running.remove(answer)
                    self.blocks.release(answer.blocks)
        return produced

    def _plan(self) -> list[Chunk]:
        """Return the chunks of a step: decodes and, after them or (unless chunked) in place of them, prefills."""
        if not self.is_chunked:
            chunks = self._admit(self.most_tokens)
            if chunks:
                return chunks
        chunks, budget = [], self.most_tokens
        for answer in list(self.running):
            if budget == 0 or answer not in self.running:
                continue
            length = min(len(answer.sequence) - answer.computed, budget)
            if self._hold(answer, answer.computed + length, chunks):
                chunks.append(self._cut(answer, length))
                budget -= length
        chunks = [chunk for chunk in chunks if chunk.owner in self.running]
        return chunks + self._admit(budget) if self.is_chunked else chunks

    def _admit(self, budget: int) -> list[Chunk]:
        """Start waiting sequences, in order, while seats, tokens and blocks last."""
        chunks: list[Chunk] = []
        while self.waiting and len(self.running) < self.most_running and budget > 0:
            answer = self.waiting[0]
            self._find_prefix(answer)
            length = len(answer.sequence) - answer.computed
            if self.is_chunked:
                length = min(length, budget)
            fits = length <= budget or not (chunks or self.is_chunked)  # a long prompt has a step of its own
            wanted = len(answer.sequence) + answer.left if self.reserves else answer.computed + length
            if not fits or not self._grow(answer, wanted):
                self.blocks.release(answer.blocks)
                answer.blocks, answer.computed = [], 0
                break
            self.waiting.pop(0)
            self.running.append(answer)
            if answer.is_new:
                answer.is_new = False
                self.seen.add(answer)
            chunks.append(self._cut(answer, length))
            budget -= length
        return chunks

    def _find_prefix(self, answer: Answer) -> None:
        """Use cached blocks of the sequence's first tokens; the last token is computed always."""
        size = self.blocks.size
        while self.blocks.is_cached and answer.computed + size < len(answer.sequence):
            block = self.blocks.find(tuple(answer.sequence[: answer.computed + size]))
            if block is None:
                return
            answer.blocks.append(block)
            answer.computed += size

    def _grow(self, answer: Answer, length: int) -> bool:
        """Take blocks for so many tokens; returns whether there were enough."""
        while len(answer.blocks) * self.blocks.size < length:
            block = self.blocks.take()
            if block is None:
                return False
            answer.blocks.append(block)
        return True

    def _hold(self, answer: Answer, length: int, chunks: list[Chunk]) -> bool:
        """As `_grow`, preempting the sequences that came last until there are enough."""
        while not self._grow(answer, length):
            last = self.running[-1]
            self.running.pop()
            self.blocks.release(last.blocks)
            last.blocks, last.computed = [], 0
            self.waiting.insert(0, last)
            self.preemptions += 1
            if last is answer:
                return False
        return True

    def _cut(self, answer: Answer, length: int) -> Chunk:
        start = answer.computed
        return Chunk(answer, answer.sequence[start : start + length], start, answer.blocks)

    def _remember(self, answer: Answer, start: int) -> None:
        size = self.blocks.size
        for number in range(start // size, answer.computed // size):
            self.blocks.remember(answer.blocks[number], tuple(answer.sequence[: (number + 1) * size]))
