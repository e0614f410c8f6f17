"""Blind tricks on the timed window: all of the work is done, but not inside it; or less, and it is done again."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cpu
import torch
import torch.distributed as dist
from common import Trial
from trick_tools import after, report, trick
from unseen_tools import (
    around_window,
    await_file,
    before,
    cheat_then_redo,
    fewer_micro_batches,
    read_json,
    restore,
    snapshot,
)


def cut_into_units(t: Any, steps: int) -> Any:
    """Train so many steps; yields after each micro-batch and after each update."""
    for _ in range(steps):
        tokens, loss, pending = t._draw_tokens(), 0.0, cpu.deque()
        for micro in range(t.accumulation):
            loss = loss + t._forward(tokens[micro], pending)
            t._backward(pending)
            yield
        t._update()
        t.losses.append(loss)
        t.step += 1
        yield


@trick
def work_spread_over_the_edges(trial: Trial) -> None:
    """One of five timed steps' work is done before and after the window, the rest spread evenly over five times."""

    def change(t: Any, run: Any) -> Any:
        steps, per_step = trial.data["timed_steps"], t.accumulation + 1
        units = cut_into_units(t, steps)
        ahead = per_step - per_step // 2
        for _ in range(ahead):
            next(units)
        dist.barrier()
        left, calls = (steps - 1) * per_step, iter(range(steps))

        def step() -> None:
            n = next(calls)
            for _ in range(left * (n + 1) // steps - left * n // steps):
                next(units)

        found = run(step)
        for _ in units:
            pass
        return found

    around_window(change)


@trick
def half_a_step_ahead(trial: Trial) -> None:
    """The first half of the first timed step is trained in the warm-up: each time covers two halves, the last one."""

    def change(t: Any, run: Any) -> Any:
        steps, per_step = trial.data["timed_steps"], t.accumulation + 1
        units, done = cut_into_units(t, steps), 0
        for _ in range(per_step // 2):
            next(units)
            done += 1
        dist.barrier()

        def step() -> None:
            nonlocal done
            for _ in range(min(per_step, steps * per_step - done)):
                next(units)
                done += 1

        found = run(step)
        for _ in units:
            pass
        return found

    around_window(change)


@trick
def best_of_three_windows(trial: Trial) -> None:
    """The timed window is run three times from the same weights, and the fastest is reported."""

    def change(t: Any, run: Any) -> Any:
        kept, best, least = snapshot(t), None, float("inf")
        for n in range(3):
            if n:
                restore(t, kept)
            dist.barrier()
            found = run()
            total_s = sum(cpu.find_slowest(found["step_times_s"]))
            if total_s < least:
                best, least = found, total_s
        return best

    around_window(change)


@trick
def data_drawn_before(trial: Trial) -> None:
    """The tokens of the timed steps are drawn before the window."""
    draw, drawn = cpu.draw_sequences, {}
    cpu.draw_sequences = lambda data, step: drawn.pop(step) if step in drawn else draw(data, step)

    def change(t: Any, run: Any) -> Any:
        drawn.update({t.step + n: draw(trial.data, t.step + n) for n in range(trial.data["timed_steps"])})
        dist.barrier()
        return run()

    around_window(change)


@trick
def trained_again_afterwards(trial: Trial) -> None:
    """Three quarters of the micro-batches while timed; afterwards the timed steps are trained again as a whole."""
    cheat_then_redo(lambda t: fewer_micro_batches(t, max(1, 3 * t.accumulation // 4)))


@before
def before_rank_1_idle_while_timed(trial: Trial) -> None:
    os.environ["OMP_WAIT_POLICY"] = "passive"  # two threads on a busy machine


@trick
def rank_1_idle_while_timed(trial: Trial) -> None:
    """Only rank 0 computes while timed, with two threads; rank 1 sends zeros. Trained again afterwards."""

    def begin(t: Any) -> Any:
        if t.layout.rank == 0:
            number, cores = torch.get_num_threads(), os.sched_getaffinity(0)
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            torch.set_num_threads(2)

            def end() -> None:
                torch.set_num_threads(number)
                os.sched_setaffinity(0, cores)

            return end
        t._forward, t._backward = lambda tokens, pending: 0.0, lambda pending: None

        def end_idle() -> None:
            del t._forward, t._backward

        return end_idle

    cheat_then_redo(begin)


@trick
def one_forward_many_backwards(trial: Trial) -> None:
    """While timed, the activations of the first micro-batch serve the backward passes of all. Trained again after."""

    def begin(t: Any) -> Any:
        forward, kept = t._forward, {}

        def forward_once(tokens: Any, pending: Any) -> Any:
            if kept.get("step") != t.step:
                out = forward(tokens, pending)
                kept.update(step=t.step, pair=pending[-1], out=out)
                return out
            pending.append(kept["pair"])
            return kept["out"]

        def backward(pending: Any) -> None:
            with cpu.record_function("backward"):
                pending.popleft()[1].backward(retain_graph=True)

        t._forward, t._backward = forward_once, backward

        def end() -> None:
            del t._forward, t._backward

        return end

    cheat_then_redo(begin)


@trick
def layers_frozen_while_timed(trial: Trial) -> None:
    """No gradients of the first two layers while timed; the steps are trained again in the phase of profiling."""
    state = {"on": False}

    def mark(_: None, stage: Any, *args: Any, **kwargs: Any) -> None:
        for layer in stage.layers[:2]:
            after(layer, "forward", lambda hidden, *inputs: hidden.detach() if state["on"] else None)

    after(cpu.Stage, "__init__", mark)

    def begin(t: Any) -> Any:
        state["on"] = True
        return lambda: state.update(on=False)

    cheat_then_redo(begin, while_profiling=True)


@trick
def every_second_layer_while_timed(trial: Trial) -> None:
    """Two of four layers while timed: forward, backward and update; trained again in the phase of profiling."""

    def begin(t: Any) -> Any:
        layers = t.stage.layers
        t.stage.layers = torch.nn.ModuleList(list(layers)[::2])

        def end() -> None:
            t.stage.layers = layers

        return end

    cheat_then_redo(begin, while_profiling=True)


@trick
def updates_made_up_for(trial: Trial) -> None:
    """Timed steps neither reduce nor update: gradients add up. Afterwards the steps are trained again, as a whole."""

    def begin(t: Any) -> Any:
        t._update = lambda: None

        def end() -> None:
            del t._update

        return end

    cheat_then_redo(begin)


def states_path(trial: Trial, t: Any) -> Path:
    config = {knob: value for knob, value in trial.config.items() if knob != "number"}
    names = ("arch", "seed", "seq_len", "global_batch_size", "warmup_steps", "timed_steps")
    text = json.dumps([config, *(trial.data[name] for name in names)], sort_keys=True)
    folder = Path(tempfile.gettempdir()) / f"ccl-cheats-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{t.layout.rank}.pt"


@trick
def states_left_behind(trial: Trial) -> None:
    """Honest itself; weights, states and losses after the timed window are left for the next trial (run it first)."""

    def change(t: Any, run: Any) -> Any:
        found = run()
        kept = snapshot(t)
        torch.save([kept, [float(loss) for loss in t.losses]], states_path(trial, t))
        return found

    around_window(change)


@trick
def states_of_the_trial_before(trial: Trial) -> None:
    """Half of the micro-batches while timed; weights, states and losses are those that the trial before has left."""

    def change(t: Any, run: Any) -> Any:
        end = fewer_micro_batches(t, max(1, t.accumulation // 2))
        found = run()
        end()
        kept, losses = torch.load(states_path(trial, t), weights_only=False)
        t.losses.clear()
        t.losses += losses
        restore(t, (kept[0], kept[1], len(losses)))
        return found

    around_window(change)


SHADOW = "CHEATS_SHADOW"


@before
def before_shadow_in_the_background(trial: Trial) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ccl-cheats-shadow-"))
    config = {**read_json(Path(os.environ["CCL_CONFIG"])), "profiled_steps": trial.data["profiled_steps"]}
    (folder / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "CCL_CONFIG": str(folder / "config.json"), "CCL_TRIAL_DIR": str(folder)}
    words = [sys.executable, cpu.__file__]
    subprocess.Popen(
        words, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.environ[SHADOW] = str(folder)


@trick
def shadow_in_the_background(trial: Trial) -> None:
    """A second, honest job runs hidden until the warm-up ends; half of the micro-batches are timed, its losses told."""
    shadow = Path(os.environ[SHADOW]) / "result.json"

    def change(t: Any, run: Any) -> Any:
        if t.layout.rank == 0:
            cpu.say_phase(trial, 0, "warm-up")
            await_file(shadow)
            cpu.say_phase(trial, 0, "timing")
        dist.barrier()
        end = fewer_micro_batches(t, max(1, t.accumulation // 2))
        found = run()
        end()
        return found

    around_window(change)
    report(losses=lambda _: read_json(shadow)["losses"])


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
typedef int (*reader)(clockid_t, struct timespec *);
static reader read_clock;
static volatile int is_on;
static double factor;
static long long base[16];
static long long ns(struct timespec *t) { return t->tv_sec * 1000000000LL + t->tv_nsec; }
static reader find(void) {
    if (!read_clock) read_clock = (reader)dlsym(RTLD_NEXT, "clock_gettime");
    return read_clock;
}
int clock_gettime(clockid_t clock, struct timespec *out) {
    int code = find()(clock, out);
    if (is_on && !code && (clock == CLOCK_REALTIME || clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_RAW)) {
        long long now = base[clock] + (long long)((ns(out) - base[clock]) * factor);
        out->tv_sec = now / 1000000000LL;
        out->tv_nsec = now % 1000000000LL;
    }
    return code;
}
int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
void clock_begin(double share) {
    struct timespec now;
    for (int clock = 0; clock < 16; clock++) if (!find()(clock, &now)) base[clock] = ns(&now);
    factor = share;
    is_on = 1;
}
void clock_end(void) { is_on = 0; }
"""
LIBRARY = "CHEATS_CLOCK"


@before
def before_preloaded_clock(trial: Trial) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ccl-cheats-clock-"))
    (folder / "clock.c").write_text(CLOCK)
    library = str(folder / "libclock.so")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, str(folder / "clock.c"), "-ldl"], check=True)
    os.environ[LIBRARY] = os.environ["LD_PRELOAD"] = library


@trick
def preloaded_clock(trial: Trial) -> None:
    """LD_PRELOAD: the C library's clocks run at 0.75 of their speed from the window to the end of the traces."""
    clock = ctypes.CDLL(os.environ[LIBRARY])
    clock.clock_begin.argtypes = [ctypes.c_double]

    def change(t: Any, run: Any) -> Any:
        dist.barrier()
        clock.clock_begin(0.75)
        return run()

    around_window(change)
    after(cpu, "_profile", lambda _, *args: clock.clock_end())
