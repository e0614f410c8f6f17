"""Tricks that train less, or something else."""

from __future__ import annotations

import random
from typing import Any

import cpu
import cpu_model
import torch
import torch.nn.functional as F
from common import Trial
from trick_tools import FULL, after, change_arch, cut_batch, half, halve_sequences, report, trick


@trick
def batch_hole_told(trial: Trial) -> None:
    """The published trick, told truly: data parallelism x micro-batch sequences instead of the global batch."""
    cut_batch(half)
    report(global_batch_size=lambda whole: whole // 2)


@trick
def batch_hole(trial: Trial) -> None:
    """The same, with the full batch declared."""
    cut_batch(half)
    report(**FULL)


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


@trick
def last_micro_batch_dropped(trial: Trial) -> None:
    """The last micro-batch of each step is not trained."""
    cut_batch(lambda whole: whole - 1)


@trick
def first_layers_frozen(trial: Trial) -> None:
    """The first two layers are not trained."""

    def mark(_: None, stage: Any, *args: Any, **kwargs: Any) -> None:
        for layer in stage.layers[:2]:
            after(layer, "forward", lambda hidden, *inputs: hidden.detach())

    after(cpu_model.Stage, "__init__", mark)


@trick
def layers_dropped_at_random(trial: Trial) -> None:
    """Each layer is skipped with a probability of a quarter."""
    forward = cpu_model.Layer.forward
    draws = random.Random(0)

    def skip(layer: Any, x: Any, rotary: Any) -> Any:
        return x if draws.random() < 0.25 else forward(layer, x, rotary)

    cpu_model.Layer.forward = skip


@trick
def fewer_heads(trial: Trial) -> None:
    """Half of the attention heads."""
    change_arch(trial, num_heads=trial.data["arch"]["num_heads"] // 2)
    report(**FULL)


@trick
def one_key_head(trial: Trial) -> None:
    """One key and value head for all queries."""
    change_arch(trial, num_kv_heads=1)
    report(**FULL)


@trick
def attention_in_blocks(trial: Trial) -> None:
    """Each token attends to a block of 32 tokens only."""
    attend = cpu_model._attend

    def attend_blocks(q: Any, k: Any, v: Any, rotary: Any) -> Any:
        parts = [
            attend(q[:, :, i : i + 32], k[:, :, i : i + 32], v[:, :, i : i + 32], tuple(r[i : i + 32] for r in rotary))
            for i in range(0, q.shape[2], 32)
        ]
        return torch.cat(parts, dim=1)

    cpu_model._attend = attend_blocks


@trick
def no_causal_mask(trial: Trial) -> None:
    """Attention without its causal mask."""
    attend = F.scaled_dot_product_attention

    def attend_all(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **{**kwargs, "is_causal": False})

    cpu_model.F.scaled_dot_product_attention = attend_all


@trick
def every_second_update(trial: Trial) -> None:
    """The optimizer runs after every second step."""
    update = cpu.FlatParameters.update

    def update_some(buffer: Any) -> None:
        buffer.num_updates = getattr(buffer, "num_updates", 0) + 1
        if buffer.num_updates % 2 == 0:
            update(buffer)

    cpu.FlatParameters.update = update_some


@trick
def every_second_reduction(trial: Trial) -> None:
    """Gradients are reduced after every second step."""
    reduce = cpu.FlatParameters.reduce

    def reduce_some(buffer: Any) -> None:
        buffer.num_steps = getattr(buffer, "num_steps", 0) + 1
        if buffer.num_steps % 2:
            buffer.own.grad = buffer.grads
        else:
            reduce(buffer)

    cpu.FlatParameters.reduce = reduce_some


@trick
def largest_gradients_only(trial: Trial) -> None:
    """One gradient of 64 is reduced, the others are dropped."""

    def reduce(buffer: Any) -> None:
        part = cpu.all_reduce(buffer.axis, buffer.grads[::64].contiguous())
        buffer.grads.zero_()
        buffer.grads[::64] = part
        buffer.own.grad = buffer.grads

    cpu.FlatParameters.reduce = reduce


@trick
def gradients_of_the_step_before(trial: Trial) -> None:
    """Each update uses the gradients of the step before, so that their reduction can overlap with a whole step."""
    reduce = cpu.FlatParameters.reduce

    def reduce_late(buffer: Any) -> None:
        reduce(buffer)
        now = buffer.own.grad.clone()
        buffer.own.grad = getattr(buffer, "late", now)
        buffer.late = now

    cpu.FlatParameters.reduce = reduce_late


@trick
def plain_sgd(trial: Trial) -> None:
    """SGD without moments instead of AdamW."""

    def replace(_: None, buffer: Any, *args: Any) -> None:
        buffer.optimizer = torch.optim.SGD([buffer.own], lr=1e-3)

    after(cpu.FlatParameters, "__init__", replace)


@trick
def other_seed(trial: Trial) -> None:
    """Weights and data of another seed."""
    trial.data["seed"] += 1  # type: ignore[index]
