"""The run script `cpu` with one trick: each function here changes what is trained, timed, traced or reported.

The run folder's `tricks.json` says which: knob `number` -> name; other numbers are honest. Every trick tells one lie as
well as it can: whatever else the gate asks is true. `TRICKS` has them in the order of the table in docs/reliability.md.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "launchers"))

import cpu
import cpu_model
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Trial, read_trial

FULL = {"num_layers": 4, "num_params": 2_885_888, "seq_len": 128, "global_batch_size": 16}
"""What an honest trial of `tiny` reports."""
Trick = Callable[[Trial], None]
TRICKS: dict[str, Trick] = {}


def trick(function: Trick) -> Trick:
    """Register a trick under the function's name."""
    TRICKS[function.__name__] = function
    return function


def report(**changed: Any) -> None:
    """Report these values instead of the true ones; a callable gets the true one."""
    write = cpu.write_result

    def write_changed(trial: Trial, **fields: Any) -> None:
        new = {name: value(fields[name]) if callable(value) else value for name, value in changed.items()}
        write(trial, **{**fields, **new})

    cpu.write_result = write_changed


def after(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Call `change(result, *args)` on what a function returns; its result is returned instead if it is not None."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        new = change(result, *args)
        return result if new is None else new

    setattr(owner, name, changed)


def trials_of(trial: Trial) -> Path:
    """Return the folder of all trials of the search."""
    return next(folder for folder in trial.folder.parents if folder.name == "trials")


def name_trick(trial: Trial) -> str:
    """Return the trick of this trial; `honest` if it has none."""
    tricks = json.loads((trials_of(trial).parent / "tricks.json").read_text())
    return str(tricks.get(str(trial.config["number"]), "honest"))


def is_timed(trainer: Any) -> bool:
    """Whether the trainer's next step is in the timed window."""
    data = trainer.trial.data
    return data["warmup_steps"] <= trainer.step < data["warmup_steps"] + data["timed_steps"]


def is_profiled(trainer: Any) -> bool:
    data = trainer.trial.data
    return trainer.step >= data["warmup_steps"] + data["timed_steps"]


def cut_batch(factor: int, when: Callable[[Any], bool] = lambda trainer: True) -> None:
    """Train only every `factor`-th micro-batch of the steps in question."""
    draw, run = cpu.Trainer._draw_tokens, cpu.Trainer.run_step

    def draw_all(trainer: Any) -> Any:
        return draw(trainer) if trainer.accumulation == trainer.whole else draw_some(trainer)

    def draw_some(trainer: Any) -> Any:
        some, trainer.accumulation = trainer.accumulation, trainer.whole
        tokens = draw(trainer)
        trainer.accumulation = some
        return tokens[:some]

    def run_cut(trainer: Any) -> None:
        trainer.accumulation = trainer.whole // factor if when(trainer) else trainer.whole
        run(trainer)
        trainer.accumulation = trainer.whole

    def keep_whole(_: None, trainer: Any, *args: Any) -> None:
        trainer.whole = trainer.accumulation

    after(cpu.Trainer, "__init__", keep_whole)
    cpu.Trainer._draw_tokens, cpu.Trainer.run_step = draw_all, run_cut


def change_arch(trial: Trial, **changed: Any) -> None:
    trial.data["arch"].update(changed)  # type: ignore[index, attr-defined]


def change_times(change: Callable[[list[float]], list[float]]) -> None:
    report(step_times_s=change)


# less work


@trick
def batch_hole_told(trial: Trial) -> None:
    """The published trick, told truly: data parallelism x micro-batch sequences instead of the global batch."""
    cut_batch(2)
    report(global_batch_size=lambda whole: whole // 2)


@trick
def batch_hole(trial: Trial) -> None:
    """The same, with the full batch declared."""
    cut_batch(2)
    report(**FULL)


def halve_sequences(when: Callable[[Any], bool] = lambda trainer: True) -> None:
    def half(tokens: Any, trainer: Any) -> Any:
        return tokens[..., : tokens.shape[-1] // 2 + 1] if when(trainer) else None

    def shorten(q: Any, rotary: Any) -> Any:
        return tuple(part[: q.shape[-2]] for part in rotary)

    rotate = cpu_model._rotate
    cpu_model._rotate = lambda x, rotary: rotate(x, shorten(x, rotary))
    after(cpu.Trainer, "_draw_tokens", half)


@trick
def half_sequence_told(trial: Trial) -> None:
    """Half of each sequence, told truly."""
    halve_sequences()
    report(seq_len=64)


@trick
def half_sequence(trial: Trial) -> None:
    """Half of each sequence, the whole declared."""
    halve_sequences()


@trick
def two_layers_told(trial: Trial) -> None:
    """2 of 4 layers, told truly."""
    change_arch(trial, num_layers=2)


@trick
def two_layers(trial: Trial) -> None:
    """2 of 4 layers, 4 and their parameters declared."""
    change_arch(trial, num_layers=2)
    report(**FULL)


@trick
def three_layers(trial: Trial) -> None:
    """3 of 4 layers, 4 and their parameters declared."""
    change_arch(trial, num_layers=3)
    report(**FULL)


@trick
def three_layers_recomputed(trial: Trial) -> None:
    """The same with full recomputation, whose FLOPs fill the gap."""
    three_layers(trial)


@trick
def narrow_feed_forward(trial: Trial) -> None:
    """A feed-forward part of half the width."""
    change_arch(trial, intermediate_size=256)
    report(**FULL)


@trick
def smaller_vocabulary(trial: Trial) -> None:
    """Half of the vocabulary."""
    change_arch(trial, vocab_size=512)
    report(**FULL)


@trick
def tied_layers(trial: Trial) -> None:
    """One layer used four times: a quarter of the gradients to reduce and of the states to update."""

    def tie(_: None, stage: Any, *args: Any, **kwargs: Any) -> None:
        stage.layers = torch.nn.ModuleList([stage.layers[0]] * len(stage.layers))

    after(cpu_model.Stage, "__init__", tie)


@trick
def last_stage_dropped(trial: Trial) -> None:
    """The layers of the last pipeline stage are left out."""

    def drop(_: None, stage: Any, *args: Any, **kwargs: Any) -> None:
        if stage.layout.is_last:
            stage.layers = torch.nn.ModuleList()

    after(cpu_model.Stage, "__init__", drop)
    report(**FULL)


@trick
def attention_skipped(trial: Trial) -> None:
    """Values pass through without attention."""

    def pass_values(q: Any, k: Any, v: Any, rotary: Any) -> Any:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2).flatten(2)

    cpu_model._attend = pass_values


@trick
def loss_on_part(trial: Trial) -> None:
    """The output projection and the loss of a quarter of the tokens."""
    loss = cpu_model.Stage._loss

    def part(stage: Any, hidden: Any, targets: Any) -> Any:
        return loss(stage, hidden[:, :32], targets.view(len(hidden), -1)[:, :32].flatten())

    cpu_model.Stage._loss = part


@trick
def no_backward(trial: Trial) -> None:
    """No backward pass."""
    cpu.Trainer._backward = lambda trainer, pending: pending.popleft()


@trick
def no_optimizer(trial: Trial) -> None:
    """No optimizer update."""
    cpu.FlatParameters.update = lambda buffer: buffer.grads.zero_()


@trick
def no_reduction(trial: Trial) -> None:
    """Gradients stay on each data-parallel rank."""

    def keep(buffer: Any) -> None:
        buffer.own.grad = buffer.grads

    cpu.FlatParameters.reduce = keep


@trick
def part_of_the_reduction(trial: Trial) -> None:
    """Half of the gradients are reduced."""

    def reduce(buffer: Any) -> None:
        cpu.all_reduce(buffer.axis, buffer.grads[: len(buffer.grads) // 2])
        buffer.own.grad = buffer.grads

    cpu.FlatParameters.reduce = reduce


@trick
def frozen_embedding(trial: Trial) -> None:
    """The embedding is not trained."""
    draw = cpu_model.Stage._embed
    cpu_model.Stage._embed = lambda stage, tokens: draw(stage, tokens).detach()


@trick
def padding_only(trial: Trial) -> None:
    """Every sequence is padding: one token repeated."""
    after(cpu.Trainer, "_draw_tokens", lambda tokens, trainer: torch.zeros_like(tokens))


@trick
def same_data(trial: Trial) -> None:
    """Every step trains on the data of the first."""
    draw = cpu.Trainer._draw_tokens

    def first(trainer: Any) -> Any:
        step, trainer.step = trainer.step, 0
        tokens = draw(trainer)
        trainer.step = step
        return tokens

    cpu.Trainer._draw_tokens = first


# other precision, other layout


@trick
def bf16(trial: Trial) -> None:
    """bf16 where the card says fp32."""
    after(cpu.Trainer, "__init__", lambda _, trainer, *args: setattr(trainer, "is_bf16", True))
    report(precision="fp32")


class _HalfBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = (part.bfloat16() for part in ctx.saved_tensors)
        flat = grad.bfloat16().flatten(0, -2)
        return (grad.bfloat16() @ weight).float(), (flat.t() @ x.flatten(0, -2)).float()


@trick
def bf16_backward(trial: Trial) -> None:
    """bf16 in the backward pass only."""
    linear = F.linear

    def half(x: Any, weight: Any) -> Any:
        return _HalfBackward.apply(x, weight) if torch.is_grad_enabled() else linear(x, weight)

    cpu_model.F.linear = half


@trick
def bf16_reduction(trial: Trial) -> None:
    """Gradients are rounded to bf16 before they are reduced."""

    def reduce(buffer: Any) -> None:
        buffer.own.grad = cpu.all_reduce(buffer.axis, buffer.grads.bfloat16()).float()

    cpu.FlatParameters.reduce = reduce


@trick
def full_checkpointing_lied(trial: Trial) -> None:
    """Full recomputation is configured, none is done."""
    trial.config["activation_checkpointing"] = "none"  # type: ignore[index]


@trick
def selective_checkpointing_lied(trial: Trial) -> None:
    """Selective recomputation is configured, none is done."""
    trial.config["activation_checkpointing"] = "none"  # type: ignore[index]


@trick
def one_rank_told(trial: Trial) -> None:
    """One rank trains the whole batch where two were asked for, told truly."""


@trick
def one_rank_twice(trial: Trial) -> None:
    """The same; two ranks are declared, and the second rank's trace is the first's with another rank number."""
    report(world_size=2)
    after(cpu, "_profile", lambda _, *args: copy_rank_0(trial))


# other times


@trick
def one_step(trial: Trial) -> None:
    """One timed step."""
    change_times(lambda times: times[:1])


@trick
def one_step_five_times(trial: Trial) -> None:
    """One timed step, written down five times."""
    change_times(lambda times: times[:1] * 5)


@trick
def minimum_for_all(trial: Trial) -> None:
    """The minimum, reported for every step."""
    change_times(lambda times: [min(times)] * len(times))


@trick
def minimum_with_noise(trial: Trial) -> None:
    """The minimum with random digits, reported for every step."""
    change_times(lambda times: [min(times) * random.uniform(1.0, 1.01) for _ in times])


@trick
def arithmetic_times(trial: Trial) -> None:
    """Step times on a straight line."""
    change_times(lambda times: [0.8 * min(times) + 2**-10 * n for n in range(len(times))])


@trick
def rounded_times(trial: Trial) -> None:
    """Step times rounded to one digit, downwards."""

    def round_down(times: list[float]) -> list[float]:
        unit = 10.0 ** math.floor(math.log10(min(times)))
        return [round((int(time_s / unit) + (n == 0)) * unit, 9) for n, time_s in enumerate(times)]

    change_times(round_down)


@trick
def half_the_time(trial: Trial) -> None:
    """Half of each step time."""
    change_times(lambda times: [time_s / 2 for time_s in times])


@trick
def third_of_the_time(trial: Trial) -> None:
    """A third of each step time."""
    change_times(lambda times: [time_s / 3 for time_s in times])


@trick
def tenth_of_the_time(trial: Trial) -> None:
    """A tenth of each step time."""
    change_times(lambda times: [time_s / 10 for time_s in times])


@trick
def cpu_time(trial: Trial) -> None:
    """CPU time of the process instead of wall time."""

    class Clock:
        perf_counter = staticmethod(time.process_time)

    cpu.time = Clock


@trick
def warmup_timed(trial: Trial) -> None:
    """Warm-up steps are reported as timed ones, the first left out as the slowest."""
    trial.data["timed_steps"] += 1  # type: ignore[index, operator]
    trial.data["warmup_steps"] = 0  # type: ignore[index]
    report(warmup_steps=2, step_times_s=lambda times: times[1:])


@trick
def half_while_timed(trial: Trial) -> None:
    """Half of the sequences while timed, all of them while profiled."""
    cut_batch(2, when=is_timed)


@trick
def short_while_timed(trial: Trial) -> None:
    """Half of each sequence while timed, all of it while profiled."""
    halve_sequences(when=is_timed)


@trick
def accumulation_cut_while_timed(trial: Trial) -> None:
    """One micro-batch while timed, all of them while profiled."""
    cut_batch(4, when=is_timed)


@trick
def steps_skipped(trial: Trial) -> None:
    """Every second timed step does nothing; all report the mean."""
    run = cpu.Trainer.run_step

    def run_some(trainer: Any) -> None:
        if is_timed(trainer) and trainer.step % 2:
            trainer.losses.append(trainer.losses[-1])
            trainer.step += 1
        else:
            run(trainer)

    cpu.Trainer.run_step = run_some
    change_times(lambda times: [sum(times) / len(times) * random.uniform(0.97, 1.03) for _ in times])


# other traces


def copy_rank_0(trial: Trial) -> None:
    text = gzip.decompress((trial.trace_folder / "rank0.json.gz").read_bytes()).decode()
    text = re.sub(r'"rank": 0\b', '"rank": 1', text, count=1)
    (trial.trace_folder / "rank1.json.gz").write_bytes(gzip.compress(text.encode()))


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
    half_while_timed(trial)


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
    cut_batch(2, when=is_profiled)


@trick
def other_micro_batch_profiled(trial: Trial) -> None:
    """The profiled window uses twice the micro-batch."""
    run = cpu.Trainer.run_step

    def run_other(trainer: Any) -> None:
        if is_profiled(trainer) and trainer.micro_batch == trial.micro_batch_size:
            trainer.micro_batch, trainer.accumulation = trainer.micro_batch * 2, trainer.accumulation // 2
        run(trainer)

    cpu.Trainer.run_step = run_other


# other results


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


def honest(trial: Trial) -> None:
    """No trick: the machine is shared, so the load of other processes is not reported."""
    report(foreign_cpu_cores=None)


def train(trial: Trial) -> None:
    """Run one rank with the trial's trick."""
    honest(trial)
    name = name_trick(trial)
    if name != "honest":
        TRICKS[name](trial)
    cpu.train(trial)


def use_one_rank(trial: Trial) -> None:
    trial.data["num_ranks"], trial.config["dp"] = 1, 1  # type: ignore[index]
    trial.data["gradient_accumulation"] *= 2  # type: ignore[index]


def main() -> int:
    trial = read_trial()
    if name_trick(trial).startswith("one_rank_t"):
        use_one_rank(trial)
    return int(cpu.fork_ranks(trial, train, __file__))


if __name__ == "__main__":
    sys.exit(main())
