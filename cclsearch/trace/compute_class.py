"""The classes of compute kernels."""

from __future__ import annotations

from enum import IntEnum


class ComputeClass(IntEnum):
    """Class of a compute kernel, from its name (`rules/kernel_classes.csv`).

    A fused kernel has the class that comes first in this order: moe, state_space, attention, convolution, gemm, norm,
    rope, sampling, quantization, optimizer, embedding, reduction, elementwise. What also communicates communicates.
    """

    OTHER = 0
    GEMM = 1
    """Matrix products and their split-K reductions."""
    ATTENTION = 2
    NORM = 3
    ELEMENTWISE = 4
    """Also data movement: copies, gathers, concatenations, writes to the cache of keys and values."""
    REDUCTION = 5
    """Also softmax, losses, scans, sorts and selections."""
    MOE = 6
    """Routing, permutation and products of experts; a metric asks the card whether the model has experts."""
    OPTIMIZER = 7
    EMBEDDING = 8
    CONVOLUTION = 9
    ROPE = 10
    """Rotary position embedding."""
    QUANTIZATION = 11
    SAMPLING = 12
    """Sampling of tokens, and checks of drafted tokens."""
    STATE_SPACE = 13
    """State-space models and linear attention."""
