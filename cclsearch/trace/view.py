"""A trace as metrics see it: columns, step windows and unions of intervals, each computed once if asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cclsearch.trace.events import DEVICE_WORK, EventTable, Kind, Reason, TraceSet
from cclsearch.trace.intervals import Int64s, covered_ns, merge_spans, unite_spans
from cclsearch.trace.matching import Matching, match_collectives
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.windows import Windows, find_windows

if TYPE_CHECKING:
    from cclsearch.card.model import Card
    from cclsearch.core.values import Config


@dataclass(frozen=True)
class StepParts:
    """Where the time of each window of a rank goes, in ns; the four parts add up to `window_ns_W` exactly."""

    window_ns_W: Int64s
    compute_ns_W: Int64s
    exposed_comm_ns_W: Int64s
    """Communication that hides behind neither compute nor copies."""
    exposed_mem_ns_W: Int64s
    """Copies that hide behind no compute."""
    idle_ns_W: Int64s


class RankView:
    """One rank: its table, and what metrics share over it."""

    def __init__(self, table: EventTable) -> None:
        self.table = table
        self.rank = table.rank
        self.window_uses = 0
        """How often somebody asked for the windows: a figure made from them carries their reservation."""

    def rows(self, *kinds: Kind) -> Int64s:
        """Row numbers of these kinds, in the order of the file."""
        wanted = np.zeros(256, dtype=bool)
        wanted[list(kinds)] = True
        return np.flatnonzero(wanted[self.table.kind])

    @cached_property
    def is_device_row(self) -> npt.NDArray[np.bool_]:
        """Of each row: whether it is work on the device."""
        first, last = min(DEVICE_WORK), max(DEVICE_WORK)
        return np.asarray((self.table.kind - np.uint8(first)) <= np.uint8(last - first))

    @cached_property
    def device_rows(self) -> Int64s:
        """Row numbers of all work on the device, by start."""
        rows = np.flatnonzero(self.is_device_row)
        start_ns = self.table.ts_ns[rows]
        if (start_ns[1:] >= start_ns[:-1]).all():
            return rows
        return rows[np.argsort(start_ns, kind="stable")]

    @cached_property
    def _device_kinds(self) -> npt.NDArray[np.uint8]:
        return self.table.kind[self.device_rows]

    @cached_property
    def compute_kernels(self) -> Int64s:
        """Row numbers of what computes, by start."""
        return np.asarray(self.device_rows[self._device_kinds == Kind.COMPUTE])

    @cached_property
    def comm_rows(self) -> Int64s:
        """Row numbers of communication, by start."""
        return np.asarray(self.device_rows[self._device_kinds == Kind.COMM])

    @cached_property
    def copy_rows(self) -> Int64s:
        """Row numbers of memory copies and sets, by start."""
        kinds = self._device_kinds
        return np.asarray(self.device_rows[(kinds == Kind.MEMCPY) | (kinds == Kind.MEMSET)])

    def merge_rows(self, rows: Int64s) -> Int64s:
        """Union of the spans of these rows, merged, shape (M, 2)."""
        start_ns = self.table.ts_ns[rows]
        return merge_spans(start_ns, start_ns + self.table.dur_ns[rows])

    @cached_property
    def compute_M2(self) -> Int64s:
        """When something computes."""
        return self.merge_rows(self.compute_kernels)

    @cached_property
    def copies_M2(self) -> Int64s:
        """When memory is copied or set."""
        return self.merge_rows(self.copy_rows)

    @cached_property
    def comm_M2(self) -> Int64s:
        """When something communicates."""
        return self.merge_rows(self.comm_rows)

    @cached_property
    def work_M2(self) -> Int64s:
        """When something computes or copies."""
        return unite_spans(self.compute_M2, self.copies_M2) if len(self.copy_rows) else self.compute_M2

    @cached_property
    def busy_M2(self) -> Int64s:
        """When the device does anything."""
        return unite_spans(self.work_M2, self.comm_M2) if len(self.comm_rows) else self.work_M2

    @property
    def windows(self) -> Windows:
        """The step windows that every per-step figure uses."""
        self.window_uses += 1
        return self._windows

    @cached_property
    def _windows(self) -> Windows:
        return find_windows(self.table, self.busy_M2, self.device_rows)

    @property
    def parts(self) -> StepParts:
        """Where the time of each window goes."""
        self.window_uses += 1
        return self._parts

    @cached_property
    def _parts(self) -> StepParts:
        windows_W2 = self._windows.spans_W2
        window_ns = windows_W2[:, 1] - windows_W2[:, 0]
        compute = covered_ns(self.compute_M2, windows_W2)
        work = covered_ns(self.work_M2, windows_W2)
        busy = covered_ns(self.busy_M2, windows_W2)
        return StepParts(window_ns, compute, busy - work, work - compute, window_ns - busy)

    def in_windows(self, rows: Int64s) -> Int64s:
        """Those of the rows that start inside a window of a step."""
        windows_W2 = self.windows.spans_W2
        if not len(windows_W2):
            return rows[:0]
        start_ns = self.table.ts_ns[rows]
        at = np.searchsorted(windows_W2[:, 0], start_ns, side="right") - 1
        inside = (at >= 0) & (start_ns < windows_W2[np.maximum(at, 0), 1])
        return np.asarray(rows[inside])


class TraceView:
    """All ranks of one run, with the card and the configuration where they are known."""

    def __init__(
        self,
        trace_set: TraceSet,
        *,
        card: Card | None = None,
        config: Config | None = None,
        baseline: TraceView | None = None,
    ) -> None:
        self.trace_set = trace_set
        self.card = card
        self.config = config
        self.baseline = baseline
        views = {rank: RankView(trace_set.tables[rank]) for rank in trace_set.ranks}
        at_work = {rank: view for rank, view in views.items() if len(view.device_rows)}
        self.ranks: Mapping[int, RankView] = at_work or views
        """The ranks that figures are taken over: those with work on a device, or all where none has any."""
        self.silent_ranks = tuple(rank for rank in views if rank not in self.ranks)
        """Ranks that were read and left out, since nothing of a device was recorded."""

    @property
    def world_size(self) -> int | None:
        """Ranks of the run as the trace says; None where it does not."""
        return self.trace_set.world_size

    @property
    def num_devices(self) -> int:
        """Accelerators of the run: the world size, else those of the collectives' groups, at least one a table."""
        return max(self.world_size or self._grouped_devices, len(self.ranks))

    @cached_property
    def _grouped_devices(self) -> int:
        """Devices that the groups of a collective name; 0 where none names them all."""
        calls = (call for view in self.ranks.values() for call in view.table.collectives)
        return max((call.world_size or 0 for call in calls), default=0)

    @cached_property
    def device_doubt(self) -> str:
        """One line where the number of devices was counted from the traces and something says that there are others.

        Empty where the trace states its world size, and where nothing contradicts the count.
        """
        seen = len(self.ranks)
        if self.world_size is not None or not seen:
            return ""
        if self._grouped_devices > seen:
            return f"traces of {seen} devices, and the collectives' groups name {self._grouped_devices}"
        asked = self._configured_devices
        if asked is not None and asked != seen:
            return f"traces of {seen} devices that do not say of how many, and the configuration has {asked}"
        if asked is None and self.card is not None and self.card.hardware.num_accelerators != seen:
            stated = self.card.hardware.num_accelerators
            return f"traces of {seen} devices that do not say of how many, and the card has {stated}"
        return ""

    @property
    def _configured_devices(self) -> int | None:
        """Devices that the configuration's degrees take; None where it does not give the data-parallel one."""
        if self.config is None or "dp" not in self.config:
            return None
        return math.prod(self.degree(knob) for knob in ("dp", "tp", "pp", "cp"))

    def degree(self, knob: str) -> int:
        """A parallel degree (`pp`, `tp`, ...) of the configuration; 1 where it is not known."""
        return self.config.as_int(knob) if self.config is not None else 1

    def stage_of(self, rank: int) -> int:
        """Pipeline stage of a rank: stages are the outermost axis of the mesh in every supported framework."""
        return rank * self.degree("pp") // max(self.num_devices, 1)

    @cached_property
    def matching(self) -> Matching:
        """Which collective of one rank is which of the others."""
        return match_collectives({rank: view.table for rank, view in self.ranks.items()}, self.world_size)

    @property
    def lonely_reason(self) -> Reason:
        """Why waiting cannot be told from moving data: no second rank, or none whose collectives match."""
        if len(self.ranks) > 1 and self.matching.mismatched:
            return Reason.SEQUENCE_MISMATCH
        if len(self.ranks) > 1 and self.matching.misaligned:
            return Reason.NO_CLOCK_ALIGNMENT
        if len(self.ranks) > 1:
            return Reason.RANKS_MISSING if self.num_devices > len(self.ranks) else Reason.NO_COLLECTIVE_ARGS
        return Reason.RANKS_MISSING if (self.world_size or 1) > 1 else Reason.SINGLE_RANK


def require_windows(view: RankView) -> Int64s:
    """The rank's windows; raises NotAvailable where the rank has no device events at all."""
    if not len(view.busy_M2):
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no event of any device")
    return view.windows.spans_W2
