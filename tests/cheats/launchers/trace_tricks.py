"""Tricks on the traces, and results of other trials."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import time
from collections.abc import Callable
from typing import Any

import cpu
import torch.distributed as dist
from common import Trial
from trick_tools import after, copy_rank_0, cut_batch, half, is_profiled, is_timed, report, trials_of, trick


def copy_traces(trial: Trial, change: Callable[[str], str] = lambda text: text) -> None:
    """Put the traces of trial 1 into this trial's folder."""
    for rank in (0, 1):
        path = trials_of(trial) / "0001" / "trace" / f"rank{rank}.json.gz"
        text = change(gzip.decompress(path.read_bytes()).decode())
        (trial.trace_folder / path.name).write_bytes(gzip.compress(text.encode()))


def replace_traces(trial: Trial, change: Callable[[str], str] = lambda text: text) -> None:
    def copy(_: None, done: Trial, trainer: Any, rank: int) -> None:
        dist.barrier()
        if rank == 0:
            copy_traces(trial, change)
        dist.barrier()

    after(cpu, "_profile", copy)
    cut_batch(half, when=is_timed)


@trick
def trace_of_another_trial(trial: Trial) -> None:
    """The traces of trial 1 (and half of the sequences while timed)."""
    replace_traces(trial)


def rename_nonce(trial: Trial, text: str) -> str:
    return re.sub(r"ccl-search::\w+", f"ccl-search::{trial.data['nonce']}", text)


@trick
def trace_with_renamed_nonce(trial: Trial) -> None:
    """The same, with the nonce replaced by this trial's."""
    replace_traces(trial, lambda text: rename_nonce(trial, text))


@trick
def trace_with_new_times(trial: Trial) -> None:
    """The same, and moved to this trial's time."""

    def move(text: str) -> str:
        base = re.search(r'"baseTimeNanoseconds": (\d+)', text)
        start = re.search(r'"ts": (\d+)', text)
        assert base is not None
        assert start is not None
        shift = time.time_ns() - 5_000_000_000 - int(base[1]) - int(start[1]) * 1000
        return text.replace(base[0], f'"baseTimeNanoseconds": {int(base[1]) + shift}')

    replace_traces(trial, lambda text: move(rename_nonce(trial, text)))


@trick
def trace_without_nonce(trial: Trial) -> None:
    """The same, with the nonce taken out."""
    replace_traces(trial, lambda text: text.replace("ccl-search::", "other::"))


@trick
def trace_of_rank_0_for_all(trial: Trial) -> None:
    """Rank 1's trace is a copy of rank 0's with another rank number."""

    def copy(_: None, done: Trial, trainer: Any, rank: int) -> None:
        dist.barrier()
        if rank == 0:
            copy_rank_0(trial)
        dist.barrier()

    after(cpu, "_profile", copy)


@trick
def rank_1_untraced(trial: Trial) -> None:
    """Rank 1 leaves no trace."""
    profile = cpu._profile

    def profile_first(done: Trial, trainer: Any, rank: int) -> None:
        profile(done, trainer, rank)
        if rank:
            (trial.trace_folder / f"rank{rank}.json.gz").unlink()

    cpu._profile = profile_first


@trick
def half_while_profiled(trial: Trial) -> None:
    """Half of the sequences while profiled."""
    cut_batch(half, when=is_profiled)


@trick
def other_micro_batch_profiled(trial: Trial) -> None:
    """The profiled window uses twice the micro-batch."""
    run = cpu.Trainer.run_step

    def run_other(trainer: Any) -> None:
        if is_profiled(trainer) and trainer.micro_batch == trial.micro_batch_size:
            trainer.micro_batch, trainer.accumulation = trainer.micro_batch * 2, trainer.accumulation // 2
        run(trainer)

    cpu.Trainer.run_step = run_other


@trick
def result_of_another_trial(trial: Trial) -> None:
    """The result.json of trial 1."""
    write = cpu.write_result

    def copy(done: Trial, **fields: Any) -> None:
        write(done, **fields)
        shutil.copy(trials_of(trial) / "0001" / "result.json", trial.folder / "result.json")

    cpu.write_result = copy


@trick
def not_a_number(trial: Trial) -> None:
    """A learning rate so high that the loss is not finite."""
    after(cpu.FlatParameters, "__init__", lambda _, buffer, *a: buffer.optimizer.param_groups[0].update(lr=1e30))
    write = cpu.write_result

    def write_raw(done: Trial, **fields: Any) -> None:
        write(done, **{**fields, "losses": []})
        path = trial.folder / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "losses": fields["losses"]}))

    cpu.write_result = write_raw


@trick
def everything_at_half_the_time(trial: Trial) -> None:
    """Half of each step time, of the timed window, and of every time in the traces."""

    def rewrite(_: None, done: Trial, trainer: Any, rank: int) -> None:
        path = trial.trace_folder / f"rank{rank}.json.gz"
        data = json.loads(gzip.decompress(path.read_bytes()))
        start = min(event["ts"] for event in data["traceEvents"] if event.get("ph") == "X")
        for event in data["traceEvents"]:
            event["ts"] = start + (event.get("ts", start) - start) / 2
            event["dur"] = event.get("dur", 0.0) / 2
        path.write_bytes(gzip.compress(json.dumps(data).encode()))

    after(cpu, "_profile", rewrite)
    report(timed_window_s=lambda time_s: time_s / 2)
    report(step_times_s=lambda times: [time_s / 2 for time_s in times])


@trick
def losses_of_another_trial(trial: Trial) -> None:
    """Half of the sequences while timed, and the losses of trial 1."""
    cut_batch(half, when=is_timed)
    result = trials_of(trial) / "0001" / "result.json"
    report(losses=lambda _: json.loads(result.read_text())["losses"])


@trick
def half_the_memory(trial: Trial) -> None:
    """Half of the peak memory is reported."""
    report(peak_memory_bytes=lambda sizes: [size // 2 for size in sizes])
