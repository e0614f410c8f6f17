"""What the tricks share that were written by somebody who did not know the rules of admission."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu
import step_window
from common import Trial

BEFORE: dict[str, Callable[[Trial], None]] = {}
"""Trick -> what the run script's first process does before it starts the ranks."""


def before(function: Callable[[Trial], None]) -> Callable[[Trial], None]:
    BEFORE[function.__name__.removeprefix("before_")] = function
    return function


def snapshot(t: Any) -> Any:
    """Return weights, optimizer states, step and number of losses of a trainer."""
    kept = [(b.values.clone(), copy.deepcopy(b.optimizer.state_dict())) for b in t.buffers]
    return kept, t.step, len(t.losses)


def restore(t: Any, kept: Any) -> None:
    buffers, step, number = kept
    for buffer, (values, state) in zip(t.buffers, buffers, strict=True):
        buffer.values.copy_(values)
        buffer.optimizer.load_state_dict(copy.deepcopy(state))
        buffer.grads.zero_()
    t.step = step
    del t.losses[number:]


def around_window(change: Callable[..., Any]) -> None:
    """Replace the timed window: `change(trainer, run)`; `run(step=None)` runs the real window with that step."""
    base = step_window.time_steps

    def timed(trial: Trial, run_step: Callable[[], None], find_slowest: Any) -> Any:
        return change(run_step.__self__, lambda step=None: base(trial, step or run_step, find_slowest))

    cpu.time_steps = timed


def cheat_then_redo(begin: Callable[[Any], Callable[[], None]], *, while_profiling: bool = False) -> None:
    """Cheat in the timed window, then train its steps again, honestly: losses and weights are those of that.

    `begin(trainer)` turns the cheat on and returns what turns it off.
    """
    later: list[Callable[[], None]] = []

    def change(t: Any, run: Callable[..., Any]) -> Any:
        kept, end = snapshot(t), begin(t)
        found = run()
        end()

        def redo() -> None:
            restore(t, kept)
            for _ in found["step_times_s"]:
                t.run_step()

        later.append(redo)
        if not while_profiling:
            later.pop()()
        return found

    around_window(change)
    if while_profiling:
        profile = cpu._profile

        def redo_and_profile(trial: Trial, t: Any, rank: int) -> None:
            cpu.say_phase(trial, rank, "profiling")
            later.pop()()
            profile(trial, t, rank)

        cpu._profile = redo_and_profile


def fewer_micro_batches(t: Any, keep: int) -> Callable[[], None]:
    """From now on train only the first `keep` micro-batches of a step; returns what ends that."""
    draw, whole = t._draw_tokens, t.accumulation

    def draw_some() -> Any:
        t.accumulation = whole
        tokens = draw()[:keep]
        t.accumulation = keep
        return tokens

    t._draw_tokens, t.accumulation = draw_some, keep

    def end() -> None:
        del t._draw_tokens
        t.accumulation = whole

    return end


def leave_behind(work: Callable[[], None], life_s: int = 30) -> None:
    """Run something in a daemon that outlives the trial, for at most so many seconds."""
    import signal

    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.alarm(life_s)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(3, 4096)
    try:
        work()
    finally:
        os._exit(0)


def await_read(path: Path) -> None:
    """Return when another process has opened the file, read it and closed it (inotify)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init()
    libc.inotify_add_watch(watch, str(path).encode(), 0x10)  # IN_CLOSE_NOWRITE
    os.read(watch, 4096)


def await_file(path: Path, limit_s: float = 120.0) -> None:
    end_s = time.monotonic() + limit_s
    while not path.is_file() and time.monotonic() < end_s:
        time.sleep(0.05)


def own_number(trial: Trial, trials: Path) -> str:
    return trial.folder.relative_to(trials).parts[0]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
