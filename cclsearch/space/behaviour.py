"""What a framework file says about how the framework trains, where no knob says it: predictions use it."""

from __future__ import annotations

from typing import Literal

from cclsearch.core.values import Model


class Behaviour(Model):
    """How a framework does what no knob of the space decides; a field that is not set is unknown, and trials teach it.

    A knob of the same meaning counts more than the field.
    """

    pipeline_split: Literal["even", "balanced"] | None = None
    """`even`: every pipeline stage has as many layers, and the last one the output projection besides. `balanced`: by
    their work, in whole layers."""
    sequence_parallel: bool | None = None
    """Whether tensor-parallel ranks split the sequence between the linear layers."""
    overlapped_zero_stages: tuple[int, ...] | None = None
    """The ZeRO stages (0: none) at which gradients are reduced during the last backward pass; else after it."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """What data-parallel ranks shard: nothing, optimizer states, gradients too, weights too."""
    gradient_bytes: Literal[2, 4] | None = None
    """Bytes per parameter in which gradients are kept over the micro-batches of a step."""
    source: str = ""
    """Where that is from: documentation or code, with its version."""
