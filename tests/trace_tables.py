"""Event tables written by hand for the tests of metrics. Times are microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cclsearch.trace.events import (
    COLUMNS,
    SPARSE_COLUMNS,
    Collective,
    CollectiveKind,
    DeviceInfo,
    EventTable,
    Kind,
    Step,
    TraceSet,
)
from cclsearch.trace.names.kernels import ComputeClass

DEFAULTS = {"device": 0, "stream": 7}
ROW_COLUMNS = ("step_id", "launch", "stream", "device", "blocks_per_sm")


@dataclass
class Timeline:
    """Collects events of one rank and makes a table of them."""

    rank: int = 0
    world_size: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add(self, kind: Kind, start_us: float, dur_us: float, name: str, **columns: Any) -> int:
        """One row; returns its number."""
        name_class = columns.pop("name_class", ComputeClass.OTHER)
        if name not in self.names:
            self.names.append(name)
            self.classes.append(int(name_class))
        ts, dur = round(start_us * 1000), round(dur_us * 1000)
        self.rows.append({"kind": int(kind), "ts_ns": ts, "dur_ns": dur, "name_id": self.names.index(name), **columns})
        return len(self.rows) - 1

    def kernel(
        self, start_us: float, dur_us: float, name: str = "gemm", launched_us: float | None = None, **columns: Any
    ) -> int:
        """A compute kernel, with a launch at `launched_us` if given."""
        if launched_us is not None:
            columns["launch"] = self.add(Kind.RUNTIME, launched_us, 1, "cudaLaunchKernel", device=-1)
        return self.add(Kind.COMPUTE, start_us, dur_us, name, **columns)

    def copy(self, start_us: float, dur_us: float, name: str = "Memcpy HtoD (Pinned -> Device)", **columns: Any) -> int:
        """A memory copy of the device."""
        return self.add(Kind.MEMCPY, start_us, dur_us, name, **columns)

    def collective(
        self,
        start_us: float,
        dur_us: float,
        kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
        message_bytes: int | None = 1 << 20,
        **call: Any,
    ) -> int:
        """A communication kernel and its collective call."""
        row_columns = {name: call.pop(name) for name in ROW_COLUMNS if name in call}
        size = call.get("group_size") or self.world_size
        call = {"group": "0", "group_size": size, "in_bytes": message_bytes, "out_bytes": message_bytes, **call}
        found = Collective(kind=kind, has_args=message_bytes is not None, **call)
        if found not in self.collectives:
            self.collectives.append(found)
        name = f"ncclDevKernel_{kind}"
        return self.add(
            Kind.COMM, start_us, dur_us, name, **{"stream": 20, **row_columns}, coll_id=self.collectives.index(found)
        )

    def step(self, start_us: float, end_us: float, complete: bool = True, name: str = "") -> int:
        """A step marker on the host; returns the `step_id` for rows."""
        number = len(self.steps)
        name = name or f"ProfilerStep#{number}"
        self.steps.append(Step(number, name, round(start_us * 1000), round(end_us * 1000), complete))
        return number

    def table(self, **fields: Any) -> EventTable:
        """Return the table of all collected events."""
        columns = {
            name: np.array([row.get(name, DEFAULTS.get(name, -1)) for row in self.rows], dtype=dtype)
            for name, dtype in COLUMNS.items()
        }
        sparse = {}
        for name, dtype in SPARSE_COLUMNS.items():
            at = [number for number, row in enumerate(self.rows) if name in row]
            values = [self.rows[number][name] for number in at]
            sparse[name] = (np.array(at, dtype=np.int32), np.array(values, dtype=dtype))
        made: dict[str, Any] = {
            **columns,
            "sparse": sparse,
            "names": tuple(self.names),
            "name_class": np.array(self.classes, dtype=np.uint8),
            "collectives": tuple(self.collectives),
            "steps": tuple(self.steps),
            "step_source": "profiler_step" if self.steps else "",
            "rank": self.rank,
            "world_size": self.world_size,
            "devices": (DeviceInfo(0, "NVIDIA H100 80GB HBM3", num_sms=132, max_threads_per_sm=2048),),
            "host": "node0",
            **fields,
        }
        return EventTable(**made)


def make_set(tables: Sequence[EventTable], **fields: Any) -> TraceSet:
    """Return a trace set of these tables, with status ok unless `fields` says otherwise."""
    by_rank = {table.rank: table for table in tables}
    world = fields.pop("world_size", tables[0].world_size if tables else None)
    missing = tuple(rank for rank in range(world or 0) if rank not in by_rank)
    return TraceSet(by_rank, fields.pop("status", "ok"), world_size=world, missing_ranks=missing, **fields)
