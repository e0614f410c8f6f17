"""Every threshold of the admission gate, in one place."""

from __future__ import annotations

from pydantic import Field

from cclsearch.core.values import Model


class Thresholds(Model):
    """What a run must keep to be ranked. Fractions are of the expected value."""

    min_timed_steps: int = Field(default=3, ge=1)
    """Optimizer steps in the unprofiled window; never fewer than were asked for either."""
    min_warmup_steps: int = Field(default=1, ge=0)
    """Optimizer steps before that window; never fewer than were asked for either."""
    max_spread: float = Field(default=0.15, gt=0)
    """Relative spread of the step times on accelerators."""
    max_spread_cpu: float = Field(default=0.5, gt=0)
    """The same where ranks share a CPU's cores."""
    max_first_step: float = Field(default=2.0, gt=1)
    """First timed step over the median of the others: above it, warm-up was counted."""
    max_first_step_cpu: float = Field(default=4.0, gt=1)
    """The same where ranks share a CPU's cores."""
    params_below: float = Field(default=0.02, ge=0)
    """How many parameters fewer than the card's are taken for rounding."""
    params_above: float = Field(default=0.15, ge=0)
    """How many more are taken for padding (a vocabulary padded to a multiple, biases)."""
    traced_flops_below: float = Field(default=0.25, ge=0)
    """How far the traced matrix FLOPs of a step may fall short of the model's."""
    traced_flops_above: float = Field(default=1.0, ge=0)
    """How far they may exceed it: recomputation adds a third, padding and uncut causal attention some more."""
    min_flops_coverage: float = Field(default=0.5, ge=0, le=1)
    """Share of the compute time that must have shapes before too few FLOPs mean too little work."""
    min_traced_time: float = Field(default=0.6, gt=0)
    """Step time in the traces (profiler on) over the unprofiled one, at least."""
    max_traced_time: float = Field(default=2.5, gt=1)
    """The same, at most, on accelerators."""
    max_traced_time_cpu: float = Field(default=6.0, gt=1)
    """The same, at most, on a CPU, where the profiler takes its time from the ranks' cores."""
    max_mfu: float = Field(default=1.0, gt=0)
    """Model FLOPs over the accelerators' peak: above it, the step time cannot be true."""
    max_foreign_share: float = Field(default=0.15, gt=0)
    """Cores that foreign load takes from the ranks, over the cores that the ranks use, on accelerators."""
    max_foreign_share_cpu: float = Field(default=0.25, gt=0)
    """The same where the ranks compute on those cores; repeats and the spread see the rest."""


DEFAULT = Thresholds()
