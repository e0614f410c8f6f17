"""The task `training`: optimizer steps of a fixed global batch."""

from __future__ import annotations

from types import MappingProxyType

from cclsearch.card.fields import WORK_FIELDS
from cclsearch.card.model import Card
from cclsearch.core.values import Value
from cclsearch.plugins import TASKS
from cclsearch.score.catalog import CATALOG
from cclsearch.tasks.base import Task
from cclsearch.tasks.training import space_rules  # noqa: F401  importing registers its rules


class TrainingTask(Task):
    """Trains a decoder-only transformer; the time of a step is measured."""

    name = "training"
    metrics = tuple(CATALOG.values())
    primary = "step_time_s"
    objective = "step_time"
    highlights = ("tokens_per_s", "tokens_per_s_per_accelerator", "mfu", "peak_memory_gib")
    efficiency = ("tokens_per_s_per_accelerator", "mfu")
    causes = ("overlap", "mfu")
    compared = (
        "overlap", "compute_frac", "exposed_comm_frac", "idle_frac", "comm_wait_frac", "compute_imbalance",
        "pipeline_bubble", "num_accelerators",
    )  # fmt: skip
    card_fields = WORK_FIELDS
    rules = (
        *("num_accelerators", "tp_divides_heads", "tp_divides_kv_heads", "pp_at_most_layers", "accumulation_whole"),
        *("ep_divides_experts", "ep_inside_stage"),
    )
    numbers = MappingProxyType({"global_batch": lambda card: card.number("global_batch_size")})
    tuned = "how a large language model's training is split over accelerators"
    unit_of_work = "step"

    def describe_work(self, card: Card) -> str:
        """The work of a step: `64 x 4096 tokens/step`."""
        return f"{card.work['global_batch_size']} x {card.work['seq_len']} tokens/step"

    def describe_primary(self) -> str:
        return "seconds per optimizer step at the fixed work"

    def describe_for_agent(self, card: Card) -> list[str]:
        work = f"global batch {card.number('global_batch_size')} sequences of {card.number('seq_len')} tokens"
        return [f"fixed work: {work}"]

    def policy_inputs(self, card: Card) -> dict[str, Value]:
        """The names that published policies read."""
        return {"batch_size": card.number("global_batch_size"), "seq_len": card.number("seq_len")}

    def seed_policy(self, card: Card) -> str:
        return "moe" if card.arch.moe else "dense"


TASKS.register("training")(TrainingTask())
