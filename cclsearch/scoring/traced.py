"""What the traces of a trial show of its work, its communication and its origin, per step and over all ranks."""

from __future__ import annotations

from cclsearch.core.values import Model


class TracedProducts(Model):
    """The matrix products of one step, over all ranks; recomputation included."""

    flops: float
    """Of the kernels whose shapes or costs are recorded."""
    by_shapes: bool = True
    """Whether they follow from shapes, exactly; otherwise from the compiler's costs."""
    batched_flops: float = 0.0
    """The part of `flops` in batched products: attention, and experts that are computed in one call."""
    attended_rows: float | None = None
    """Query rows of the backward attention kernels, summed: sequences x heads x positions x layers. Recomputation does
    not repeat them. None if no such kernel has shapes."""
    attention_batches: tuple[int, ...] = ()
    """Different numbers of sequences per call of PyTorch's attention operators."""
    seen_s: float
    """Seconds of the kernels behind `flops`."""
    hidden_s: float
    """Seconds of kernels without shapes that may compute matrix products."""
    compute_s: float
    """Seconds of all compute."""
    hidden_flops: float | None = None
    """The most that the kernels of `hidden_s` can have computed; None if no rate is known."""
    seconds_by_precision: dict[str, float] = {}
    """Seconds of matrix products by precision (`bf16`, `fp32`), as far as shapes or kernel names show it."""

    @property
    def hidden_share(self) -> float:
        """Share of the compute time in kernels that may compute matrix products, but have no shapes."""
        return self.hidden_s / self.compute_s if self.compute_s else 1.0


class TracedCollective(Model):
    """Calls of one collective operation over groups of one kind, per step."""

    kind: str
    """A `CollectiveKind`."""
    axis: str = ""
    """The group's name in the framework (`mesh_dp`); empty if the trace has none."""
    group_size: int | None = None
    precision: str = ""
    """Of its elements, as cards name it (`bf16`); empty if the trace does not say."""
    calls: float
    """Over all ranks."""
    elements: float | None = None
    """Elements of the input, over all calls and ranks; None if a call does not say."""


class TracedRank(Model):
    """What shows whose trace one rank's is."""

    nonces: tuple[str, ...] = ()
    """Nonces of attempts in its annotations."""
    start_s: float | None = None
    """First and last event, in Unix time; None if the trace has no absolute times."""
    end_s: float | None = None
    digest: str = ""
    """Hash of the durations of its device events: two runs never have the same. Empty if there are too few."""
