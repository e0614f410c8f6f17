"""Run script `cpu`: trains a small transformer on this machine's CPUs, with torch over gloo.

Under `torchrun` (RANK is set) each process is one rank. Started without RANK it replaces torchrun: the same elastic
agent starts the ranks from a fork server, which imports torch once for all of them and saves most of the start-up time.

Knobs: tp, dp, pp, ep, micro_batch_size, activation_checkpointing (none, selective, full), zero_stage (0, 1); on request
threads (OpenMP threads of a rank), optimizer (for_loop, foreach or fused AdamW), compile (torch.compile of each layer),
bucket_mib (size of the buckets in which gradients are reduced), rank_order (degrees over ranks, innermost first),
host_order (in which order the launcher uses the nodes) and stage_layers (layers of each pipeline stage). With
`rank_speeds` in config.json, ranks are held back to that share of their speed.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    CpuClock,
    IllegalConfig,
    PeakMemory,
    Trial,
    close_window,
    device_name,
    foreign_cores,
    host_name,
    learning_rate,
    limit_memory,
    number_step,
    open_window,
    package_versions,
    read_trial,
    reporting_failures,
    say_phase,
    use_nonce,
    write_result,
)
from cpu_model import Axis, Layout, MixtureOfExperts, Stage, all_reduce
from energy import energy_per_step, find_used_energy, open_cpu_counter, read_energy
from step_window import mark_trace, time_steps
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule
from unlike import Brake

CPU = torch.device("cpu")


class FlatParameters:
    """The parameters that one axis replicates, in one flat buffer with one collective and one optimizer.

    With ZeRO stage 1 each rank of the axis updates its share: reduce-scatter, update, all-gather. With `bucket_mib`
    above 0 gradients are all-reduced in buckets of that size, all at once.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        axis: Axis,
        zero_stage: int,
        adam_options: Mapping[str, Any],
        bucket_mib: int = 0,
    ) -> None:
        self.axis, self.sharded, self.bucket_mib = axis, zero_stage >= 1 and axis.size > 1, bucket_mib
        size = sum(p.numel() for p in parameters)
        padded = -(-size // axis.size) * axis.size
        self.values, self.grads = (torch.zeros(padded, device=parameters[0].device) for _ in range(2))
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            self.values[start:stop] = parameter.data.flatten()
            parameter.data = self.values[start:stop].view_as(parameter)
            parameter.grad = self.grads[start:stop].view_as(parameter)
            start = stop
        share = padded // axis.size
        own = slice(axis.index * share, (axis.index + 1) * share) if self.sharded else slice(0, padded)
        self.own = torch.nn.Parameter(self.values[own])
        self.optimizer = torch.optim.AdamW([self.own], eps=1e-6, **adam_options)

    def reduce(self) -> None:
        """Sum the gradients over the axis; if sharded, each rank gets its share."""
        if not self.sharded:
            self._reduce_buckets()
            self.own.grad = self.grads
            return
        self.own.grad = torch.empty_like(self.own)
        with record_function(f"comm::{self.axis.name}::reduce_scatter"):
            dist.reduce_scatter_tensor(self.own.grad, self.grads, group=self.axis.group)

    def _reduce_buckets(self) -> None:
        """All-reduce the gradients: in one collective, or in one for each bucket."""
        if not self.bucket_mib or self.axis.size == 1:
            all_reduce(self.axis, self.grads)
            return
        with record_function(f"comm::{self.axis.name}::all_reduce"):
            buckets = self.grads.split(self.bucket_mib * 2**20 // self.grads.element_size())
            for work in [dist.all_reduce(bucket, group=self.axis.group, async_op=True) for bucket in buckets]:
                work.wait()

    def update(self) -> None:
        self.optimizer.step()
        self.grads.zero_()
        if self.sharded:
            with record_function(f"comm::{self.axis.name}::all_gather"):
                dist.all_gather_into_tensor(self.values, self.own.detach().clone(), group=self.axis.group)


class Trainer:
    """One rank's model, optimizer and schedule; `run_step` is one optimizer step over the global batch.

    `adam_options` chooses the implementation of AdamW: `foreach` or `fused`.
    """

    def __init__(
        self,
        trial: Trial,
        layout: Layout,
        device: torch.device = CPU,
        adam_options: Mapping[str, bool] = MappingProxyType({"foreach": False}),
    ) -> None:
        data, config = trial.data, trial.config
        self.trial, self.layout, self.arch = trial, layout, data["arch"]
        self.device, self.adam_options = device, {"lr": learning_rate(self.arch), **adam_options}
        self.micro_batch = trial.micro_batch_size
        self.accumulation = int(data["gradient_accumulation"])
        trial.require_whole_batch()
        self.is_bf16 = data["precision"] == "bf16"
        self.stage = Stage(
            self.arch,
            layout,
            seq_len=data["seq_len"],
            seed=data["seed"],
            checkpointing=str(config.get("activation_checkpointing", "none")),
            stage_layers=data.get("stage_layers", ()),
        ).to(device)
        self.routers = [module.router for module in self.stage.modules() if isinstance(module, MixtureOfExperts)]
        self.buffers = self._flatten(int(config.get("zero_stage", 0)))
        self.brake = Brake(trial, layout.rank)
        self.step = 0
        self.losses: list[Tensor | float] = []
        """Of every step so far, this rank's part of the global batch."""
        self._sent: list[tuple[Any, Tensor]] = []

    def _flatten(self, zero_stage: int) -> list[FlatParameters]:
        experts = [p for m in self.stage.modules() if isinstance(m, MixtureOfExperts) for p in (m.into, m.out)]
        known = {id(p) for p in experts}
        dense = [p for p in self.stage.parameters() if id(p) not in known]
        groups = [(dense, self.layout.dp), (experts, self.layout.edp)]
        bucket_mib = int(self.trial.config.get("bucket_mib", 0))
        return [
            FlatParameters(parameters, axis, zero_stage, self.adam_options, bucket_mib)
            for parameters, axis in groups
            if parameters
        ]

    def run_step(self) -> None:
        """Forward and backward of all micro-batches in 1F1B order, then reduction and update."""
        tokens = self._draw_tokens()
        num_warmup = min(self.layout.pp.size - self.layout.pp.index - 1, self.accumulation)
        loss: Tensor | float = 0.0  # read after the step: on a GPU each read waits for the device
        pending = deque[tuple[Tensor | None, Tensor]]()
        for micro in range(self.accumulation):
            loss = loss + self._forward(tokens[micro], pending)
            if micro >= num_warmup:
                self._backward(pending)
        while pending:
            self._backward(pending)
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        self._update()
        self.losses.append(loss)
        self.step += 1

    def _draw_tokens(self) -> Tensor:
        """Return (accumulation, B, S + 1) tokens of this data-parallel rank."""
        own = draw_sequences(self.trial.data, self.step).chunk(self.layout.dp.size)[self.layout.dp.index]
        return own.view(self.accumulation, self.micro_batch, -1).to(self.device)

    def _forward(self, tokens: Tensor, pending: deque[tuple[Tensor | None, Tensor]]) -> Tensor | float:
        layout, received = self.layout, None
        if not layout.is_first:
            shape = self.micro_batch, self.trial.data["seq_len"], self.arch["hidden_size"]
            received = torch.empty(shape, device=self.device)
            self._receive(received, layout.pp.index - 1)
            received.requires_grad_()
        with (
            self.brake.held(),
            record_function("forward"),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16),
        ):
            out = self.stage(tokens[:, :-1] if received is None else received, tokens[:, 1:])
        if layout.is_last:
            out = out / (self.accumulation * layout.dp.size)
        else:
            self._send(out.detach(), layout.pp.index + 1)
        pending.append((received, out))
        return out.detach().double() if layout.is_last else 0.0

    def _backward(self, pending: deque[tuple[Tensor | None, Tensor]]) -> None:
        layout, (received, out) = self.layout, pending.popleft()
        grad = None
        if not layout.is_last:
            grad = torch.empty_like(out)
            self._receive(grad, layout.pp.index + 1)
        with self.brake.held(), record_function("backward"):
            out.backward(grad)
        if received is not None:
            self._send(received.grad, layout.pp.index - 1)

    def _send(self, tensor: Tensor, stage: int) -> None:
        with record_function("comm::pp::send"):
            pp = self.layout.pp
            self._sent.append((dist.isend(tensor, pp.ranks[stage], group=pp.group), tensor))

    def _receive(self, tensor: Tensor, stage: int) -> None:
        with record_function("comm::pp::recv"):
            dist.recv(tensor, self.layout.pp.ranks[stage], group=self.layout.pp.group)

    def _update(self) -> None:
        layout = self.layout
        for router in self.routers:  # each tensor-parallel rank routed its share of the tokens
            all_reduce(layout.tp, router.grad)
        if self.arch["tied_embeddings"] and layout.pp.size > 1 and (layout.is_first or layout.is_last):
            all_reduce(layout.ends, (self.stage.embedding if layout.is_first else self.stage.head).grad)
        for buffer in self.buffers:
            buffer.reduce()
        with self.brake.held(), record_function("optimizer"):
            for buffer in self.buffers:
                buffer.update()


def draw_sequences(data: Mapping[str, Any], step: int) -> Tensor:
    """Return the (global batch, S + 1) tokens of one optimizer step: a noisy pattern that a model can learn."""
    vocab = data["arch"]["vocab_size"]
    generator = torch.Generator().manual_seed(data["seed"] * 7919 + number_step(data, step))
    shape = (data["global_batch_size"], data["seq_len"] + 1)
    noise = torch.randint(0, 3, shape, generator=generator)
    noise[:, 0] = torch.randint(0, vocab, shape[:1], generator=generator)
    return noise.cumsum(dim=1) % vocab


def train(trial: Trial) -> None:
    """Run one rank's whole trial: model, warm-up, timed window, profiled window, report."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with reporting_failures(trial, rank):
        if world != trial.data["num_ranks"]:
            raise IllegalConfig(f"the trial needs {trial.data['num_ranks']} ranks, but {world} were started")
        torch.set_num_threads(int(trial.config.get("threads", os.environ["OMP_NUM_THREADS"])))
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        if any(trial.config.get(knob, "given") != "given" for knob in ("host_order", "device_order")):
            say_places(trial, rank)
        order = str(trial.config.get("rank_order", "tp-dp-pp"))
        layout = Layout(rank, order=order, **{axis: trial.degree(axis) for axis in ("tp", "dp", "pp", "ep")})
        say_phase(trial, rank, "starting")
        warm_libraries()
        limit_memory()
        memory = PeakMemory()
        optimizer = str(trial.config.get("optimizer", "for_loop"))
        trainer = Trainer(trial, layout, CPU, {"foreach": optimizer == "foreach", "fused": optimizer == "fused"})
        if trial.config.get("compile", False):
            for layer in trainer.stage.layers:
                layer.compile()
        report = _measure(trial, trainer, rank)
        report["peak_memory_bytes"] = memory.peak_bytes()
        if trial.data["profiled_steps"] and not report["is_pruned"]:
            _profile(trial, trainer, rank)
        report["losses"] = gather_losses(trainer)
        report["precision"] = "bf16" if trainer.is_bf16 else "fp32"
        reports: list[Any] = [None] * world
        dist.all_gather_object(reports, report)
        if rank == 0:
            _write_report(trial, reports)
        dist.barrier()
        dist.destroy_process_group()


def say_places(trial: Trial, rank: int) -> None:
    """Print where the ranks run, which the launcher decided from `places`."""
    if rank == 0:
        print(f"places of the ranks: {trial.data.get('places') or 'in order'}", flush=True)


def find_slowest(step_times_s: list[float]) -> list[float]:
    """Return the seconds of each step by the slowest rank; every rank calls it."""
    slowest = torch.tensor(step_times_s, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(seconds) for seconds in slowest]


def gather_losses(trainer: Trainer, first: int = 0) -> list[float]:
    """Return the losses over the global batch from the step `first` on; every rank calls it."""
    counts = trainer.layout.is_last and trainer.layout.tp.index == 0
    own = [float(loss) for loss in trainer.losses[first:]] if counts else []
    ranks: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return [sum(step) for step in zip(*filter(None, ranks), strict=True)]


def warm_libraries() -> None:
    """Run every kind of operation once, so that its code and threads do not count as the model's memory."""
    weight = torch.nn.Parameter(torch.ones(16, 16))
    F.cross_entropy(F.rms_norm(torch.ones(4, 16) @ weight, (16,)), torch.zeros(4, dtype=torch.long)).backward()
    torch.optim.AdamW([weight], foreach=False).step()
    dist.all_reduce(torch.ones(1 << 20))


def _measure(trial: Trial, trainer: Trainer, rank: int) -> dict[str, Any]:
    """Run warm-up and timed window; return this rank's measurements."""
    say_phase(trial, rank, "warm-up")
    for _ in range(trial.data["warmup_steps"]):
        trainer.run_step()
    say_phase(trial, rank, "timing")
    dist.barrier()
    counter = open_cpu_counter(host=host_name())
    first = trainer.step
    given = [open_window(trial) if rank == 0 else ""]
    dist.broadcast_object_list(given)
    use_nonce(trial, given[0])
    start, start_j = CpuClock.read(), read_energy(counter)  # after the wait: its energy and load are not the steps'
    timed = time_steps(trial, trainer.run_step, find_slowest)
    losses = gather_losses(trainer, first)
    if rank == 0:
        close_window(trial, losses)
    end, layout = CpuClock.read(), trainer.layout
    energy = find_used_energy(counter, start_j)
    return {
        **timed,
        "clock": (start, end),
        "energy": energy,
        "num_params": trainer.stage.num_params,
        "sequences": layout.dp.size * trainer.accumulation * trainer.micro_batch,
        "device": device_name(),
        "host": host_name(),
    }


def _profile(trial: Trial, trainer: Trainer, rank: int) -> None:
    """Run the separate profiled window: one step to warm up the profiler, then the traced steps."""
    say_phase(trial, rank, "profiling")
    steps = trial.data["profiled_steps"]
    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True, profile_memory=True) as profiler:
        for _ in range(1 + steps):
            mark_trace(trial)
            trainer.run_step()
            profiler.step()
    profiler.export_chrome_trace(str(trial.trace_folder / f"rank{rank}.json.gz"))


def _write_report(trial: Trial, reports: list[dict[str, Any]]) -> None:
    """Write `result.json` from all ranks' reports: each step's slowest time, losses summed over the data axis."""
    here = [report for report in reports if report["host"] == reports[0]["host"]]
    start, end = reports[0]["clock"]
    own_s = sum(report["clock"][1].own_s - report["clock"][0].own_s for report in here)
    write_result(
        trial,
        status="pruned" if reports[0]["is_pruned"] else "ok",
        world_size=len(reports),
        global_batch_size=reports[0]["sequences"],
        seq_len=trial.data["seq_len"],
        num_layers=trial.data["arch"]["num_layers"],
        num_params=sum(report["num_params"] for report in reports),
        step_times_s=[max(times) for times in zip(*(r["step_times_s"] for r in reports), strict=True)],
        timed_window_s=max(report["timed_window_s"] for report in reports),
        warmup_steps=trial.data["warmup_steps"],
        peak_memory_bytes=[report["peak_memory_bytes"] for report in reports],
        memory_kind="rss",
        precision=reports[0]["precision"],
        losses=reports[0]["losses"],
        versions=package_versions("torch", "numpy"),
        devices=[report["device"] for report in reports],
        hosts=[report["host"] for report in reports],
        foreign_cpu_cores=foreign_cores(start, end, own_s),
        logical_cores=os.cpu_count(),
        energy_j=energy_per_step(
            dict(report["energy"] for report in reports), end.wall_s - start.wall_s, len(reports[0]["step_times_s"])
        ),
    )


def fork_ranks(
    trial: Trial, run_rank: Callable[[Trial], None], script: str, preload: tuple[str, ...] = ("cpu_model",)
) -> int:
    """Replace torchrun on this node: fork the ranks from a server that has imported torch and `preload` for them.

    `run_rank` is a function of `script`.

    They are not forked from this process: its store and keep-alive threads may have locks that a fork would copy.
    """
    import multiprocessing

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    options = [
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--start-method", "forkserver"),
        *("--nproc-per-node", str(trial.data["num_ranks"]), "--monitor-interval", "0.05", script),
    ]
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "torch.profiler", *preload])
    launch, _, _ = config_from_args(get_args_parser().parse_args(options))
    try:
        elastic_launch(launch, run_rank)(trial)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def main() -> int:
    trial = read_trial()
    if "RANK" not in os.environ:
        return fork_ranks(trial, train, __file__)
    train(trial)
    return 0


if __name__ == "__main__":
    sys.exit(main())
