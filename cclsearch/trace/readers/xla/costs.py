"""Give the rows of an XLA trace the FLOP of their matrix products, from the program in the same file.

A row names its program and its instruction. Kernels of a CUDA graph name only the graph, which the program does not
contain: its generated kernels have the names of their instructions, and its library calls follow the program's order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cclsearch.trace.events import Kind, OpCost
from cclsearch.trace.names.kernels import PRODUCTS
from cclsearch.trace.readers.protobuf_wire import MalformedMessage
from cclsearch.trace.readers.xla.planes import ProgramBytes, XlaRow
from cclsearch.trace.readers.xla.program import Instruction, Program, sum_costs


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
