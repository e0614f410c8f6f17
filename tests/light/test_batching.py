"""The simulated scheduler of many engines at once, against hand counts and a plain loop over one engine's steps."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paths import ROOT

from cclsearch.tasks.serving.simulation.batching import answer_all
from cclsearch.tasks.serving.simulation.step_times import Answered, Engines, Requests, StepMix

COST = {"step": 0.01, "prompt": 0.001, "pair": 1e-6, "sequence": 0.0005, "context": 2e-5}


def step_s(prompt: float, pairs: float, sequences: float, context: float) -> float:
    return (
        COST["step"]
        + COST["prompt"] * prompt
        + COST["pair"] * pairs
        + COST["sequence"] * sequences
        + COST["context"] * context
    )


@dataclass
class LinearTimes:
    """Stands in for `StepTimes`: a step costs a constant and so much for each token."""

    columns: Any
    """A dataclass of arrays."""

    @property
    def costs(self) -> Any:
        return SimpleNamespace(at=self.columns)

    def seconds(self, mix: StepMix) -> np.ndarray:
        return np.asarray(step_s(mix.prompt_tokens, mix.pairs, mix.sequences, mix.context))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Engine:
    """One engine of a test, and its load."""

    requests: tuple[tuple[float, int, int], ...]
    places: int = 8
    budget: int = 64
    blocks: int = 10_000
    block_size: int = 4
    clients: int = 0
    is_chunked: bool = True
    is_alone: bool = False
    cached: int = 0
    gain: float = 1.0
    checked: int = 1
    lag_s: float = 0.0
    restarts: bool = False


def run_together(engines: list[Engine]) -> Answered:
    """All engines by the simulation."""
    width = max(len(engine.requests) for engine in engines)

    def column(name: str, kind: Any = float) -> np.ndarray:
        return np.array([kind(getattr(engine, name)) for engine in engines])

    names = ("block_size", "cached", "gain", "checked", "is_chunked", "is_alone", "restarts")
    columns = {name: column(name) for name in names} | {"tokens": column("budget")}
    times = LinearTimes(make_dataclass("Columns", columns)(**columns))
    table = np.ones((len(engines), width, 3))
    for row, engine in enumerate(engines):
        table[row, : len(engine.requests)] = engine.requests
    return answer_all(
        Engines(
            times=times,  # type: ignore[arg-type]
            places=column("places", int),
            blocks=column("blocks"),
            is_tight=column("blocks") < 10_000,
            lag_s=column("lag_s"),
            clients=column("clients", int),
        ),
        Requests(
            arrival_s=table[..., 0],
            given=table[..., 1].astype(np.int64),
            asked=table[..., 2].astype(np.int64),
            count=np.array([len(engine.requests) for engine in engines]),
        ),
    )


@dataclass(eq=False)
class Sequence:
    number: int
    given: int
    asked: int
    arrival: float
    ready: float
    made: float = 0.0
    """Tokens of the answer; with speculation, in the mean."""
    computed: int = 0
    """Tokens of the prompt that are computed, in a prefill."""
    steps_left: int = 0
    spoken: float = 0.0
    """When its last token came."""
    is_decoding: bool = False


@dataclass
class Plain:
    """One engine, one step after the other: what the simulation must equal."""

    engine: Engine
    now: float = 0.0
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    start: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    arrival: dict[int, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    preemptions: int = 0
    steps: int = 0
    most_blocks: int = 0
    future: list[Sequence] = field(default_factory=list)

    def blocks_of(self, tokens: float) -> int:
        return math.ceil((tokens - self.engine.cached) / self.engine.block_size - 1e-9)

    def held(self, ahead: int = 0) -> int:
        shared = self.engine.cached // self.engine.block_size
        return shared + sum(
            self.blocks_of(s.given + s.made - ahead if s.is_decoding else s.computed) for s in self.running
        )

    def send(self, sequence: Sequence, when: float) -> None:
        sequence.arrival, sequence.ready = when, when + self.engine.lag_s
        self.arrival[sequence.number] = when
        self.future.append(sequence)

    def run(self) -> None:
        engine = self.engine
        unsent = [Sequence(n, given, asked, 0.0, 0.0) for n, (_, given, asked) in enumerate(engine.requests)]
        number = engine.clients or len(unsent)
        for sequence in unsent[:number]:
            self.send(sequence, 0.0 if engine.clients else engine.requests[sequence.number][0])
        unsent = unsent[number:]
        while self.future or self.waiting or self.running:
            self.collect()
            if not self.waiting and not self.running:
                self.now = min(s.ready for s in self.future)
                self.collect()
            for _ in self.step():
                if unsent:
                    self.send(unsent.pop(0), self.now)

    def collect(self) -> None:
        come = [s for s in self.future if s.ready <= self.now]
        self.future = [s for s in self.future if s.ready > self.now]
        self.waiting += come

    def preempt(self) -> bool:
        before = self.preemptions
        while any(s.is_decoding for s in self.running) and self.held() > self.engine.blocks and len(self.running) > 1:
            self.put_back()
        return self.preemptions > before

    def put_back(self) -> None:
        last = self.running.pop()
        last.made = round(last.made)
        last.is_decoding, last.computed = False, 0
        self.waiting.insert(0, last)
        self.preemptions += 1

    def step(self) -> list[Sequence]:
        """Compute a step; returns the answers that end with it."""
        engine = self.engine
        stopped = False if engine.is_alone else self.preempt()
        decoders = [s for s in self.running if s.is_decoding]
        budget = float(engine.budget - (0 if engine.is_alone else len(decoders) * engine.checked))
        chunks: list[tuple[Sequence, int]] = []
        for sequence in [s for s in self.running if not s.is_decoding]:
            taken = min(int(sequence.given + sequence.made) - sequence.computed, int(budget))
            need = self.blocks_of(sequence.computed + taken) - self.blocks_of(sequence.computed)
            if taken and need > engine.blocks - self.held(1 if engine.is_alone else 0) and len(self.running) > 1:
                self.put_back()
                stopped = True
                continue
            budget = self.add_chunk(sequence, budget, chunks)
        stopped = stopped and not engine.restarts
        if not stopped and not any(not s.is_decoding and s.computed < s.given + s.made for s in self.running):
            self.start_waiting(budget, chunks, len(decoders))
        if engine.is_alone and chunks:
            decoders = []
        elif engine.is_alone:
            self.preempt()
            decoders = [s for s in self.running if s.is_decoding]
        self.most_blocks = max(self.most_blocks, self.held(1 if engine.is_alone and chunks else 0))
        prompt = sum(taken for _, taken in chunks)
        pairs = sum(taken * (s.computed - taken + taken / 2) for s, taken in chunks)
        seconds = step_s(prompt, pairs, len(decoders), sum(s.given + s.made for s in decoders))
        self.now += seconds
        self.steps += 1
        for sequence in decoders:
            self.gaps += [self.now - sequence.spoken] + [0.0] * round(engine.gain - 1)
            sequence.spoken = self.now
        ended = []
        for sequence in decoders:
            sequence.made += engine.gain
            sequence.steps_left -= 1
            if sequence.steps_left == 0:
                ended.append(sequence)
        for sequence, _ in chunks:
            if sequence.computed == sequence.given + sequence.made:
                self.first.setdefault(sequence.number, self.now)
                sequence.made += 1
                if sequence.made > 1:
                    self.gaps.append(self.now - sequence.spoken)
                sequence.is_decoding, sequence.spoken = True, self.now
                sequence.steps_left = math.ceil((sequence.asked - sequence.made) / engine.gain - 1e-9)
                if sequence.made >= sequence.asked:
                    ended.append(sequence)
        for sequence in ended:
            self.end[sequence.number] = self.now
            self.running.remove(sequence)
        return ended

    def add_chunk(self, sequence: Sequence, budget: float, chunks: list[tuple[Sequence, int]]) -> float:
        left = int(sequence.given + sequence.made) - sequence.computed
        taken = min(left, int(budget)) if self.engine.is_chunked else left
        if taken > 0:
            sequence.computed += taken
            chunks.append((sequence, taken))
        return budget - taken

    def start_waiting(self, budget: float, chunks: list[tuple[Sequence, int]], decoders: int) -> None:
        engine = self.engine
        free = engine.blocks - self.held(1 if engine.is_alone else 0)
        while self.waiting and len(self.running) < engine.places and budget > 0:
            sequence = self.waiting[0]
            length = int(sequence.given + sequence.made)
            new = max(length - engine.cached, 1)
            fits = engine.is_chunked or new <= budget or (not chunks and (engine.is_alone or decoders == 0))
            need = self.blocks_of(length - new + (min(new, int(budget)) if engine.is_chunked else new))
            if not fits or (need > free and self.running):
                return
            free -= need
            self.waiting.pop(0)
            self.running.append(sequence)
            self.start.setdefault(sequence.number, self.now)
            sequence.computed = length - new
            budget = self.add_chunk(sequence, budget, chunks)
            if sequence.computed < length:
                return


def draw_engine(rng: np.random.Generator) -> Engine:
    """Any engine with any load."""
    count = int(rng.integers(1, 25))
    lengths = zip(rng.integers(9, 60, count).tolist(), rng.integers(1, 30, count).tolist(), strict=True)
    arrivals = np.cumsum(rng.exponential(float(rng.choice([0.01, 0.05, 0.4])), count))
    is_chunked = bool(rng.random() < 0.6)
    is_alone = bool(rng.random() < 0.4)
    speculates = bool(rng.random() < 0.25)
    clients = int(rng.integers(1, 9)) if rng.random() < 0.5 else 0
    arrivals = arrivals * (clients == 0)
    return Engine(
        requests=tuple((round(float(t), 6), given, asked) for t, (given, asked) in zip(arrivals, lengths, strict=True)),
        places=int(rng.integers(1, 10)),
        budget=int(rng.choice([40, 64, 128])) if is_chunked else 128,
        blocks=int(rng.choice([24, 32, 10_000])),
        block_size=4,
        clients=clients,
        is_chunked=is_chunked,
        is_alone=is_alone,
        cached=int(rng.choice([0, 8])),
        gain=1.0 if not speculates else 2.0,
        checked=1 if not speculates else 4,
        lag_s=float(rng.choice([0.0, 0.003])),
        restarts=not is_alone and bool(rng.random() < 0.5),
    )


@pytest.mark.parametrize("seed", range(6))
def test_engines_at_once_are_what_one_after_the_other_is(seed):
    rng = np.random.default_rng(seed)
    engines = [draw_engine(rng) for _ in range(40)]
    found = run_together(engines)
    preempted = 0
    for row, engine in enumerate(engines):
        plain = Plain(engine)
        plain.run()
        numbers = sorted(plain.end)
        assert numbers == list(range(len(engine.requests)))
        for name in ("arrival", "start", "first", "end"):
            values, expected = getattr(found, f"{name}_s")[row, numbers], getattr(plain, name)
            assert values == pytest.approx([expected[n] for n in numbers], abs=1e-9), (name, engine)
        assert found.preemptions[row] == plain.preemptions, engine
        assert found.steps[row] == plain.steps
        if engine.gain == 1:
            assert found.tokens_made[row, numbers].tolist() == [asked for _, _, asked in engine.requests]
        preempted += plain.preemptions
        if engine.blocks < 10_000:
            assert found.peak[row] == pytest.approx(plain.most_blocks / engine.blocks), engine
        at, values, counts = (np.concatenate(each) for each in zip(*found.gaps, strict=True))
        own = (at == row) & (counts > 0)
        assert counts[own].sum() == pytest.approx(len(plain.gaps))
        if plain.preemptions == 0 and engine.gain == 1:
            gaps = np.repeat(values[own], np.rint(counts[own]).astype(int))
            assert np.percentile(gaps, [10, 50, 99]) == pytest.approx(np.percentile(plain.gaps, [10, 50, 99]), rel=0.05)
            assert gaps.max() == pytest.approx(max(plain.gaps), rel=0.05)
    assert preempted > 0


def test_two_requests_take_the_steps_that_one_counts_by_hand():
    """64 tokens a step: the second prompt of 50 is cut to 14 beside the first, and then 36 beside one answer."""
    engine = Engine(requests=((0.0, 50, 3), (0.0, 50, 2)))
    found = run_together([engine])
    one = step_s(64, 50 * 25 + 14 * 7, 0, 0)
    two = one + step_s(36, 36 * (14 + 18), 1, 51)
    three = two + step_s(0, 0, 2, 52 + 51)
    assert found.first_s[0] == pytest.approx([one, two])
    assert found.end_s[0] == pytest.approx([three, three])


def test_a_request_that_comes_during_a_step_starts_with_the_next():
    engine = Engine(requests=((0.0, 10, 9), (0.03, 10, 1)))
    found = run_together([engine])
    first = step_s(10, 50, 0, 0)
    second = first + step_s(0, 0, 1, 11)
    assert first < 0.03 < second
    assert found.start_s[0, 1] == pytest.approx(second)


class CountedSteps:
    """Stands in for the small server's model: computes nothing, and keeps what a step would compute."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.chunks: list[Any] = []

    def forward(self, chunks: list[Any]) -> list[int]:
        self.chunks = chunks
        return [1] * len(chunks)


@pytest.mark.parametrize(
    ("blocks", "is_chunked", "budget"), [(200, True, 64), (30, True, 64), (24, True, 32), (40, False, 64)]
)
def test_the_small_servers_own_scheduler_does_the_same(blocks, is_chunked, budget, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "launchers"))
    scheduler = importlib.import_module("cpu_serving_scheduler")
    rng = np.random.default_rng(blocks)
    requests = tuple((0.0, int(given), int(asked)) for given, asked in rng.integers(8, 48, (40, 2)))
    options = {
        "max_num_seqs": 6, "max_num_batched_tokens": budget, "block_size": 4, "chunked_prefill": is_chunked,
        "prefix_caching": False,
        "reserve_kv_cache": False,
    }  # fmt: skip
    server = scheduler.Scheduler(CountedSteps(blocks), options)
    unsent, number_of, begun, end, now = list(range(40)), {}, set(), {}, 0.0

    def send() -> None:
        number = unsent.pop(0)
        answer = scheduler.Answer([number] * requests[number][1], requests[number][2], None)
        number_of[answer] = number
        server.waiting.append(answer)

    for _ in range(10):
        send()
    while not server.is_idle:
        produced = server.step()
        answers = [c for c in server.model.chunks if len(c.tokens) == 1 and c.owner in begun]
        prompts = [c for c in server.model.chunks if c not in answers]
        pairs = sum(len(c.tokens) * (c.start + len(c.tokens) / 2) for c in prompts)
        now += step_s(sum(len(c.tokens) for c in prompts), pairs, len(answers), sum(c.start + 1 for c in answers))
        for answer, _ in produced:
            begun.add(answer)
            if answer.left == 0:
                end[number_of[answer]] = now
                if unsent:
                    send()
    found = run_together(
        [Engine(requests=requests, places=6, budget=budget, blocks=blocks, clients=10, is_chunked=is_chunked,
                is_alone=not is_chunked, restarts=is_chunked)]
    )  # fmt: skip
    assert found.preemptions[0] == server.preemptions
    assert (server.preemptions > 0) == (blocks < 100)
    assert found.end_s[0] == pytest.approx([end[n] for n in range(40)], abs=0.02)
