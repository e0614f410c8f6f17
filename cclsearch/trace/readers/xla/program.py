"""FLOP of an XLA trace's matrix products, from the compiled program (HloProto) in the same file.

A row names its program and its instruction. Kernels of a CUDA graph name only the graph, which the program does not
contain: its generated kernels have the names of their instructions, and its library calls follow the program's order.

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
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from cclsearch.trace.events import Kind, OpCost, OpShape
from cclsearch.trace.flops import precision_of
from cclsearch.trace.names.kernels import PRODUCTS
from cclsearch.trace.names.kinds import bytes_per_element
from cclsearch.trace.readers.protobuf_wire import MalformedMessage, WireMessage, to_signed
from cclsearch.trace.readers.xla.planes import ProgramBytes, XlaRow

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


def count_positions(window: WindowDim, size: int, out: int) -> int:
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


# XLA nests a few.
MAX_DEPTH = 40
"""Calls inside calls that are followed."""
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


class Instruction:
    """One instruction of a program; its other fields are decoded only if it may be a product."""

    def __init__(self, fields: WireMessage, computation: int) -> None:
        self.fields = fields
        self.computation = computation
        self.name, self.opcode = fields.text(1), fields.text(2)
        self.called = fields.numbers(38)

    @property
    def kernel(self) -> str:
        """Name of the kernel that XLA generates for the instruction."""
        return _UNDERSCORED.sub("_", self.name)

    def results(self) -> list[Array]:
        """Return the arrays of the instruction's result: the members of a tuple, without tuples inside it."""
        shape = self.fields.message(3)
        return [_array(member) for member in shape.messages(4) or [shape]]


def _array(shape: WireMessage) -> Array:
    dims = shape.numbers(3)
    if len(dims) > _MAX_DIMS:
        raise MalformedMessage
    return Array(_PRIMITIVE_TYPES.get(shape.number(2), ""), dims)


class Program:
    """The instructions of a program by name, and the cost of their matrix products."""

    def __init__(self, source: ProgramBytes) -> None:
        """Decode the names and references of all instructions; raises MalformedMessage."""
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[int, list[Instruction]] = {}
        self._by_id: dict[int, Instruction] = {}
        self._costs: dict[str, OpCost | None] = {}
        for module in WireMessage(source.data, source.span).messages(1):
            for computation in module.messages(3):
                number = computation.number(5)
                found = [Instruction(message, number) for message in computation.messages(2)]
                self.computations[number] = found
                self.instructions.update((one.name, one) for one in found)
                self._by_id.update((one.fields.number(35), one) for one in found)

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
                return self._dot(instruction, instruction.fields.message(30).numbers(1))
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
        target = call.fields.text(28)  # such as `__cublas$lt$matmul`
        if target.startswith("__cudnn$conv"):
            return self._convolution(call, target)
        if not target.startswith(("__cublas$", "__cudnn$fmha")):
            return None
        config = json.loads(call.fields.bytes(43))
        if target.startswith("__cudnn$fmha"):
            dims = config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"]
            query, key, value = self._operands(call)[:3]  # with the width of a head last
            # Two products over (batch, heads, queries, keys), five in the backward pass; no saving of a causal mask.
            forward = 4.0 * math.prod(float(size) for size in dims) * query.dims[-1]
            flops = forward * (_BACKWARD_ATTENTION if "Backward" in target else 1.0)
            return _cost(flops, (query, key, value, query))
        stated = config["gemm_backend_config"]["dot_dimension_numbers"]
        return self._dot(call, [int(dim) for dim in stated["lhs_contracting_dimensions"]])

    def _dot(self, instruction: Instruction, contracted: Sequence[int]) -> OpCost | None:
        """Return the cost: 2 x elements of the result x size of the contracted dimensions of the left operand."""
        (left, right), result = self._operands(instruction)[:2], instruction.results()[0]
        depth = math.prod(float(left.dims[dim]) for dim in contracted)
        return _cost(2.0 * result.nelems * depth, (left, right, result))

    def _convolution(self, instruction: Instruction, target: str) -> OpCost | None:
        """Return the cost, of a gradient in terms of the forward pass; positions outside the input do not count."""
        first, second = self._operands(instruction)[:2]
        result = instruction.results()[0]
        given, kernel = first, second
        if "BackwardInput" in target:
            given, result = result, first
        elif "BackwardFilter" in target:
            kernel, result = result, second
        fields, places = instruction.fields, instruction.fields.message(16)
        input_spatial, output_spatial = places.numbers(11), places.numbers(12)
        dims = [dim for window in fields.messages(15)[-1:] for dim in window.messages(1)]
        defaults = {1: 1, 2: 1, 3: 0, 5: 1, 6: 1}
        positions = 1.0
        for at, dim in enumerate(dims):
            window = WindowDim(*(dim.number(*field) for field in defaults.items()))
            positions *= count_positions(window, given.dims[input_spatial[at]], result.dims[output_spatial[at]])
        channels = given.dims[places.number(8)] / (fields.number(50) or 1)
        batch = given.dims[places.number(7)] / (fields.number(58) or 1)
        return _cost(2.0 * channels * result.dims[places.number(10)] * batch * positions, (given, kernel, result))

    def _operands(self, instruction: Instruction) -> list[Array]:
        return [self._by_id[number].results()[0] for number in instruction.fields.numbers(36)[:3]]


class Programs:
    """The programs of a file, each decoded when a row names it."""

    def __init__(self, sources: Mapping[str, ProgramBytes]) -> None:
        self._sources = sources
        self._known: dict[str, Program | None] = {}

    def find(self, name: str) -> Program | None:
        """Return the program of this name; None if the file lacks it or it is damaged."""
        if name not in self._known:
            source = self._sources.get(name)
            try:
                self._known[name] = Program(source) if source else None
            except MalformedMessage:
                self._known[name] = None
        return self._known[name]


def add_costs(rows: Sequence[XlaRow], programs: Programs) -> None:
    """Set cost and key of the compute rows whose program and instruction are known."""
    by_program: dict[str, dict[str, list[XlaRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.kind is Kind.COMPUTE and row.op is not None:
            by_program[row.op.program][row.op.name].append(row)
    for name, by_op in by_program.items():
        program = programs.find(name)
        if program is None:
            continue
        graphs = {op: by_op.pop(op) for op in list(by_op) if not _runs_alone(program, op)}
        for op, of_op in by_op.items():
            if cost := program.cost_of(op):
                _share(cost, _count_runs(of_op), of_op)
        for group in _group_graphs(program, graphs, frozenset(by_op)):
            group.add_costs(program)
    for row in rows:
        if row.cost is not None:
            row.key = (row.key, row.cost)


def _runs_alone(program: Program, op: str) -> bool:
    """Whether it is an instruction of its own, not a graph of several."""
    instruction = program.instructions.get(op)
    return instruction is not None and (instruction.opcode != "call" or not instruction.called)


def _count_runs(rows: Sequence[XlaRow]) -> int:
    """Return how often an operation ran: each time it launched all of its kernels, some of them several times."""
    counts = Counter(row.name for row in rows).values()
    return max(count // max(1, round(count / min(counts))) for count in counts)


def _share(cost: OpCost, runs: int, rows: Sequence[XlaRow]) -> None:
    """Share the cost of so many runs among their kernels, in proportion to the time of each kernel."""
    counts = Counter(row.name for row in rows)
    total_ps = sum(row.duration_ps for row in rows) or 1
    time_ps: Counter[str] = Counter()
    for row in rows:
        time_ps[row.name] += row.duration_ps
    parts = {name: 1.0 if len(counts) == 1 else time_ps[name] / total_ps for name in counts}
    shared = {name: _scale(cost, parts[name] * runs / counts[name]) for name in counts}
    for row in rows:
        row.cost = shared[row.name]


def _scale(cost: OpCost, by: float) -> OpCost:
    moved = None if cost.bytes_accessed is None else cost.bytes_accessed * by
    return replace(cost, flops=(cost.flops or 0.0) * by, bytes_accessed=moved)


@dataclass
class _Graphs:
    """The CUDA graphs made from one computation of a program."""

    calls: list[Instruction]
    """The computation's library calls without a row of their own, in the order of the program."""
    library_rows: list[XlaRow] = field(default_factory=list)
    generated: Counter[str] = field(default_factory=Counter)
    """Kernels that XLA generated for instructions of the computation -> how often each ran."""
    is_certain: bool = True
    """Whether no kernel of the graphs has the name of an instruction of another computation."""

    def add_costs(self, program: Program) -> None:
        """Set the costs of the library's kernels: one by one if there is one for each call, else shared among all."""
        costs = [program.cost_of(call.name) for call in self.calls]
        known = [cost for cost in costs if cost]
        runs = min(self.generated.values(), default=0)  # several instructions may share a kernel
        rows = sorted(self.library_rows, key=lambda row: row.start_ps)
        if not known or not runs:
            return
        for expected in (costs, known):  # calls of unknown cost may be products or not
            if len(rows) == runs * len(expected):
                for at, row in enumerate(rows):
                    row.cost = expected[at % len(expected)]
                return
        total = sum_costs(known)
        if total and len(known) == len(costs) and self.is_certain and len(rows) > runs * len(costs):
            _share(total, runs, rows)  # some calls launch several kernels


def _group_graphs(program: Program, graphs: Mapping[str, Sequence[XlaRow]], seen: frozenset[str]) -> Iterable[_Graphs]:
    """Give generated kernels the cost of their instruction; return the rest by the computation that they come from."""
    groups: dict[int, _Graphs] = {}
    for op, rows in graphs.items():
        library, generated = [], defaultdict[int, Counter[str]](Counter)
        for row in rows:
            made = program.by_kernel.get(row.name.removesuffix(".kd"))
            if made is not None:
                generated[made.computation][made.kernel] += 1
                row.cost = program.cost_of(made.name)
            elif row.compute in PRODUCTS:
                library.append(row)
        called = program.instructions[op].called[:1] if op in program.instructions else ()
        if not called and not generated:
            continue
        number = called[0] if called else max(generated, key=lambda key: generated[key].total())
        if number not in groups:
            calls = [one for one in program.computations.get(number, []) if one.opcode == "custom-call"]
            groups[number] = _Graphs([call for call in calls if call.name not in seen])
        groups[number].library_rows += library
        groups[number].generated += generated[number]
        groups[number].is_certain &= len(generated) == 1
    return groups.values()
