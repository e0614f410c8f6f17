"""Simulated models that decide from the request alone: the prompt, its tools and their results.

Each is a `Provider`, which an agent can use in-process, or `tests.llm.server` behind a protocol.
"""

from __future__ import annotations

import math
import random
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    Role,
    StopReason,
    ToolCall,
    Usage,
)

PARTS = ("gemm", "tensor parallel", "point to point", "launch and latency", "pipeline bubble", "data parallel", "all")
"""Parts of the step that false corrections name."""
MEMORY = ("memory:activations", "memory:optimizer", "memory:all")
FACTORS = (0.5, 0.7, 1.4, 2.0)

PROMPT = "trials seen; budget left"
"""Words of each turn's prompt."""

Row = dict[str, Any]
"""A candidate or a trial: its configuration under `config`, and its numbers."""


class Player(ABC):
    """Looks candidates up, then decides; subclasses define which."""

    name = "compatible:player"

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.num_turns = 0

    def ask(self, request: CompletionRequest) -> Answer:
        """See `Provider`."""
        request = own_turn(request)
        if len(request.messages) == 1:
            self.num_turns += 1
        name, arguments = self.decide(request)
        call = ToolCall(id=f"call_{len(request.messages)}", name=name, arguments=arguments)
        return Answer(
            calls=(call,), stop=StopReason.TOOL, usage=Usage(input_tokens=request.num_bytes // 3, output_tokens=50)
        )

    def find_lessons(self, request: CompletionRequest) -> dict[str, Any]:
        """Corrections and doubts that it sends with a request to correct."""
        return {}

    @abstractmethod
    def decide(self, request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        """The call that answers this request: a tool's name and its arguments."""


class Stubborn(Player):
    """Proposes the same configuration in every answer."""

    name = "compatible:stubborn"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.first_choice: Row | None = None

    def decide(self, request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        if self.first_choice is None:
            self.first_choice = prompt_candidates(request)[0]
        return submit(self.first_choice, "as I said")


class RandomPicker(Player):
    """Takes a uniformly random configuration: any of the raw combinations, then any of a random listing."""

    name = "compatible:random"

    def find_lessons(self, request: CompletionRequest) -> dict[str, Any]:
        values = [f"{k}={str(value).lower()}" for k, of in knob_choices(request).items() for value in of]
        guesses = [{"part": part, "factor": self.rng.choice(FACTORS)} for part in [*PARTS, *values]]
        return {"corrections": self.rng.sample(guesses, len(guesses) // 2), "doubts": [self.rng.randrange(1, 16)]}

    def decide(self, request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        found = listed(request)
        if found:
            row = self.rng.choice(found)
            values = [f"{knob}={str(value).lower()}" for knob, value in row["config"].items()]
            guess = {self.rng.choice([*PARTS, *MEMORY, *values]): self.rng.choice(FACTORS) for _ in range(2)}
            return submit(row, "a guess", guess, doubts=[self.rng.randrange(1, 16)])
        choices = knob_choices(request)
        if may_correct(request) and self.rng.random() < 0.5:
            guess = {"part": self.rng.choice([*PARTS, *MEMORY]), "factor": self.rng.choice(FACTORS)}
            return "correct", {"why": "a guess", "corrections": [guess]}
        knob = self.rng.choice(sorted(choices))
        where = {knob: [self.rng.choice(choices[knob])]}
        sort = self.rng.choice(["promise", "time", "memory", "fits"])
        return "candidates", {"where": where, "sort": sort, "limit": 20}


class Hostile(Player):
    """Submits the surrogate's worst candidates, praises their values, says that all costs more than it does, that
    nothing needs memory, and doubts every trial."""

    name = "compatible:hostile"
    lies = {"pipeline bubble": 0.01, "tensor parallel": 0.01, "memory:all": 0.3, "gemm": 10.0}

    def decide(self, request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        num_asked = (len(request.messages) - 1) // 2
        choices = knob_choices(request)
        if may_correct(request):
            return "correct", {"why": "trust me", "corrections": as_items(self.lies)}
        ideas = [(knob, value) for knob in sorted(choices) for value in (choices[knob][-1], choices[knob][0])]
        if num_asked < min(6, len(ideas)):
            knob, value = ideas[num_asked]
            return "candidates", {"where": {knob: [value]}, "sort": "memory" if num_asked % 2 else "time", "limit": 20}
        seen = [row for text in results(request) for row in read_candidates(text)]
        refused = {
            str(call.arguments) for message in request.messages for call in message.calls if call.name == "submit"
        }
        for row in sorted(seen, key=lambda row: (row["fits"] > 0.05, -row["time"])):
            name, arguments = self.praise(row)
            if str(arguments) not in refused:
                return name, arguments
        return self.praise(self.rng.choice(seen or prompt_candidates(request)))

    def find_lessons(self, request: CompletionRequest) -> dict[str, Any]:
        """That every value but those of the best trial costs twice as much, and that other trials are outliers."""
        trials = read_trials(request.messages[0].text)
        best = min(trials, key=lambda row: row["loss"], default=None)
        own = best["config"] if best else {}
        lies = [
            {"part": f"{knob}={str(value).lower()}", "factor": 2.0}
            for knob, values in knob_choices(request).items()
            for value in values
            if value != own.get(knob)
        ]
        return {"corrections": lies, "doubts": [row["trial"] for row in trials if row is not best]}

    def praise(self, row: Row) -> tuple[str, dict[str, Any]]:
        """The call that submits a row with false corrections, of its knobs' values."""
        values = {f"{knob}={str(value).lower()}": 0.1 for knob, value in row["config"].items()}
        return submit(row, "trust me", values, doubts=list(range(1, 16)))


class Expert(Player):
    """Decides by rules of thumb. If the surrogate has predicted well, it takes its first choice, but in every third
    trial less model parallelism than the best, even if memory is doubtful. If not, it takes the least model
    parallelism that probably fits, with tensor parallelism inside the node."""

    name = "compatible:expert"
    max_error = 0.25

    def decide(self, request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        text = request.messages[0].text
        trials = read_trials(text)
        found = listed(request)
        if not found:
            return "candidates", {"where": {}, "sort": "promise", "limit": 20}
        best = min(trials, key=lambda row: row["loss"], default=None)
        was_refused = any(call.name == "submit" for message in request.messages for call in message.calls)
        if best and read_error(text) > self.max_error and not was_refused:
            row = self.least_parallel(found, read_node_size(text))
            if row:
                return submit(row, "the surrogate errs here; the least model parallelism inside the node is often best")
        if best and len(trials) >= 6 and len(trials) % 3 == 0:
            row = self.less_parallel(found, best)
            if row:
                return submit(row, "the least model parallelism that may fit is often the fastest")
        return submit(found[0], "the surrogate's first choice, which no rule of thumb contradicts")

    def least_parallel(self, rows: list[Row], node_size: int) -> Row | None:
        """The row with the least model parallelism among those that probably fit; None if none fits."""
        could = [row for row in rows if row["fits"] >= 0.5 and int(row["config"].get("tp", 1)) <= node_size]
        return min(could, key=lambda row: (split(row), row["time"]), default=None)

    def less_parallel(self, rows: list[Row], best: Row) -> Row | None:
        """The best row with less model parallelism than the best trial that could beat it; None if none could."""
        could = [
            row
            for row in rows
            if split(row) < split(best)
            and row["low"] < best["loss"]
            and row["fits"] >= 0.05
            and not row["config"].get("activation_checkpointing", False)
        ]
        return min(
            could, key=lambda row: (split(row), row["config"].get("micro_batch_size", 1), row["time"]), default=None
        )


class Oracle(Player):
    """Better than the surrogate: it knows the true value of every configuration, except for an error of about 10 %.

    It submits the best untried one; if that needs credit that it has not, the best of the listed free ones.
    """

    name = "compatible:oracle"
    error = 0.1

    def __init__(self, seed: int = 0, truth: Mapping[str, tuple[Row, float | None]] | None = None) -> None:
        """`truth`: digest -> configuration and its measured loss, None if it fails."""
        super().__init__(seed)
        known = {digest: (row, value) for digest, (row, value) in (truth or {}).items() if value is not None}
        self.beliefs = [
            (value * math.exp(self.rng.gauss(0.0, self.error)), row) for row, value in (known[d] for d in sorted(known))
        ]

    def decide(self, request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        found = listed(request)
        if not found:
            return "candidates", {"where": {}, "sort": "promise", "limit": 20}
        text = request.messages[0].text
        tried = [row["config"] for row in (*read_trials(text), *read_failed(text))]
        calls = [call for message in request.messages for call in message.calls if call.name == "submit"]
        free = [row["config"] for row in found if row["free"]]
        open_ideas = [(value, config) for value, config in self.beliefs if config not in tried]
        if calls:
            open_ideas = [(value, config) for value, config in open_ideas if config in free]
        if not open_ideas:
            return submit(found[min(len(calls), len(found) - 1)], "nothing better is known")
        value, config = min(open_ideas, key=lambda idea: idea[0])
        row = next((row for row in found if row["config"] == config), {"config": config, "time": value})
        return submit(row, "an expert knows")


def read_error(text: str) -> float:
    """The surrogate's median error in its record; 0 if the record has none."""
    found = re.search(r"median error over the measured trials[^:]*: ([0-9.]+)%", text)
    return float(found[1]) / 100 if found else 0.0


def read_node_size(text: str) -> int:
    """Accelerators per node."""
    found = re.search(r"(\d+) per node", text)
    return int(found[1]) if found else 8


def split(row: Row) -> int:
    """Number of parts into which a row splits the model."""
    return int(row["config"].get("tp", 1)) * int(row["config"].get("pp", 1))


PLAYERS = {"expert": Expert, "random": RandomPicker, "stubborn": Stubborn, "hostile": Hostile, "oracle": Oracle}


def submit(
    row: Row, why: str, corrections: dict[str, float] | None = None, doubts: Sequence[int] = ()
) -> tuple[str, dict[str, Any]]:
    """The call that submits one row, with corrections and trials that are doubted."""
    expected = {"expected_step_time_s": row.get("time") or 1.0, "expected_memory_gib": row.get("memory") or 1.0}
    arguments: dict[str, Any] = {"configurations": [{"config": row["config"], "rationale": why, **expected}]}
    if corrections:
        arguments["corrections"] = as_items(corrections)
    if doubts:
        arguments["doubts"] = list(doubts)
    return "submit", arguments


def as_items(corrections: Mapping[str, float]) -> list[dict[str, Any]]:
    """Corrections as a call has them."""
    return [{"part": part, "factor": factor} for part, factor in corrections.items()]


def may_correct(request: CompletionRequest) -> bool:
    """Whether this turn may still correct the prediction."""
    has_tool = any(tool.name == "correct" for tool in request.tools)
    return has_tool and "no `correct` now" not in request.messages[0].text


def own_turn(request: CompletionRequest) -> CompletionRequest:
    """The request without earlier turns of the conversation: its first message is the turn's prompt."""
    messages = request.messages
    start = max((n for n, m in enumerate(messages) if m.role is Role.USER and PROMPT in m.text), default=0)
    first = messages[start].model_copy(update={"results": ()})
    return request.model_copy(update={"messages": (first, *messages[start + 1 :])})


def knob_choices(request: CompletionRequest) -> dict[str, list[Any]]:
    """Knobs with their choices, as the tools' schema offers them."""
    tool = next(tool for tool in request.tools if tool.name == "submit")
    config = tool.parameters["properties"]["configurations"]["items"]["properties"]["config"]
    return {name: list(schema["enum"]) for name, schema in config["properties"].items()}


def results(request: CompletionRequest) -> list[str]:
    """Results of the look-ups of this turn, oldest first."""
    return [result.text for message in request.messages for result in message.results]


def listed(request: CompletionRequest) -> list[Row]:
    """Candidates of the latest list in this turn."""
    for text in reversed(results(request)):
        rows = read_candidates(text)
        if rows:
            return rows
    return []


def prompt_candidates(request: CompletionRequest) -> list[Row]:
    """The surrogate's own candidates, as the prompt shows them."""
    text = request.messages[0].text
    start = text.find("SURROGATE: its best untried candidates")
    return read_candidates(text[start:].split("\n\n")[0]) if start >= 0 else []


def read_candidates(text: str) -> list[Row]:
    """Rows of a table of candidates."""
    rows: list[Row] = []
    knobs: list[str] = []
    columns: list[str] = []
    for line in text.splitlines():
        left, bar, right = line.partition(" | ")
        if not bar:
            continue
        if left.startswith("pred_step_s"):
            knobs, columns = right.split(), left.split()
        elif knobs and len(left.split()) == len(columns):
            cells = dict(zip(columns, left.split(), strict=True))
            config = dict(zip(knobs, map(read_word, shlex.split(right)), strict=True))
            rows.append(
                {
                    "config": config,
                    "time": float(cells["pred_step_s"]),
                    "low": float(cells["optimistic_s"]),
                    "memory": float(cells["pred_GiB"]),
                    "fits": float(cells["P(fits)"]),
                    "free": cells["free"] == "*",
                }
            )
    return rows


def read_trials(text: str) -> list[Row]:
    """Rows of the table of trials."""
    start = text.find("TRIALS, best first")
    rows: list[Row] = []
    knobs: list[str] = []
    columns: list[str] = []
    for line in text[start:].split("\n\n")[0].splitlines() if start >= 0 else []:
        left, bar, right = line.partition(" | ")
        if bar and left.startswith("trial "):
            knobs, columns = right.split(), left.split()
        elif bar and knobs and (cells := dict(zip(columns, left.split(), strict=True)))["loss"] != "-":
            words = shlex.split(re.sub(r"( \([^)]*\))+$", "", right))  # without notes, such as "(repeat)"
            config = dict(zip(knobs, map(read_word, words), strict=True))
            rows.append({"config": config, "loss": float(cells["loss"]), "trial": int(cells["trial"])})
    return rows


def read_failed(text: str) -> list[Row]:
    """Configurations of the table of failures."""
    knobs = next((line.partition(" | ")[2].split() for line in text.splitlines() if line.startswith("trial ")), [])
    start = text.find("FAILURES by kind")
    lines = text[start:].split("\n\n")[0].splitlines() if start >= 0 else []
    values = [line.partition(" | ")[2].partition(" (")[0] for line in lines if line.startswith("  trial ")]
    return [{"config": dict(zip(knobs, map(read_word, shlex.split(v)), strict=False))} for v in values]


def read_word(word: str) -> Any:
    """The value of a word in a table."""
    if word in {"true", "false"}:
        return word == "true"
    try:
        return int(word)
    except ValueError:
        return word


def differences(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Knobs in which two configurations differ."""
    return sum(other.get(knob) != value for knob, value in one.items())
