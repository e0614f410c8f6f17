"""The thresholds of the admission rules of training."""

from __future__ import annotations

from pydantic import Field

from cclsearch.core.values import Model


class TrainingThresholds(Model):
    """Limits that a run must meet to be ranked. Fractions are of the expected value."""

    min_timed_steps: int = Field(default=3, ge=1)
    """Minimum number of optimizer steps in the unprofiled window; the requested number also applies."""
    min_warmup_steps: int = Field(default=1, ge=0)
    """Minimum number of optimizer steps before that window; the requested number also applies."""
    max_spread: float = Field(default=0.15, gt=0)
    """Relative spread of the step times on accelerators."""
    max_spread_cpu: float = Field(default=0.5, gt=0)
    """The same if ranks share the cores of a CPU."""
    max_mean: float = Field(default=1.8, gt=1)
    """Mean divided by median of the step times, on accelerators: above it, a few steps took the time of the others, as
    if the device is not waited for after each step."""
    max_mean_cpu: float = Field(default=3.0, gt=1)
    """The same if ranks share the cores of a CPU: up to 1.6 was seen under load (benchmarks/cheats.py)."""
    max_first_step: float = Field(default=2.0, gt=1)
    """First timed step divided by the median of the others: above it, a warm-up step was timed."""
    max_first_step_cpu: float = Field(default=4.0, gt=1)
    """The same if ranks share the cores of a CPU."""
    params_below: float = Field(default=0.02, ge=0)
    """Fraction of parameters below the card's that counts as rounding."""
    params_above: float = Field(default=0.15, ge=0)
    """Fraction above the card's that counts as padding (a vocabulary padded to a multiple, biases)."""
    traced_flops_below: float = Field(default=0.05, ge=0)
    """Fraction by which the matrix FLOPs of a traced step, plus the largest possible FLOPs of kernels without shapes,
    may be below the model's.
    """
    traced_costs_below: float = Field(default=0.25, ge=0)
    """The same if the FLOPs are a compiler's costs, not from shapes."""
    # Recomputation adds a third; padding and full causal attention add more.
    traced_flops_above: float = Field(default=1.0, ge=0)
    """Fraction by which they may exceed it."""
    attended_below: float = Field(default=0.01, ge=0)
    """Fraction of the queries of backward attention that may be missing, if every kernel has shapes."""
    max_hidden_share: float = Field(default=0.02, ge=0)
    """Share of the compute time without shapes up to which counts of calls are complete."""
    min_recomputed: float = Field(default=0.5, ge=0, le=1)
    """Share of the layers' forward FLOPs that must be repeated if the configuration recomputes whole layers; PyTorch
    stops as soon as the last saved tensor is there."""
    max_narrower_share: float = Field(default=0.05, ge=0)
    """Share of the time of matrix products in a narrower precision than the card's."""
    min_reduced_share: float = Field(default=0.9, ge=0)
    """Gradients that are reduced over data-parallel ranks, as a share of the parameters."""
    min_traced_time: float = Field(default=0.6, gt=0)
    """Minimum of traced step time (profiler on) divided by the unprofiled one."""
    # Load during the timed window makes it longer, which gains a cheat nothing.
    min_traced_time_cpu: float = Field(default=0.1, gt=0)
    """The same if ranks share the cores of a CPU."""
    max_traced_time: float = Field(default=2.5, gt=1)
    """Maximum of the same, on accelerators."""
    max_traced_time_cpu: float = Field(default=6.0, gt=1)
    """Maximum of the same on a CPU, where the profiler uses time of the ranks' cores."""
    max_uncounted: float = Field(default=0.25, ge=0)
    """Time of the timed window between its steps, as a share of the steps' sum, on accelerators: a framework may log or
    load data there."""
    max_uncounted_cpu: float = Field(default=0.05, ge=0)
    """The same on a CPU, where `cpu` and `jax-cpu` do nothing between steps: honest windows, also under load, took at
    most 1.000 x their steps (benchmarks/cheats.py)."""
    max_uncounted_s: float = Field(default=0.1, ge=0)
    """Seconds of the window that are never questioned: a process that waits for a core."""
    max_quantum: float = Field(default=0.05, gt=0)
    """Step times that are all multiples of this share of their median were rounded or made up."""
    max_mfu: float = Field(default=1.0, gt=0)
    """Model FLOPs divided by the accelerators' peak: above it, the step time is impossible."""


DEFAULT = TrainingThresholds()
