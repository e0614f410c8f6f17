"""Helpers for tests of metrics: measuring tables, a card, and tables with known results."""

from __future__ import annotations

from typing import Any

from trace_tables import Timeline, make_set

from cclsearch.card.model import Card, Hardware, ModelArch, Phase
from cclsearch.plugins import METRICS
from cclsearch.trace.events import EventTable, OpCost
from cclsearch.trace.metric import MetricResult
from cclsearch.trace.view import TraceView


def measure(tables: list[EventTable], name: str, **context: Any) -> MetricResult:
    set_fields = context.pop("set_fields", {})
    result: MetricResult = METRICS.get(name)(TraceView(make_set(tables, **set_fields), **context))
    return result


def make_card(**fields: Any) -> Card:
    arch = ModelArch(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        moe=fields.pop("moe", None),
    )
    hardware = Hardware(
        accelerator="h100",
        num_accelerators=fields.pop("num_accelerators", 2),
        accelerators_per_node=8,
        memory_gib=80,
        scale_up_gbps=3600,
        scale_out_gbps=400,
    )
    values = {
        "name": "test",
        "title": "a card for tests",
        "phase": Phase.TRAINING,
        "family": "llama-3.1-8b",
        "model": arch,
        "work": {"global_batch_size": fields.pop("global_batch_size", 16), "seq_len": fields.pop("seq_len", 1024)},
        "precision": "bf16",
        "hardware": hardware,
        "framework": "torchtitan",
        **fields,
    }
    return Card(**values)


def step_timeline(rank: int = 0, world_size: int | None = 1, *, steps: int = 6, period_us: float = 100) -> Timeline:
    """Return steps with 40 us of compute, 20 us of exposed communication, 10 us of copies and 30 us idle."""
    timeline = Timeline(rank=rank, world_size=world_size)
    for i in range(steps):
        number = timeline.step(i * period_us, i * period_us + 60)
        begin = i * period_us + 5
        timeline.kernel(begin, 40, launched_us=begin - 4, step_id=number)
        timeline.copy(begin + 40, 10, step_id=number, bytes=10_000)
        timeline.collective(begin + 50, 20, step_id=number)
    return timeline


def two_ranks(late_us: float = 15, sizes: tuple[int, ...] = (1 << 20, 2 << 20, 4 << 20)) -> list[EventTable]:
    """Return collectives that take 10 us plus 10 us per MiB, at which rank 1 arrives late."""
    tables = []
    for rank in range(2):
        timeline = Timeline(rank=rank, world_size=2)
        for i in range(6):
            number = timeline.step(i * 400, i * 400 + 390)
            now = i * 400.0
            for size in sizes:
                moving = 10 + 10 * size / (1 << 20)
                timeline.kernel(now, 20 + late_us * rank, step_id=number)
                wait = late_us * (1 - rank)
                timeline.collective(now + 20 + late_us * rank, wait + moving, message_bytes=size, step_id=number)
                now += 20 + late_us + moving
        tables.append(timeline.table())
    return tables


def roofline_table(runs_of_dense: int) -> EventTable:
    """An XLA device with a dense operation (900 FLOP/byte) that runs this often and a thin one (1 FLOP/byte)."""
    timeline = Timeline()
    for i in range(6):
        timeline.step(i * 100, i * 100 + 100)
        timeline.kernel(i * 100 + 90, 10, "thin")
        for k in range(runs_of_dense):
            timeline.kernel(i * 100 + 20 * k, 10, "dense")
    costs = {0: OpCost(flops=1e6, bytes_accessed=1e6), 1: OpCost(flops=9e8, bytes_accessed=1e6)}
    return timeline.table(op_costs=costs, format="xla")
