"""Calls and FLOP by operator of the host, as a tree: for traces that record who called whom, but no times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from pydantic import JsonValue

from cclsearch.core.text import one_line
from cclsearch.trace.answers.operators import bare_name, step_names
from cclsearch.trace.events import Kind
from cclsearch.trace.flops import count_ops
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.view import RankView, TraceView

MAX_DEPTH = 100
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
        if len(stack) < MAX_DEPTH:
            name = names[table.name_id[row]]
            above = above.children.setdefault(name, CallNode(name))
        above.calls += scale
        if row in flops_of:
            for node in {id(node): node for node in (*(node for _, node in stack), above)}.values():
                node.flops += flops_of[row] * scale
        stack.append((row, above))
