"""Identify the attempt of a trace: by its nonce, absolute times, and a hash that only this run can have."""

from __future__ import annotations

import hashlib

import numpy as np

from cclsearch.launch.contract import NONCE_MARK
from cclsearch.scoring.evidence import TracedRank
from cclsearch.trace.events import DEVICE_WORK, EventTable, TraceSet, rows_of_kinds

# With fewer distinct durations two traces could have the same by chance.
MIN_DISTINCT = 50
"""Number of distinct durations from which a hash identifies a trace."""


def read_origins(traces: TraceSet) -> dict[int, TracedRank]:
    """Return the evidence of each rank's origin."""
    return {rank: _read_origin(table) for rank, table in traces.tables.items()}


def _read_origin(table: EventTable) -> TracedRank:
    named = {name.removeprefix(NONCE_MARK).split("#")[0] for name in table.names if name.startswith(NONCE_MARK)}
    is_absolute = table.clock == "unix" and table.base_ns > 0 and len(table) > 0
    return TracedRank(
        nonces=tuple(sorted(filter(None, named))),
        start_s=(table.base_ns + int(table.ts_ns.min())) / 1e9 if is_absolute else None,
        end_s=(table.base_ns + int(table.end_ns.max())) / 1e9 if is_absolute else None,
        digest=_digest(table),
    )


def _digest(table: EventTable) -> str:
    durations = table.dur_ns[rows_of_kinds(table.kind, DEVICE_WORK)]
    if len(np.unique(durations)) < MIN_DISTINCT:
        return ""
    return hashlib.sha256(np.ascontiguousarray(durations, "<i8").tobytes()).hexdigest()
