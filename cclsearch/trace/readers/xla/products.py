"""FLOP and bytes of the matrix products of an XLA program: 2 FLOP per multiply-add, as XLA's HloCostAnalysis counts.

Bytes are the minimum traffic of a product: each operand once, its result once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cclsearch.trace.events import OpCost, OpShape
from cclsearch.trace.flops import precision_of
from cclsearch.trace.names.kinds import bytes_per_element
from cclsearch.trace.readers.protobuf_wire import to_signed

MAX_FLOPS = 1e30
# More means a damaged file.
_MAX_POSITIONS = 1 << 12
"""Largest smaller extent of an output and a window in one dimension."""
# Five products instead of two, as in `torch.utils.flop_counter`.
_BACKWARD_ATTENTION = 2.5
"""FLOP of attention's backward pass over its forward pass."""


class Array(NamedTuple):
    """Element type and dimensions of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nelems(self) -> float:
        """Number of elements."""
        return math.prod(map(float, self.dims))


class WindowDim(NamedTuple):
    """Movement of a convolution's window along one dimension."""

    size: int
    stride: int
    padding_low: int
    window_dilation: int
    base_dilation: int


@dataclass(frozen=True)
class Convolution:
    """A convolution in the terms of its forward pass, and the places of its dimensions."""

    given: Array
    kernel: Array
    result: Array
    input_batch: int
    input_feature: int
    output_feature: int
    input_spatial: tuple[int, ...]
    output_spatial: tuple[int, ...]
    window: Sequence[WindowDim]
    feature_groups: int
    batch_groups: int


def dot_cost(left: Array, right: Array, result: Array, contracted: Sequence[int]) -> OpCost | None:
    """Return the cost of a product: 2 x elements of the result x size of the contracted dimensions of `left`."""
    depth = math.prod(float(left.dims[dim]) for dim in contracted)
    return _cost(2.0 * result.nelems * depth, (left, right, result))


def convolution_cost(convolution: Convolution) -> OpCost | None:
    """Return the cost of a convolution, of its gradient too; window positions outside the input do not count."""
    given, result = convolution.given, convolution.result
    positions = 1.0
    for at, one in enumerate(convolution.window):
        size, out = given.dims[convolution.input_spatial[at]], result.dims[convolution.output_spatial[at]]
        positions *= _count_positions(one, size, out)
    channels = given.dims[convolution.input_feature] / convolution.feature_groups
    batch = given.dims[convolution.input_batch] / convolution.batch_groups
    adds = channels * result.dims[convolution.output_feature] * batch * positions
    return _cost(2.0 * adds, (given, convolution.kernel, result))


def fused_attention_cost(operands: Sequence[Array], scores: Sequence[int], *, is_backward: bool) -> OpCost | None:
    """Return the cost of cuDNN's fused attention, without a causal mask's saving: two products, five in the backward.

    `operands`: query, key and value, with the width of a head last. `scores`: (batch, heads, queries, keys).
    """
    query = operands[0]
    forward = 4.0 * math.prod(map(float, scores)) * query.dims[-1]
    return _cost(forward * (_BACKWARD_ATTENTION if is_backward else 1.0), (*operands, query))


def sum_costs(costs: Sequence[OpCost]) -> OpCost | None:
    """Return the cost of several products of one kernel, in the precision of the largest; None without any."""
    if len(costs) < 2:
        return costs[0] if costs else None
    sizes = [cost.bytes_accessed for cost in costs if cost.bytes_accessed]
    largest = max(costs, key=lambda cost: cost.flops or 0.0)
    total = sum(cost.flops or 0.0 for cost in costs)
    return OpCost(total, sum(sizes) if len(sizes) == len(costs) else None, largest.precision)


def _cost(flops: float, arrays: Sequence[Array]) -> OpCost | None:
    if not 0.0 < flops < MAX_FLOPS:
        return None
    sizes = [bytes_per_element(array.dtype) for array in arrays]
    moved = sum(array.nelems * size for array, size in zip(arrays, sizes, strict=True) if size)
    precision = precision_of(OpShape((), (arrays[0].dtype,)))
    return OpCost(flops, moved if all(sizes) else None, precision)


def _count_positions(window: WindowDim, size: int, out: int) -> int:
    """Return how many pairs of an output and a window position meet an element of the input, not padding or a gap."""
    padding = to_signed(window.padding_low)
    few, many = sorted(((out, window.stride), (window.size, window.window_dilation)))
    if few[0] > _MAX_POSITIONS or min(few[1], many[1], window.base_dilation) < 1:
        raise ValueError("not a window")
    last = (size - 1) * window.base_dilation
    return sum(_count_steps(at * few[1] - padding, many, last, window.base_dilation) for at in range(few[0]))


def _count_steps(start: int, steps: tuple[int, int], last: int, multiple: int) -> int:
    """Return how many of `start + i * step`, i below the number of steps, are from 0 to `last` and such a multiple."""
    count, step = steps
    low, high = max(0, -(start // step)), min(count - 1, (last - start) // step)
    common = math.gcd(step, multiple)
    if high < low or start % common:
        return 0
    every = multiple // common  # of the indices, beginning with the one whose value is a multiple
    first = -(start // common) * pow(step // common, -1, every) % every
    return (high - first) // every - (low - 1 - first) // every
