"""Tricks on precision, recomputation and layout."""

from __future__ import annotations

from typing import Any

import cpu
import cpu_model
import torch
import torch.nn.functional as F
from common import Trial
from trick_tools import after, copy_rank_0, report, trick


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


@trick
def bf16_states(trial: Trial) -> None:
    """The optimizer's moments are kept in bf16."""

    def round_moments(_: None, buffer: Any) -> None:
        for state in buffer.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].bfloat16().float()

    after(cpu.FlatParameters, "update", round_moments)


@trick
def bf16_weights(trial: Trial) -> None:
    """Weights are rounded to bf16 after each update, as without fp32 copies of them."""

    def round_weights(_: None, buffer: Any) -> None:
        buffer.values.copy_(buffer.values.bfloat16())

    after(cpu.FlatParameters, "update", round_weights)
