"""The collectives of a step in a trial's traces, by operation and group."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.evaluation.traced_products import PRECISION_OF_DTYPE
from cclsearch.scoring.evidence import TracedCollective
from cclsearch.trace.events import Collective
from cclsearch.trace.view import RankView, TraceView


def read_collectives(trace: TraceView) -> tuple[TracedCollective, ...] | None:
    """Return the collectives of one step over all ranks; None if the trace has no whole steps."""
    views = list(trace.ranks.values())
    if not views or not all(view.windows.are_steps for view in views):
        return None
    calls: dict[tuple[str, str, int | None, str], list[tuple[float, int | None]]] = defaultdict(list)
    for view in views:
        for call, count in _count_calls(view):
            calls[_key(call)].append((count / view.windows.num_steps, call.in_nelems or None))
    return tuple(_describe(*key, made) for key, made in sorted(calls.items(), key=str))


def _count_calls(view: RankView) -> list[tuple[Collective, int]]:
    """Return the distinct calls in the rank's windows, and how often each was made."""
    numbers = view.table.coll_id[view.in_windows(view.comm_rows)]
    distinct, counts = np.unique(numbers[numbers >= 0], return_counts=True)
    return [(view.table.collectives[n], count) for n, count in zip(distinct.tolist(), counts.tolist(), strict=True)]


def _key(call: Collective) -> tuple[str, str, int | None, str]:
    size = call.group_size or (len(call.group_ranks) if call.group_ranks else None)
    precision = PRECISION_OF_DTYPE.get((call.dtype or "").lower(), "")
    return call.kind.value, redact(one_line(call.group_desc or "", 60)), size, precision


def _describe(
    kind: str, axis: str, size: int | None, precision: str, made: list[tuple[float, int | None]]
) -> TracedCollective:
    known = [count * elements for count, elements in made if elements is not None]
    return TracedCollective(
        kind=kind,
        axis=axis,
        group_size=size,
        precision=precision,
        calls=sum(count for count, _ in made),
        elements=sum(known) if len(known) == len(made) else None,
    )
