"""The frozen workload card; `cclsearch.card.load` builds it from a CCL-Bench v1 YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from cclsearch.card.groups import HardwareGroup, has_unlike_links, make_links
from cclsearch.card.hardware import NOMINAL, Accelerator, state_accelerator
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Model, Value, format_knob_value
from cclsearch.network.matrix import LinkMatrix

PRECISION = "precision"
"""The knob of a card with alternative precisions."""
FRAMEWORK_KNOBS = ("framework", "engine", "backend")
"""Knobs that name the framework of a configuration."""


class Phase(StrEnum):
    """Phase of the model's work."""

    TRAINING = "training"
    INFERENCE = "inference"


class MoEArch(Model):
    """The mixture-of-experts part of a model."""

    num_experts: int = Field(ge=2)
    """Routed experts per layer."""
    top_k: int = Field(ge=1)
    """Routed experts per token."""
    expert_intermediate_size: int = Field(ge=1)
    """Feed-forward width of one expert."""
    num_shared_experts: int = Field(default=0, ge=0)
    """Experts that process every token, of the same width."""
    num_dense_layers: int = Field(default=0, ge=0)
    """Leading layers with a dense feed-forward part."""


LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")
"""The fields of a model with latent attention."""
FEATURES = {
    "qk_norm": "QK norm",
    "qkv_bias": "biases of queries, keys and values",
    "linear_bias": "biases of linear layers",
    "post_norms": "norms after attention and MLP",
    "learned_positions": "learned positions",
    "sliding_window": "sliding windows",
    "kv_lora_rank": "latent attention",
    "index_topk": "sparse attention by an indexer",
    "mtp_layers": "multi-token prediction",
    "router_balance": "balance of the router",
}
"""Field that a model may have and a framework may not build -> what it is."""
ADAPTERS = ("lora_rank", "lora_targets", "base_precision")
"""The fields of fine-tuning."""
_OPTIONAL = frozenset((*FEATURES, *LATENT, *ADAPTERS, "windowed_layers"))


class ModelArch(Model):
    """A decoder-only transformer. Widths are numbers of elements."""

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    """Width of a query or key; with latent attention, its parts without and with rotary embedding together."""
    intermediate_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    tied_embeddings: bool = False
    gated_mlp: bool = True
    """Three matrices in the feed-forward part (SwiGLU) instead of two."""
    moe: MoEArch | None = None
    kv_lora_rank: int | None = Field(default=None, ge=1)
    """Width of the latent vector of keys and values (multi-head latent attention); None without one."""
    q_lora_rank: int | None = Field(default=None, ge=1)
    """Width of the latent vector of queries; None if queries have none."""
    qk_rope_head_dim: int | None = Field(default=None, ge=1)
    """Part of `head_dim` with rotary embedding, which all heads of a key share (latent attention)."""
    v_head_dim: int | None = Field(default=None, ge=1)
    """Width of a value's head; None if it is `head_dim`."""
    qk_norm: bool = False
    """Norms of the heads of queries and keys."""
    qkv_bias: bool = False
    linear_bias: bool = False
    """Biases of every linear layer."""
    post_norms: bool = False
    """Norms after attention and feed-forward part, besides those before them."""
    learned_positions: int | None = Field(default=None, ge=1)
    """Rows of the embedding of positions; None for rotary or other positions without parameters."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that the windowed layers attend to; None if every layer attends to all."""
    windowed_layers: int | None = Field(default=None, ge=1)
    """Layers with the window; None for all of them."""
    mtp_layers: int | None = Field(default=None, ge=1)
    """Layers of multi-token prediction, besides `num_layers`."""
    index_topk: int | None = Field(default=None, ge=1)
    """Tokens that an indexer chooses for each query (DeepSeek-V3.2)."""
    router_balance: str | None = Field(default=None, pattern="^(aux_loss|bias|none)$")
    """Balance of the experts' load: an auxiliary loss, a bias of each expert (DeepSeek-V3), or none."""
    lora_rank: int | None = Field(default=None, ge=1)
    """Rank of the adapters that are trained in place of the weights (LoRA); None if all weights are trained."""
    lora_targets: str | None = Field(default=None, pattern="^(all|attention)$")
    """Layers with adapters: every linear one (None too), or those of attention."""
    base_precision: str | None = Field(default=None, pattern="^(nf4|int8)$")
    """Precision of the frozen weights (QLoRA); None if they are not quantised."""
    num_params: int | None = None
    """Parameters as the card states them; `cclsearch.card.arch.count_parameters` computes them from the widths."""

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a model does not have is not written: run scripts refuse unknown fields."""
        return {name: value for name, value in write(self).items() if value or name not in _OPTIONAL}

    @property
    def features(self) -> tuple[str, ...]:
        """Names of `FEATURES` that the model has."""
        return tuple(name for name in FEATURES if getattr(self, name))

    def without(self, feature: str) -> ModelArch:
        """The model without one of its features; latent attention becomes attention with heads of `v_head_dim`."""
        names = LATENT if feature == "kv_lora_rank" else (feature,)
        plain = {"head_dim": self.v_head_dim} if feature == "kv_lora_rank" else {}
        return self.model_copy(update={**{name: type(self).model_fields[name].default for name in names}, **plain})


def make_model(values: Mapping[str, Any]) -> ModelArch:
    """The shape in the fields of a card; other fields are ignored."""
    moe_fields = {field: values[field] for field in MoEArch.model_fields if field in values}
    arch = {field: values[field] for field in ModelArch.model_fields if field in values and field != "moe"}
    is_moe = bool(values.get("moe", "num_experts" in values))
    return ModelArch(**arch, moe=MoEArch(**moe_fields) if is_moe else None)


class StatedHardware(Model):
    """Hardware that a card's file states: all, a part or nothing."""

    accelerator: str | None = None
    """Key of `hardware.yaml` (`a100-40`, `h100`, `tpu-v5e`, `cpu`), or the card's own name of one that it describes."""
    num_accelerators: int | None = Field(default=None, ge=1)
    accelerators_per_node: int | None = Field(default=None, ge=1)
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory of one accelerator."""
    scale_up_gbps: float | None = None
    """Gbit/s per accelerator inside a node (NVLink, ICI)."""
    scale_out_gbps: float | None = None
    """Gbit/s per accelerator between nodes."""
    torus: tuple[int, ...] | None = None
    """Chips along each ICI axis of a TPU slice; None for other accelerators."""
    peak_flops: Config | None = None
    """Dense FLOP/s by dtype that the card states; None: the values of `hardware.yaml`."""
    memory_gb_per_s: float | None = None
    """Bandwidth of the device memory that the card states; None: the value of `hardware.yaml`."""
    scale_up_domain: int | None = Field(default=None, ge=1)
    """Accelerators that the scale-up links connect, if more than a node (72 for GB200 NVL72)."""
    nominal: bool = False
    """Whether the rates are stand-ins of a recording's unknown accelerator: good enough to order predictions."""
    host_cores: int | None = Field(default=None, ge=1)
    """CPU cores shared by the processes of a node, if the accelerators are CPU processes; None else, or if unknown."""
    links: LinkMatrix | None = None
    """Measured links of the cluster, which count instead of the two bandwidths; only a profile brings them."""
    cluster: str | None = None
    """A simulated network in one line (docs/simulator.md), which counts instead of the two bandwidths."""
    kernel_tables: str | None = None
    """Measured times of kernels that predictions of serving use too (docs/serving.md); None: closed forms alone."""
    groups: tuple[HardwareGroup, ...] = ()
    """Unlike hardware in one job, in the order of the ranks; the fields above then describe the first group."""

    @model_serializer(mode="wrap")
    def _leave_out_groups(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Groups and kernel tables are written only if there are some."""
        return {name: v for name, v in write(self).items() if v or name not in ("groups", "kernel_tables")}


class Hardware(StatedHardware):
    """Hardware of the workload. Bandwidths are per accelerator and direction (half of NVLink's advertised number)."""

    accelerator: str
    num_accelerators: int = Field(ge=1)
    accelerators_per_node: int = Field(ge=1)
    memory_gib: float = Field(gt=0)

    @property
    def domain(self) -> int:
        """Number of accelerators that the scale-up links connect: one node, unless the links go further."""
        return min(self.scale_up_domain or self.accelerators_per_node, self.num_accelerators)

    @property
    def known_links(self) -> LinkMatrix | None:
        """The measured links, or those that unlike groups state; None if two bandwidths describe them."""
        if self.links is None and self.groups and has_unlike_links(self.groups):
            return make_links(self.groups, self.accelerators_per_node)
        return self.links

    def of_group(self, number: int) -> Hardware:
        """The hardware as if all of it were of one group; the group's `speed` is not applied."""
        group = self.groups[number]
        update: dict[str, Any] = {"accelerator": group.accelerator, "memory_gib": group.gib}
        if number:  # what the card states of its accelerator is of the first group
            update |= {"peak_flops": None, "memory_gb_per_s": None, "nominal": False}
        return self.model_copy(update=update)

    @property
    def chip(self) -> Accelerator:
        """The accelerator with its rates: the catalogue's, with the numbers that the card states instead.

        `NOMINAL` for one that is unknown and that the card does not describe.
        """
        found = state_accelerator(self.accelerator, self.memory_gib, self.peak_flops, self.memory_gb_per_s) or NOMINAL
        return found.model_copy(update={"nominal": True}) if self.nominal else found


class Inferred(Model):
    """A value that the card's file does not state."""

    field: str
    """Name of the field, as in `--set`."""
    value: Value | tuple[int, ...]
    source: str
    """Source of the value: a catalogue row and what identified it, or other fields of the card."""


class KnobDeclaration(Model):
    """A knob that a card, profile or framework declares, with its choices."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,79}$")
    choices: tuple[Value, ...] = Field(min_length=1)
    description: str = ""
    neutral: Value | None = None
    """Value that trials without the knob had, if it was added during the search; None if every trial has it."""


class StatedCard(Model):
    """One workload as its file states it: the hardware may be left to the cluster."""

    name: str
    """Stem of the file, for example `wl2`."""
    title: str
    """One line for people."""
    task: str = Phase.TRAINING.value
    """Kind of workload: a name in `cclsearch.plugins.TASKS` if it can be searched."""
    phase: Phase | None = None
    """None for a task that names none."""
    family: str
    """Name of the model, for example `llama-3.1-8b`; empty for a task without a model."""
    model: ModelArch | None = None
    """None for a task without a model."""
    work: Config
    """The task's fixed numbers, such as `global_batch_size` and `seq_len` of training."""
    precision: str
    """`bf16`, `fp32`, ...: the dtype of the matrix multiplications; empty for a task that has none."""
    alternative_precisions: tuple[str, ...] = ()
    """What else a search may try: precisions, and values of knobs that change the numbers (`kv_cache_dtype=fp8`)."""
    max_loss_deviation: float | None = None
    """Largest relative deviation of losses that these may have from the card's own numbers on equal data."""
    weight_block: int = 0
    """Weights along an axis that share a scale in the checkpoint and must stay on one rank; 0 if none must."""
    hardware: StatedHardware
    framework: str
    """A framework in `launchers/` (`megatron`, `torchtitan`, `maxtext`, `cpu`, `jax-cpu`), or any other name; empty if
    the card names none."""
    framework_version: str = ""
    """The version in the framework's name (`torchtitan-0.1.0`), or of the field of that name."""
    knobs: tuple[KnobDeclaration, ...] = ()
    """Knobs in addition to the framework's, or with other choices."""
    recording: str | None = None
    """The recorded landscape (folder under `workloads/recordings/`) that is used if no cluster is named."""
    source: str = ""
    licence: str = ""
    notes: tuple[str, ...] = ()
    """Missing or implausible values of the card's file and how each was handled, one line each."""
    inferred: tuple[Inferred, ...] = ()
    """Values that the card's file does not state, each with its source."""
    configuration: Config = Config()
    """The parallel plan that the card states (`tp`, `dp`, `pp`, `ep`, `cp`, `dp_replicate`, `dp_shard`,
    `micro_batch_size`); may be partial.
    """
    template: Config = Config()
    """The other fields of a CCL-Bench card, as they are: dotted path -> value; an item of a list has its number as the
    last part of its path."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for a reader of this card, one line each: its notes, and its inferred values by source."""
        by_source: dict[str, list[str]] = {}
        for each in self.inferred:
            value = "x".join(map(str, each.value)) if isinstance(each.value, tuple) else format_knob_value(each.value)
            by_source.setdefault(each.source, []).append(f"{each.field} {one_line(value, 60).removesuffix('.0')}")
        return (
            *self.notes,
            *(f"inferred: {', '.join(found)}; source: {source}" for source, found in by_source.items()),
        )


class Card(StatedCard):
    """One workload, frozen for a whole search."""

    hardware: Hardware

    @property
    def arch(self) -> ModelArch:
        """The model's shape; raises UserError for a task without a model."""
        if self.model is None:
            raise UserError(f"{self.name}: the card of a {self.task} workload has no model")
        return self.model

    @property
    def precisions(self) -> tuple[str, ...]:
        """Every precision that a trial may have, the card's own first."""
        others = (each for each in self.alternative_precisions if "=" not in each)
        return tuple(dict.fromkeys((self.precision, *others)))

    def allows(self, knob: str, choice: Value) -> bool:
        """Whether a trial may have this value of a knob that changes the numbers."""
        return f"{knob}={format_knob_value(choice)}".lower() in self.alternative_precisions

    def for_trial(self, config: Mapping[str, Value]) -> Card:
        """The card of one trial: with the precision of its configuration, and no alternatives."""
        if not self.alternative_precisions:
            return self
        precision = str(config.get(PRECISION, self.precision))
        return self.model_copy(update={"precision": precision, "alternative_precisions": ()})

    def number(self, name: str) -> int:
        """A whole number of the task's work; raises UserError if the card has none of that name."""
        value = self.work.get(name)
        if not isinstance(value, int):
            raise UserError(f"{self.name}: a {self.task} workload has no number {name!r}")
        return value
