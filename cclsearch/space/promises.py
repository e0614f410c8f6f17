"""Statements of a framework file beside knobs and rules: behaviour, agreement of losses, needs of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cclsearch.core.text import one_line
from cclsearch.core.values import Model


class RequiredVariable(Model):
    """An environment variable that trials of the framework need on the compute nodes."""

    env: str = Field(pattern=r"^[A-Z][A-Z0-9_]{1,60}$")
    file: str | None = None
    """A file that must be in the folder that the variable names."""
    what: str
    """Description of the variable, for messages."""

    def is_met(self, value: str | None) -> bool:
        """Whether that value is sufficient on this machine."""
        return value is not None and (self.file is None or (Path(value) / self.file).is_file())

    def describe(self, value: str | None, *, is_met: bool) -> str:
        """One line about the value on a node, or its absence."""
        wanted = self.what + (f" with {self.file}" if self.file else "")
        if value is None:
            return f"not set; it names {wanted}"
        return one_line(f"{value!r} is {'' if is_met else 'not '}{wanted}", 300)

    @property
    def remedy(self) -> str:
        """Return the step that fixes an unmet requirement."""
        return f"set {self.env} in the profile's `environment` to {self.what} that every node sees"


class LossBounds(Model):
    """A framework's promise about the losses or answers of one model, seed and data in all configurations."""

    bounds: dict[str, float] = {}
    """Precision -> largest relative deviation of two configurations at one step, or share of other answers."""
    none: str = ""
    """Reason why the framework promises nothing."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, declared: Any) -> Any:
        """Take `{fp32: 1e-6, bf16: 1e-3}` or `{none: REASON}`, as a framework file has it."""
        if not isinstance(declared, dict) or "bounds" in declared:
            return declared
        reason = declared.get("none", "")
        if "none" in declared and not (isinstance(reason, str) and reason.strip() and len(declared) == 1):
            raise ValueError("`none` needs a reason, and no bounds beside it")
        return {"none": reason, "bounds": {name: value for name, value in declared.items() if name != "none"}}

    @field_validator("bounds")
    @classmethod
    def _check_bounds(cls, bounds: dict[str, float]) -> dict[str, float]:
        for precision, bound in bounds.items():
            if not 0 < bound < 1:
                raise ValueError(f"the bound of {precision} must be a deviation between 0 and 1")
        return bounds

    def bound(self, precision: str) -> float | None:
        """The bound at that precision; None if there is none."""
        return self.bounds.get(precision)


Share = Annotated[float, Field(ge=0, le=1)]


class Behaviour(Model):
    """Behaviour of a framework that no knob of the space decides; trials show a field that is not set.

    A knob of the same meaning counts more than the field.
    """

    pipeline_split: Literal["even", "balanced"] | None = None
    """`even`: every pipeline stage has as many layers, and the last one the output projection besides. `balanced`: by
    their work, in whole layers."""
    sequence_parallel: bool | None = None
    """Whether tensor-parallel ranks split the sequence between the linear layers."""
    overlapped_zero_stages: tuple[int, ...] | None = None
    """ZeRO stages (0: none) that reduce gradients during the last backward pass; the others reduce after it."""
    blocks_between_stages: bool = True
    """Whether a message between pipeline stages delays more than its two ranks, by more the more nodes there are."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """State that data-parallel ranks shard: none, optimizer states, gradients too, weights too."""
    gradient_bytes: Literal[2, 4] | None = None
    """Bytes per parameter in which gradients are kept over the micro-batches of a step."""
    selective: tuple[Share, Share] | None = None
    """Share of a layer's activations that selective recomputation drops, and of the forward pass that it repeats."""
    pointwise: Literal["eager", "fused_norms", "fused", "compiled"] | None = None
    """Operators between matrix products: one kernel each, norms and rotary embeddings fused, activation functions too,
    or the whole step compiled."""
    source: str = ""
    """Source of the values: documentation or code, with its version."""
