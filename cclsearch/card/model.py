"""The frozen card that the engine works with; `cclsearch.card.load` makes one from a CCL-Bench v1 YAML file."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from cclsearch.core.values import Model, Value


class Phase(StrEnum):
    """What the workload does."""

    TRAINING = "training"
    INFERENCE = "inference"


class MoEArch(Model):
    """The mixture-of-experts part of a model."""

    num_experts: int = Field(ge=2)
    """Routed experts a layer."""
    top_k: int = Field(ge=1)
    """Routed experts that each token visits."""
    expert_intermediate_size: int = Field(ge=1)
    """Feed-forward width of one expert."""
    num_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token visits, of the same width."""
    num_dense_layers: int = Field(default=0, ge=0)
    """Leading layers with an ordinary feed-forward part."""


class ModelArch(Model):
    """A decoder-only transformer. Widths count elements."""

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    tied_embeddings: bool = False
    gated_mlp: bool = True
    """Three matrices in the feed-forward part (SwiGLU) rather than two."""
    moe: MoEArch | None = None
    num_params: int | None = None
    """As the card states it; `cclsearch.tasks.training.arch.count_parameters` derives the number from the widths."""


class Hardware(Model):
    """What the workload runs on. Bandwidths are per accelerator and in one direction (half of NVLink's sold figure)."""

    accelerator: str
    """Key of `hardware.yaml` (`a100-40`, `h100`, `tpu-v5e`, `cpu`), or the card's own word where it is none."""
    num_accelerators: int = Field(ge=1)
    accelerators_per_node: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    """Memory of one accelerator."""
    scale_up_gbps: float | None = None
    """Gbit/s per accelerator inside a node (NVLink, ICI)."""
    scale_out_gbps: float | None = None
    """Gbit/s per accelerator between nodes."""
    torus: tuple[int, ...] | None = None
    """Chips along each ICI axis of a TPU slice; None elsewhere."""
    host_cores: int | None = Field(default=None, ge=1)
    """Where the accelerators are processes on a CPU: cores that those of one node share. None elsewhere, or unknown."""


class KnobDeclaration(Model):
    """A knob that a card, profile or framework declares, with its choices."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,40}$")
    choices: tuple[Value, ...] = Field(min_length=1)
    description: str = ""


class Card(Model):
    """One workload, frozen for a whole search."""

    name: str
    """`wl2`: the file's stem."""
    title: str
    """One line for people."""
    phase: Phase
    family: str
    """The model's own name, for example `llama-3.1-8b`."""
    arch: ModelArch
    global_batch_size: int = Field(ge=1)
    """Sequences per optimizer step, over all accelerators."""
    seq_len: int = Field(ge=1)
    """Tokens per sequence."""
    precision: str
    """`bf16`, `fp32`, ...: the dtype of the matrix multiplications."""
    hardware: Hardware
    framework: str
    """A framework in `launchers/` (`megatron`, `torchtitan`, `maxtext`, `cpu`, `jax-cpu`), or any other word."""
    knobs: tuple[KnobDeclaration, ...] = ()
    """Knobs declared beyond the framework's own, or with other choices."""
    recording: str | None = None
    """The recorded landscape (folder under `workloads/recordings/`) that stands in where there is no cluster."""
    source: str = ""
    licence: str = ""
    notes: tuple[str, ...] = ()
    """What the card's file left out, or says implausibly, and what was done about it; one line each."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step: the fixed work."""
        return self.global_batch_size * self.seq_len
