"""Blind tricks on what a configuration is said to be: other layouts while timed, hidden helpers, memory."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import cpu
import torch
import torch.distributed as dist
from common import PeakMemory, Trial
from trick_tools import after, is_timed, trick
from unseen_tools import around_window


@trick
def other_micro_batch_while_timed(trial: Trial) -> None:
    """The configuration's micro-batch is 1; 8 while timed."""

    def change(t: Any, run: Any) -> Any:
        was = t.micro_batch, t.accumulation
        t.micro_batch = 8
        t.accumulation = was[0] * was[1] // 8
        found = run()
        t.micro_batch, t.accumulation = was
        return found

    around_window(change)


@trick
def recomputation_left_out_while_timed(trial: Trial) -> None:
    """Full recomputation is configured and profiled, but left out while timed; the peak of memory is of the rest."""

    def change(t: Any, run: Any) -> Any:
        t.stage.checkpointing = "none"
        found = run()
        t.stage.checkpointing = "full"
        return found

    around_window(change)
    keep_peak_of_warm_up()


def keep_peak_of_warm_up() -> None:
    """Report the peak of memory as it is at the start of the window."""
    make, measure, base = PeakMemory.__init__, PeakMemory.peak_bytes, cpu.time_steps
    seen: list[PeakMemory] = []
    found: dict[str, int] = {}

    def init(memory: PeakMemory) -> None:
        make(memory)
        seen.append(memory)

    def note(trial: Trial, run_step: Any, find_slowest: Any) -> Any:
        found["peak"] = measure(seen[-1])
        return base(trial, run_step, find_slowest)

    cpu.time_steps = note
    PeakMemory.__init__ = init  # type: ignore[method-assign]
    PeakMemory.peak_bytes = lambda memory: found.get("peak", measure(memory))  # type: ignore[method-assign]


@trick
def ballast_before_the_baseline(trial: Trial) -> None:
    """32 MiB are held while the memory before the model is read, and freed after: so much less is reported."""
    read = PeakMemory.__init__

    def init(memory: PeakMemory) -> None:
        ballast = torch.ones(8 << 20)
        read(memory)
        del ballast

    PeakMemory.__init__ = init  # type: ignore[method-assign]


@trick
def peak_counter_reset(trial: Trial) -> None:
    """The kernel's peak counter is reset when training is over, before it is read."""
    read = PeakMemory.peak_bytes

    def peak(memory: PeakMemory) -> int:
        Path("/proc/self/clear_refs").write_text("5")
        return read(memory)

    PeakMemory.peak_bytes = peak  # type: ignore[method-assign]


@trick
def states_not_resident(trial: Trial) -> None:
    """Optimizer states are kept in shared memory mapped only while it is used: not resident between updates."""

    def unmap(_: None, buffer: Any) -> None:
        import ctypes

        libc = ctypes.CDLL(None)
        for state in buffer.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if not state[name].is_shared():
                    state[name].share_memory_()
                start = -(-state[name].data_ptr() // 4096) * 4096
                size = (state[name].numel() * 4 - 4096) // 4096 * 4096
                if size > 0:  # pages of shared memory leave this process, their content stays
                    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 4)

    after(cpu.FlatParameters, "update", unmap)


@trick
def hidden_helper(trial: Trial) -> None:
    """One rank on one core is declared; while timed, a hidden process computes half of the micro-batches."""
    if trial.data["num_ranks"] > 1:
        return
    run = cpu.Trainer.run_step

    def start(_: None, t: Any, *args: Any) -> None:
        half = t.accumulation // 2
        for buffer in t.buffers:
            buffer.values.share_memory_()
        t.extra = [torch.zeros_like(buffer.grads).share_memory_() for buffer in t.buffers]
        (ask_out, ask_in), (done_out, done_in) = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.setsid()
            os.close(ask_in)
            help_along(t, half, ask_out, done_in)
        os.close(ask_out)
        t.ask, t.done = ask_in, done_out

    def help_along(t: Any, half: int, asked: int, done: int) -> None:
        try:
            torch.set_num_threads(1)
            while data := os.read(asked, 8):
                t.step = struct.unpack("q", data)[0]
                loss, tokens, pending = 0.0, t._draw_tokens(), cpu.deque()
                for buffer in t.buffers:
                    buffer.grads.zero_()
                for micro in range(half, t.accumulation):
                    loss = loss + t._forward(tokens[micro], pending)
                    t._backward(pending)
                for buffer, extra in zip(t.buffers, t.extra, strict=True):
                    extra.copy_(buffer.grads)
                os.write(done, struct.pack("d", float(loss)))
        finally:
            os._exit(0)

    def run_shared(t: Any) -> None:
        if not is_timed(t) or t.accumulation < 2:
            run(t)
            return
        os.write(t.ask, struct.pack("q", t.step))
        tokens, loss, pending = t._draw_tokens(), 0.0, cpu.deque()
        for micro in range(t.accumulation // 2):
            loss = loss + t._forward(tokens[micro], pending)
            t._backward(pending)
        loss = loss + struct.unpack("d", os.read(t.done, 8))[0]
        for buffer, extra in zip(t.buffers, t.extra, strict=True):
            buffer.grads += extra
        t._update()
        t.losses.append(loss)
        t.step += 1

    after(cpu.Trainer, "__init__", start)
    cpu.Trainer.run_step = run_shared


@trick
def other_layout_while_timed(trial: Trial) -> None:
    """tp 2 is configured and profiled; a second trainer with dp 2 is warmed up and timed in its place."""
    measure = cpu._measure

    def measure_other(done: Trial, t: Any, rank: int) -> Any:
        config = {**trial.config, "tp": 1, "dp": 2, "micro_batch_size": 8}
        data = {**trial.data, "config": config, "gradient_accumulation": trial.data["global_batch_size"] // 16}
        other = cpu.Trainer(Trial(trial.folder, data, config), cpu.Layout(rank, tp=1, dp=2, pp=1, ep=1), cpu.CPU)
        found = measure(done, other, rank)
        cpu.say_phase(trial, rank, "profiling")
        while t.step < other.step:
            t.run_step()
        dist.barrier()
        return found

    cpu._measure = measure_other
