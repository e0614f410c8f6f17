"""Device time by operator and by kernel family, calls and FLOP of a trace without times, and two traces compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from pydantic import JsonValue

from cclsearch.core.text import one_line
from cclsearch.trace.events import Kind
from cclsearch.trace.flops import count_ops
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.names.kernels import ComputeClass, kernel_family
from cclsearch.trace.names.kinds import read_marker
from cclsearch.trace.view import RankView, TraceView

MAX_DEPTH = 24
_SERIAL = re.compile(r"(?:\s*[#:]\s?|\s+|(?<=Backward))\d+$")
"""Suffix that numbers the calls of one operator: `block #3`, `layer 7`, `MmBackward0`; `aten::log2` keeps its digit."""
_HOST_KINDS = (Kind.CPU_OP, Kind.ANNOTATION)


@dataclass
class OperatorNode:
    """One operator or range, in one place of the tree."""

    path: tuple[str, ...]
    """Names from the outermost operator to this one."""
    seconds: float = 0.0
    """Device time per step of all launches by it and the operators in it, summed, mean over ranks."""
    own_s: float = 0.0
    """Part that no operator inside it launched."""
    num_kernels: float = 0.0
    """Device rows per step, mean over ranks."""
    own_kernels: float = 0.0
    """Device rows that no operator inside it launched."""


@dataclass(frozen=True)
class OperatorTree:
    """Device time of all operators."""

    nodes: tuple[OperatorNode, ...]
    """Parents before children, siblings by device time."""
    total_s: float
    """Summed device time per step, mean over ranks."""
    coverage: float
    """Share of device time whose launch an operator encloses."""
    covers: str = "per step"
    """The period of the sums in seconds: one step, or the whole file if it has no steps."""

    def as_data(self) -> dict[str, JsonValue]:
        """Return plain data."""
        nodes: list[JsonValue] = [
            {"path": list(n.path), "seconds": n.seconds, "own_s": n.own_s, "num_kernels": n.num_kernels}
            for n in self.nodes
        ]
        return {"total_s": self.total_s, "coverage": self.coverage, "covers": self.covers, "nodes": nodes}


def build_operator_tree(trace: TraceView) -> OperatorTree:
    """Return the tree over all ranks; empty if no launch is recorded inside an operator."""
    found: dict[tuple[str, ...], OperatorNode] = {}
    total = covered = 0.0
    for view in trace.ranks.values():
        rows = view.in_windows(view.device_rows)
        scale = 1e-9 / max(len(view.windows.spans_W2), 1) / len(trace.ranks)
        parent, innermost = enclosing_operators(view, rows)
        seconds = view.table.dur_ns[rows] * scale
        total += float(seconds.sum())
        covered += float(seconds[innermost >= 0].sum())
        ops, index = np.unique(innermost, return_inverse=True)
        of_op = np.bincount(index.ravel(), weights=seconds, minlength=len(ops))
        count = np.bincount(index.ravel(), minlength=len(ops)) * scale * 1e9
        for op, own_s, kernels in zip(ops.tolist(), of_op.tolist(), count.tolist(), strict=True):
            if op >= 0:
                _add(found, _path_of(view, parent, op), own_s, kernels)
    return OperatorTree(_in_order(found), total, covered / total if total else 0.0, trace.covered)


def seconds_by_operator(trace: TraceView) -> dict[str, tuple[float, float]]:
    """Return innermost operator -> (summed device seconds, device rows) per step, mean over ranks."""
    found: dict[str, tuple[float, float]] = {}
    for node in build_operator_tree(trace).nodes:
        if node.own_s:
            seconds, kernels = found.get(node.path[-1], (0.0, 0.0))
            found[node.path[-1]] = (seconds + node.own_s, kernels + node.own_kernels)
    return found


def enclosing_operators(view: RankView, rows: Int64s) -> tuple[dict[int, int], Int64s]:
    """Return host row -> its enclosing host row, and for each device row the innermost host row around its launch.

    -1 is none. On a CPU the operators are the device rows themselves: each encloses itself.
    """
    table = view.table
    if table.accelerator == "cpu":
        return {}, rows
    launch = table.launch[rows]
    host = view.rows(*_HOST_KINDS)
    host = host[~np.isin(table.name_id[host], step_names(view))]
    calls = np.unique(launch[launch >= 0])
    both = np.concatenate([host, calls])
    is_call = np.concatenate([np.zeros(len(host), bool), np.ones(len(calls), bool)])
    order = np.lexsort((is_call, -table.dur_ns[both], table.ts_ns[both], table.stream[both]))
    parent: dict[int, int] = {}
    of_call: dict[int, int] = {}
    stack: list[int] = []
    ends = table.end_ns
    thread = None
    for row, call in zip(both[order].tolist(), is_call[order].tolist(), strict=True):
        if table.stream[row] != thread:
            thread, stack = table.stream[row], []
        start = int(table.ts_ns[row])
        while stack and int(ends[stack[-1]]) <= start:
            stack.pop()
        if call:
            of_call[row] = stack[-1] if stack else -1
        else:
            parent[row] = stack[-1] if stack else -1
            stack.append(row)
    return parent, np.array([of_call.get(row, -1) for row in launch.tolist()], dtype=np.int64)


def step_names(view: RankView) -> list[int]:
    """Return the numbers of the names of the steps' markers."""
    markers = {step.name for step in view.table.steps}
    names = enumerate(view.table.names)
    return [number for number, name in names if name in markers or read_marker(name) is not None]


def bare_name(name: str) -> str:
    """Return the name of an operator without the number of the call: `block` for `block #3`."""
    return _SERIAL.sub("", name) or name


def _path_of(view: RankView, parent: dict[int, int], op: int) -> tuple[str, ...]:
    names: list[str] = []
    while op >= 0 and len(names) < MAX_DEPTH:
        name = one_line(view.table.names[view.table.name_id[op]], 100)
        names.append(bare_name(name))
        op = parent.get(op, -1)
    return tuple(reversed(names))


def _add(found: dict[tuple[str, ...], OperatorNode], path: tuple[str, ...], own_s: float, kernels: float) -> None:
    for depth in range(1, len(path) + 1):
        node = found.setdefault(path[:depth], OperatorNode(path[:depth]))
        node.seconds += own_s
        node.num_kernels += kernels
    found[path].own_s += own_s
    found[path].own_kernels += kernels


def _in_order(found: dict[tuple[str, ...], OperatorNode]) -> tuple[OperatorNode, ...]:
    def key(node: OperatorNode) -> tuple[tuple[float, str], ...]:
        return tuple((-found[node.path[:depth]].seconds, name) for depth, name in enumerate(node.path, 1))

    return tuple(sorted(found.values(), key=key))


MAX_CALL_DEPTH = 100
_KINDS = (Kind.CPU_OP, Kind.ANNOTATION, Kind.COMM, Kind.COMPUTE)


@dataclass
class CallNode:
    """One operator, range or call, in one place of the tree."""

    name: str
    calls: float = 0.0
    """Per step, mean over ranks."""
    flops: float = 0.0
    """FLOP per step of it and the operators in it, mean over ranks."""
    children: dict[str, CallNode] = field(default_factory=dict)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, CallNode]]:
        """Yield (depth, node) of all nodes below: parents before children, siblings by FLOP and calls."""
        for child in sorted(self.children.values(), key=lambda node: (-node.flops, -node.calls, node.name)):
            yield depth, child
            yield from child.walk(depth + 1)

    def as_data(self) -> dict[str, JsonValue]:
        """Return plain data."""
        children: list[JsonValue] = [child.as_data() for child in self.children.values()]
        return {"name": self.name, "calls": self.calls, "flops": self.flops, "children": children}


def build_call_tree(trace: TraceView) -> CallNode:
    """Return the root of the tree over all ranks; without children if no operator is recorded."""
    root = CallNode("")
    for view in trace.ranks.values():
        rows = view.rows(*_KINDS)
        rows = rows[~np.isin(view.table.name_id[rows], step_names(view))]
        if view.windows.are_steps:
            rows = rows[np.isin(view.table.step_id[rows], view.windows.step_index_W)]
        _add_rank(root, view, rows, 1.0 / max(view.windows.num_steps, 1) / len(trace.ranks))
    return root


def _add_rank(root: CallNode, view: RankView, rows: Int64s, scale: float) -> None:
    table = view.table
    ops, of_op = count_ops(view)
    flops_of = dict(zip(ops.tolist(), of_op.tolist(), strict=True))
    names = [bare_name(one_line(name, 100)) for name in table.names]
    order = np.lexsort((-table.dur_ns[rows], table.ts_ns[rows], table.stream[rows]))
    ends, starts, threads = table.end_ns, table.ts_ns, table.stream
    stack: list[tuple[int, CallNode]] = []
    thread = None
    for row in rows[order].tolist():
        if threads[row] != thread:
            thread, stack = threads[row], []
        while stack and int(ends[stack[-1][0]]) <= int(starts[row]):
            stack.pop()
        above = stack[-1][1] if stack else root
        if len(stack) < MAX_CALL_DEPTH:
            name = names[table.name_id[row]]
            above = above.children.setdefault(name, CallNode(name))
        above.calls += scale
        if row in flops_of:
            for node in {id(node): node for node in (*(node for _, node in stack), above)}.values():
                node.flops += flops_of[row] * scale
        stack.append((row, above))


Figures = Mapping[str, tuple[float, float]]
"""Name -> (summed device seconds, device rows) per step, mean over ranks."""


@dataclass(frozen=True)
class NamedChange:
    """One kernel family or operator in both traces; seconds and counts are per step, mean over ranks."""

    name: str
    first_s: float
    second_s: float
    first_count: float
    second_count: float
    share: float
    """Its change over the sum of all changes regardless of sign: positive if the second trace spends more."""

    @property
    def change_s(self) -> float:
        """Seconds that the second trace spends more."""
        return self.second_s - self.first_s

    def as_data(self) -> dict[str, JsonValue]:
        """Return plain data."""
        return {
            "name": self.name,
            "a_s": self.first_s,
            "b_s": self.second_s,
            "difference_s": self.change_s,
            "a_count": self.first_count,
            "b_count": self.second_count,
            "share_of_change": self.share,
        }


_TILE = re.compile(r"(?<![A-Za-z0-9])\d+(?:x\d+)+(?![A-Za-z0-9])")
_TENSILE = re.compile(r"(?<=^Cijk_)(.*?)_MT\d.*$")


def comparable_family(kernel: str) -> str:
    """Return the kernel's family without tile sizes."""
    # A library chooses its tile sizes anew for every shape.
    family = kernel_family(kernel)
    return _TENSILE.sub(r"\1", family) if family.startswith("Cijk_") else _TILE.sub("*", family)


def seconds_by_family(trace: TraceView) -> Figures:
    """Return the figures of every kernel family, communication and copies included."""
    found: dict[str, tuple[float, float]] = {}
    for view in trace.ranks.values():
        _add_figures(found, trace, view, view.device_rows, comparable_family)
    return found


def _add_figures(
    found: dict[str, tuple[float, float]], trace: TraceView, view: RankView, rows: Int64s, label: Callable[[str], str]
) -> None:
    """Add a rank's part of the mean over ranks: seconds and number of these rows by label of their names."""
    seconds_N, count_N = view.sum_by_name(rows)
    for number in np.flatnonzero(count_N).tolist():
        name = label(view.table.names[number])
        seconds, count = found.get(name, (0.0, 0.0))
        more_s, more = float(seconds_N[number]) / len(trace.ranks), float(count_N[number]) / len(trace.ranks)
        found[name] = seconds + more_s, count + more


def compare_figures(first: Figures, second: Figures) -> tuple[NamedChange, ...]:
    """Return the changes of all names in either, the largest first."""
    names = sorted({*first, *second})  # sums of floats depend on the order
    pairs = [(name, first.get(name, (0.0, 0.0)), second.get(name, (0.0, 0.0))) for name in names]
    whole = sum(abs(two[0] - one[0]) for _, one, two in pairs)
    changes = [
        NamedChange(name, one[0], two[0], one[1], two[1], (two[0] - one[0]) / whole if whole else 0.0)
        for name, one, two in pairs
    ]
    return tuple(sorted(changes, key=lambda change: (-abs(change.change_s), change.name)))


BY: Mapping[str, Callable[[TraceView], Figures]] = {"families": seconds_by_family, "operators": seconds_by_operator}
"""Ways to compare two traces."""


def compare_traces(first: TraceView, second: TraceView) -> dict[str, tuple[NamedChange, ...]]:
    """Return the changes by kernel family and by operator (empty without launches inside operators)."""
    return {by: compare_figures(figures(first), figures(second)) for by, figures in BY.items()}


@dataclass(frozen=True)
class UnknownKernel:
    """A compute kernel whose name matches no line of the table of classes."""

    name: str
    seconds: float
    """Summed per step, mean over ranks."""
    share: float
    """Share of the summed time of all compute kernels."""
    num_kernels: float
    """Per step, mean over ranks."""


def list_unclassified(trace: TraceView) -> tuple[UnknownKernel, ...]:
    """Return the compute kernels of class `other`, the longest first."""
    found: dict[str, tuple[float, float]] = {}
    total = 0.0
    for view in trace.ranks.values():
        table = view.table
        if table.accelerator == "cpu":
            continue  # operators of the host, which need no class
        rows = view.rows(Kind.COMPUTE)
        total += float(view.sum_by_name(rows)[0].sum()) / len(trace.ranks)
        _add_figures(found, trace, view, rows[table.name_class[table.name_id[rows]] == ComputeClass.OTHER], str)
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(UnknownKernel(name, s, s / total if total else 0.0, calls) for name, (s, calls) in ordered)
