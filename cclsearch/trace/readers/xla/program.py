"""Reads a compiled XLA program (HloProto) as far as its matrix products need: what an instruction computes.

Profiles of JAX contain the programs that ran, in the plane `/host:metadata`. Fields (openxla/xla, `hlo.proto` and
`xla_data.proto`): HloProto hlo_module=1; HloModuleProto computations=3; HloComputationProto instructions=2 id=5;
HloInstructionProto name=1 opcode=2 shape=3 window=15 convolution_dimension_numbers=16 custom_call_target=28
dot_dimension_numbers=30 id=35 operand_ids=36 called_computation_ids=38 backend_config=43 feature_group_count=50
batch_group_count=58; ShapeProto element_type=2 dimensions=3 tuple_shapes=4; DotDimensionNumbers
lhs_contracting_dimensions=1; ConvolutionDimensionNumbers input_batch_dimension=7 input_feature_dimension=8
output_feature_dimension=10 input_spatial_dimensions=11 output_spatial_dimensions=12; Window dimensions=1;
WindowDimension size=1 stride=2 padding_low=3 window_dilation=5 base_dilation=6.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cclsearch.trace.events import OpCost
from cclsearch.trace.readers.protobuf_wire import (
    ByteRange,
    MalformedMessage,
    read_fields,
    read_varint,
    text_of,
)
from cclsearch.trace.readers.xla.planes import ProgramBytes
from cclsearch.trace.readers.xla.products import (
    Array,
    Convolution,
    WindowDim,
    convolution_cost,
    dot_cost,
    fused_attention_cost,
    sum_costs,
)

MAX_DEPTH = 40
"""Calls inside calls that are followed; XLA nests a few."""
_MAX_DIMS = 32
_CALLS = frozenset({"fusion", "call", "async-start", "custom-call"})
"""Opcodes that run the computations they call once. The operations in a loop have rows of their own."""
_PRIMITIVE_TYPES = {
    **{1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16", 11: "f32"},
    **{12: "f64", 15: "c64", 16: "bf16", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 23: "f8e4m3b11fnuz"},
    **{24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 28: "f8e4m3", 29: "f8e3m4"},
}
"""PrimitiveType of `xla_data.proto`."""
_UNDERSCORED = re.compile(r"[.\-]")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a program, with the fields that are decoded only if it may be a product."""

    name: str
    opcode: str
    computation: int
    called: tuple[int, ...]
    target: str
    """Target of a custom call (`__cublas$lt$matmul`)."""
    operands: tuple[int, ...]
    spans: dict[int, ByteRange] = field(default_factory=dict)
    """Field number -> bytes of its embedded message."""
    counts: dict[int, int] = field(default_factory=dict)
    """Field number -> whole number."""

    @property
    def kernel(self) -> str:
        """Name of the kernel that XLA generates for the instruction."""
        return _UNDERSCORED.sub("_", self.name)


class Program:
    """The instructions of a program by name, and the cost of their matrix products."""

    def __init__(self, source: ProgramBytes) -> None:
        """Decode the names and references of all instructions; raises MalformedMessage."""
        self._data = source.data
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[int, list[Instruction]] = {}
        self._by_id: dict[int, Instruction] = {}
        self._costs: dict[str, OpCost | None] = {}
        for module in self._messages(source.span, 1):
            for computation in self._messages(module, 3):
                self._add_computation(computation)

    @cached_property
    def by_kernel(self) -> dict[str, Instruction]:
        """Name of a generated kernel -> the first instruction that it may be compiled from."""
        found: dict[str, Instruction] = {}
        for instruction in self.instructions.values():
            if instruction.opcode == "fusion":
                found.setdefault(instruction.kernel, instruction)
        return found

    def cost_of(self, name: str) -> OpCost | None:
        """Return the cost of one run of the instruction's matrix products; None if it has none or they are unknown."""
        instruction = self.instructions.get(name)
        return self._cost(instruction, 0) if instruction else None

    def _cost(self, instruction: Instruction, depth: int) -> OpCost | None:
        if instruction.name not in self._costs:
            self._costs[instruction.name] = None  # while it is computed: a program that calls itself is damaged
            self._costs[instruction.name] = self._find_cost(instruction, depth)
        return self._costs[instruction.name]

    def _find_cost(self, instruction: Instruction, depth: int) -> OpCost | None:
        try:
            if instruction.opcode == "dot":
                return self._dot(instruction, self._whole_numbers(instruction.spans[30], 1))
            if instruction.opcode == "convolution":
                return self._convolution(instruction, "")
            if instruction.opcode == "custom-call" and (found := self._library_call(instruction)):
                return found
        except (MalformedMessage, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
            return None
        if instruction.opcode not in _CALLS or depth >= MAX_DEPTH:
            return None
        inner = (one for number in instruction.called for one in self.computations.get(number, ()))
        return sum_costs([cost for one in inner if (cost := self._cost(one, depth + 1))])

    def _library_call(self, call: Instruction) -> OpCost | None:
        if call.target.startswith("__cudnn$conv"):
            return self._convolution(call, call.target)
        if not call.target.startswith(("__cublas$", "__cudnn$fmha")):
            return None
        start, stop = call.spans[43]
        config = json.loads(self._data[start:stop])
        if call.target.startswith("__cudnn$fmha"):
            dims = config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"]
            return fused_attention_cost(
                self._operands(call)[:3], [int(size) for size in dims], is_backward="Backward" in call.target
            )
        stated = config["gemm_backend_config"]["dot_dimension_numbers"]
        return self._dot(call, [int(dim) for dim in stated["lhs_contracting_dimensions"]])

    def _dot(self, instruction: Instruction, contracted: Sequence[int]) -> OpCost | None:
        left, right = self._operands(instruction)[:2]
        return dot_cost(left, right, self._results(instruction)[0], contracted)

    def _convolution(self, instruction: Instruction, target: str) -> OpCost | None:
        first, second = self._operands(instruction)[:2]
        result = self._results(instruction)[0]
        parts = first, second, result
        if "BackwardInput" in target:
            parts = result, second, first
        elif "BackwardFilter" in target:
            parts = first, result, second
        numbers, window = instruction.spans[16], instruction.spans.get(15)
        scalar = self._scalars(numbers)
        return convolution_cost(
            Convolution(
                *parts,
                input_batch=scalar.get(7, 0),
                input_feature=scalar.get(8, 0),
                output_feature=scalar.get(10, 0),
                input_spatial=self._whole_numbers(numbers, 11),
                output_spatial=self._whole_numbers(numbers, 12),
                window=[self._window(span) for span in self._messages(window, 1)] if window else [],
                feature_groups=instruction.counts.get(50, 1) or 1,
                batch_groups=instruction.counts.get(58, 1) or 1,
            )
        )

    def _window(self, span: ByteRange) -> WindowDim:
        given = self._scalars(span)
        return WindowDim(given.get(1, 1), given.get(2, 1), given.get(3, 0), given.get(5, 1), given.get(6, 1))

    def _operands(self, instruction: Instruction) -> list[Array]:
        return [self._results(self._by_id[number])[0] for number in instruction.operands[:3]]

    def _results(self, instruction: Instruction) -> list[Array]:
        """Return the arrays of the instruction's result: the members of a tuple, without tuples inside it."""
        shape = instruction.spans[3]
        members = self._messages(shape, 4)
        return [self._array(member) for member in members] if members else [self._array(shape)]

    def _array(self, shape: ByteRange) -> Array:
        element = self._scalars(shape).get(2, 0)
        dims = self._whole_numbers(shape, 3)
        if len(dims) > _MAX_DIMS:
            raise MalformedMessage
        return Array(_PRIMITIVE_TYPES.get(element, ""), dims)

    def _add_computation(self, span: ByteRange) -> None:
        number = self._scalars(span).get(5, 0)
        self.computations[number] = found = []
        for message in self._messages(span, 2):
            key, instruction = self._instruction(message, number)
            found.append(instruction)
            self.instructions[instruction.name] = self._by_id[key] = instruction

    def _instruction(self, span: ByteRange, computation: int) -> tuple[int, Instruction]:
        texts = {1: "", 2: "", 28: ""}
        lists: dict[int, list[int]] = {36: [], 38: []}
        spans: dict[int, ByteRange] = {}
        counts: dict[int, int] = {}
        for number, wire, value, _ in read_fields(self._data, *span):
            if wire == 2 and number in texts:
                texts[number] = text_of(self._data, value)
            elif number in lists:
                lists[number] += self._packed(value) if wire == 2 else [value[0]]
            elif wire == 2:
                spans[number] = value
            elif wire == 0:
                counts[number] = value[0]
        name, opcode, target = texts.values()
        called, operands = tuple(lists[38]), tuple(lists[36])
        return counts.get(35, 0), Instruction(name, opcode, computation, called, target, operands, spans, counts)

    def _messages(self, span: ByteRange, wanted: int) -> list[ByteRange]:
        return [value for number, wire, value, _ in read_fields(self._data, *span) if number == wanted and wire == 2]

    def _scalars(self, span: ByteRange) -> dict[int, int]:
        return {number: value[0] for number, wire, value, _ in read_fields(self._data, *span) if wire == 0}

    def _whole_numbers(self, span: ByteRange, wanted: int) -> tuple[int, ...]:
        found: list[int] = []
        for number, wire, value, _ in read_fields(self._data, *span):
            if number == wanted:
                found += self._packed(value) if wire == 2 else [value[0]]
        return tuple(found)

    def _packed(self, span: ByteRange) -> list[int]:
        position, stop = span
        found = []
        while position < stop:
            value, position = read_varint(self._data, position, stop, False)
            found.append(value)
        return found
