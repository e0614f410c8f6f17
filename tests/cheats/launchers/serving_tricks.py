"""Tricks of serving: fewer tokens, other answers, kept answers, hidden servers, other clocks."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import cpu_serving
import serving_load
import serving_run
from common import Trial
from serving_tool import SERVER_TRICK, change, trick


def on_server(trial: Trial, name: str) -> None:
    """Let the server play this part (`serving_cheats_server.py`)."""
    (trial.folder / SERVER_TRICK).write_text(name)


def scale_times(record: Any, factor: float) -> Any:
    record.arrival_s, record.sent_s, record.end_s = (
        t * factor for t in (record.arrival_s, record.sent_s, record.end_s)
    )
    record.token_times_s = [t * factor for t in record.token_times_s]
    return record


def around_load(make: Any) -> None:
    """Replace `run_load(target, load)` of the measured loads by what `make` returns for it."""

    def choose(run: Any) -> Any:
        changed = make(run)
        return lambda target, load: run(target, load) if load.is_warm_up else changed(target, load)

    change(serving_run, "run_load", choose)


@trick
def times_halved(trial: Trial) -> None:
    """Every time of the log and the load's own clock are halved."""

    def make(run: Any) -> Any:
        def halved(target: Any, load: Any) -> Any:
            records, window_s = run(target, load)
            return [scale_times(record, 0.5) for record in records], window_s / 2

        return halved

    around_load(make)


@trick
def answers_kept_of_an_unlogged_pass(trial: Trial) -> None:
    """All prompts are answered once, unlogged, before the load; the server answers them from memory then."""
    on_server(trial, "memory")
    ask = serving_run.open_window

    def pass_first(asking: Trial, number: int = 1) -> str:
        data = asking.data
        load = serving_load.Load(number - 1, data["requests"], 8, data["seed"], data["shared_prefix_tokens"])
        serving_load.run_load(serving_load.Target(port[0], data["arch"]["vocab_size"]), load)
        return ask(asking, number)

    port: list[int] = []
    change(serving_run, "find_port", lambda find: lambda: port.append(find()) or port[0])
    serving_run.open_window = pass_first


@trick
def unlogged_pass_once_the_window_is_open(trial: Trial) -> None:
    """The same once the nonce is known, before the load is timed."""
    on_server(trial, "memory")

    def make(run: Any) -> Any:
        def twice(target: Any, load: Any) -> Any:
            run(target, load)
            return run(target, load)

        return twice

    around_load(make)


@trick
def unlogged_pass_without_a_nonce(trial: Trial) -> None:
    """The same, and the script never asks for a nonce."""
    unlogged_pass_once_the_window_is_open(trial)
    serving_run.open_window, serving_run.close_window = lambda *args: "", lambda *args: None


@trick
def generation_shortened(trial: Trial) -> None:
    """The server computes half of the tokens of each answer and repeats the last one."""
    on_server(trial, "short")


@trick
def half_of_each_prompt(trial: Trial) -> None:
    """The server reads the second half of each prompt only."""
    on_server(trial, "half_prompt")


@trick
def same_prompt_for_all(trial: Trial) -> None:
    """All measured requests of a load send one prompt of each length, and the server remembers answers."""
    on_server(trial, "memory")
    draw = serving_load.draw_prompt
    serving_load.draw_prompt = lambda load, number, *others: draw(load, number if load.is_warm_up else 0, *others)


@trick
def second_server_of_fewer_layers(trial: Trial) -> None:
    """A hidden second server with half of the layers answers the measured requests; the first one is described."""
    hidden: list[tuple[Any, int]] = []

    def start() -> int:
        if not hidden:
            port, options = serving_run.find_port(), trial.folder / "server.json"
            (trial.folder / "hidden").mkdir(exist_ok=True)
            path = trial.folder / "hidden" / "server.json"
            path.write_text(options.read_text())
            (trial.folder / "hidden" / SERVER_TRICK).write_text("half_layers")
            words = [sys.executable, str(cpu_serving.SERVER), str(path), str(port)]
            server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            hidden.append((server, port))
            while serving_run.Server(server, port, path).get("/health") is None:
                time.sleep(0.05)
        return hidden[0][1]

    def make(run: Any) -> Any:
        return lambda target, load: run(replace(target, port=hidden[0][1]), load)

    change(serving_run, "open_window", lambda ask: lambda *args: (start(), ask(*args))[1])
    around_load(make)
    change(
        serving_run,
        "write_result",
        lambda write: lambda *args, **fields: ([s.kill() for s, _ in hidden], write(*args, **fields)),
    )


@trick
def half_of_the_requests_sent(trial: Trial) -> None:
    """Every second request is not sent; it is logged with the times and the answer of the one before."""

    def make(run: Any) -> Any:
        def send_half(target: Any, load: Any) -> Any:
            records, window_s = run(target, replace(load, requests=load.requests[::2], concurrency=4))
            found = []
            for record in records:
                first = 2 * record.number
                for number in (first, first + 1):
                    asked = load.requests[number]
                    lengths = {"input_tokens": asked["input_tokens"], "output_tokens": asked["output_tokens"]}
                    times = (record.token_times_s[:1] + record.token_times_s[-1:])[: asked["output_tokens"]]
                    found.append(replace(record, number=number, token_times_s=times, **lengths))
            return found, window_s

        return send_half

    around_load(make)


@trick
def warm_up_left_out(trial: Trial) -> None:
    """No request warms up; measured ones are logged as warm-up too."""

    def make(run: Any) -> Any:
        def skip(target: Any, load: Any) -> Any:
            if not load.is_warm_up:
                return run(target, load)
            records, window_s = run(target, replace(load, requests=load.requests[:1], concurrency=1))
            return [replace(records[0], number=n) for n in range(len(load.requests))], window_s

        return skip

    change(serving_run, "run_load", make)
