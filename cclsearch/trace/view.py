"""A trace as metrics use it: columns, step windows and unions of intervals, each computed once, at first use."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from cclsearch.trace.events import DEVICE_WORK, EventTable, Kind, Reason, TraceSet, rows_of_kinds
from cclsearch.trace.files.cache import release_memory
from cclsearch.trace.intervals import Int64s, covered_ns, merge_spans, unite_spans
from cclsearch.trace.matching import Matching, match_collectives
from cclsearch.trace.result import NotAvailable, if_available
from cclsearch.trace.windows import NO_STEPS, Windows, find_windows, first_reason

if TYPE_CHECKING:
    from cclsearch.card.model import Card
    from cclsearch.core.values import Config


# 64 ranks of 100 MB of JSON have 640 MB of columns.
MAX_RESIDENT_BYTES = 128 << 20
"""Columns of all ranks that may stay in memory."""
MIN_RELEASED_BYTES = 1 << 16
# With 28,000 events, two threads take 7.3 ms and one takes 5.9 ms.
MIN_PREPARED_ROWS = 60_000
"""Number of device events from which a second thread pays."""
_WAITS = re.compile("Synchronize|StreamWaitEvent")
NO_TIMES = "the trace records operators without times; give the profiler's trace of the same run"


One = TypeVar("One")
Other = TypeVar("Other")


@dataclass(frozen=True)
class StepParts:
    """Time of each window of a rank by activity, in ns; the four parts add up to `window_ns_W` exactly."""

    window_ns_W: Int64s
    compute_ns_W: Int64s
    exposed_comm_ns_W: Int64s
    """Communication that overlaps with neither compute nor copies."""
    exposed_mem_ns_W: Int64s
    """Copies that do not overlap with compute."""
    idle_ns_W: Int64s


class Residency:
    """Keeps the columns of all ranks in memory if they are small, else only the last rank's."""

    def __init__(self, tables: Iterable[EventTable]) -> None:
        self._is_small = sum(table.nbytes for table in tables) <= MAX_RESIDENT_BYTES
        self._last: RankView | None = None

    def enter(self, view: RankView) -> None:
        """Release the memory of the rank read before, if this is another one."""
        if view is self._last or self._is_small:
            return
        if self._last:
            self._last.release_memory()
        self._last = view


class RankView:
    """One rank: its event table, and the intermediate results that metrics share."""

    def __init__(self, table: EventTable, residency: Residency | None = None) -> None:
        self._table = table
        self._residency = residency
        self.rank = table.rank
        # A metric that reads windows which are not steps is `partial`.
        self._window_uses: dict[int, int] = {}
        """Number of reads of the windows, by thread."""

    @property
    def table(self) -> EventTable:
        """The rank's events; to read them may release the arrays of another rank."""
        if self._residency:
            self._residency.enter(self)
        return self._table

    def rows(self, *kinds: Kind) -> Int64s:
        """Return the row numbers of these kinds, in file order."""
        return rows_of_kinds(self.table.kind, kinds)

    @cached_property
    def is_device_row(self) -> npt.NDArray[np.bool_]:
        """For each row: whether it is work on the device."""
        first, last = min(DEVICE_WORK), max(DEVICE_WORK)
        return np.asarray((self.table.kind - np.uint8(first)) <= np.uint8(last - first))

    @cached_property
    def device_rows(self) -> Int64s:
        """Row numbers of all work on the device, sorted by start."""
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
        """Row numbers of compute, sorted by start."""
        return np.asarray(self.device_rows[self._device_kinds == Kind.COMPUTE])

    @cached_property
    def comm_rows(self) -> Int64s:
        """Row numbers of communication, sorted by start."""
        return np.asarray(self.device_rows[self._device_kinds == Kind.COMM])

    @cached_property
    def copy_rows(self) -> Int64s:
        """Row numbers of memory copies and sets, sorted by start."""
        kinds = self._device_kinds
        return np.asarray(self.device_rows[(kinds == Kind.MEMCPY) | (kinds == Kind.MEMSET)])

    def merge_rows(self, rows: Int64s) -> Int64s:
        """Return the union of the spans of these rows, shape (M, 2); raises NotAvailable if the trace has no times."""
        if not self._table.is_timed:
            raise NotAvailable(Reason.NO_TIMES, NO_TIMES)
        start_ns = self.table.ts_ns[rows]
        return merge_spans(start_ns, start_ns + self.table.dur_ns[rows])

    @cached_property
    def compute_M2(self) -> Int64s:
        """Spans in which compute runs."""
        return self.merge_rows(self.compute_kernels)

    @cached_property
    def copies_M2(self) -> Int64s:
        """Spans in which memory is copied or set."""
        return self.merge_rows(self.copy_rows)

    @cached_property
    def comm_M2(self) -> Int64s:
        """Spans in which communication runs."""
        return self.merge_rows(self.comm_rows)

    @cached_property
    def work_M2(self) -> Int64s:
        """Spans in which compute or copies run."""
        return unite_spans(self.compute_M2, self.copies_M2) if len(self.copy_rows) else self.compute_M2

    @cached_property
    def busy_M2(self) -> Int64s:
        """Spans in which the device is busy."""
        return unite_spans(self.work_M2, self.comm_M2) if len(self.comm_rows) else self.work_M2

    @property
    def windows(self) -> Windows:
        """Step windows: every per-step figure is taken over these."""
        self._count_use()
        return self._windows

    @cached_property
    def _windows(self) -> Windows:
        if not self._table.is_timed:
            return find_windows(self._table, np.array([[0, len(self._table)]], dtype=np.int64), self.device_rows)
        return find_windows(self.table, self.busy_M2, self.device_rows)

    @property
    def parts(self) -> StepParts:
        """Time of each window by activity."""
        self._count_use()
        return self._parts

    @property
    def window_uses(self) -> int:
        """Number of times that this thread read the windows or a figure of them."""
        return self._window_uses.get(threading.get_ident(), 0)

    def _count_use(self) -> None:
        self._window_uses[threading.get_ident()] = self.window_uses + 1

    @cached_property
    def _parts(self) -> StepParts:
        windows_W2 = self._windows.spans_W2
        window_ns = windows_W2[:, 1] - windows_W2[:, 0]
        compute = covered_ns(self.compute_M2, windows_W2)
        work = covered_ns(self.work_M2, windows_W2)
        busy = covered_ns(self.busy_M2, windows_W2)
        return StepParts(window_ns, compute, busy - work, work - compute, window_ns - busy)

    @cached_property
    def sync_M2(self) -> Int64s:
        """Spans in which the host waits for the device."""
        calls = self.table.rows_named(_WAITS, Kind.RUNTIME)
        return self.merge_rows(np.concatenate([calls, self.rows(Kind.SYNC)]))

    @cached_property
    def launch_lag_s(self) -> float | None:
        """Median time from the launch of a device event to its start; None without launch records."""
        table = self.table
        if "launch" not in table.sparse:
            return None
        rows, launches = table.sparse["launch"]
        on_device = np.flatnonzero((launches >= 0) & self.is_device_row[rows])
        if not len(on_device):
            return None
        return float(np.median(table.ts_ns[rows[on_device]] - table.ts_ns[launches[on_device]])) / 1e9

    def sum_by_name(self, rows: Int64s) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return for each name the summed seconds and the number, per window, of these rows that start in a window."""
        table, rows, windows = self.table, self.in_windows(rows), max(len(self.windows.spans_W2), 1)
        ns = np.bincount(table.name_id[rows], weights=table.dur_ns[rows].astype(float), minlength=len(table.names))
        return ns / 1e9 / windows, np.bincount(table.name_id[rows], minlength=len(table.names)) / windows

    def release_memory(self) -> None:
        """Forget large arrays, which are computed again when used."""
        for name, value in tuple(self.__dict__.items()):
            if isinstance(value, np.ndarray) and value.nbytes > MIN_RELEASED_BYTES:
                del self.__dict__[name]
        release_memory(self._table)

    def in_windows(self, rows: Int64s) -> Int64s:
        """Return the rows that start inside a window."""
        windows_W2 = self.windows.spans_W2
        if not len(windows_W2):
            return rows[:0]
        start_ns = self.table.ts_ns[rows]
        at = np.searchsorted(windows_W2[:, 0], start_ns, side="right") - 1
        inside = (at >= 0) & (start_ns < windows_W2[np.maximum(at, 0), 1])
        return np.asarray(rows[inside])


class TraceView:
    """All ranks of one run, with its card and its configuration if known."""

    def __init__(
        self,
        trace_set: TraceSet,
        *,
        card: Card | None = None,
        config: Config | None = None,
        baseline: TraceView | None = None,
        workers: int = 1,
    ) -> None:
        self.trace_set = trace_set
        self.card = card
        self.config = config
        self.baseline = baseline
        residency = Residency(trace_set.tables.values())
        views = {rank: RankView(trace_set.tables[rank], residency) for rank in trace_set.ranks}
        with_work = {rank: view for rank, view in views.items() if len(view.device_rows)}
        self.is_timed = all(table.is_timed for table in trace_set.tables.values())
        """False if the traces are execution traces, which have no times."""
        self.ranks: Mapping[int, RankView] = (with_work if self.is_timed else None) or views
        """The ranks that metrics cover: those with device work, or all ranks if none has any."""
        self.excluded_ranks = tuple(rank for rank in views if rank not in self.ranks)
        """Ranks that were read but are not covered: their traces have no device work."""
        self.threads = 1
        """Threads for independent computations: over 1 for a single rank with many rows."""
        if workers > 1 and len(self.ranks) == 1:
            self._prepare(next(iter(self.ranks.values())), workers)

    def _prepare(self, view: RankView, threads: int) -> None:
        """Compute what most metrics need of the only rank: its device's part and the rest at the same time."""

        def rest() -> tuple[object, ...]:
            return view.comm_M2, view.copies_M2, self.matching, view.launch_lag_s, view.sync_M2, view.table.launch

        if self.is_timed and len(view.device_rows) >= MIN_PREPARED_ROWS:
            self.threads = threads
            call_both(threads, lambda: view.parts, rest)

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the run; None if the trace does not record it."""
        return self.trace_set.world_size

    @property
    def window_reason(self) -> Reason | None:
        """One of `NO_STEPS`, else `too_few_steps`, if a rank's windows have it; None if all ranks have steps."""
        return first_reason(view.windows for view in self.ranks.values())

    @property
    def unmarked(self) -> str:
        """Why the window is the whole file: such as "no step markers", with the ranks if it is not all; else "".

        Ranks without device work do not count.
        """
        busy = {rank: view.windows for rank, view in self.ranks.items() if len(view.windows.spans_W2)}
        unmarked = [rank for rank, windows in busy.items() if not windows.are_steps]
        why = NO_STEPS.get(first_reason(busy.values()) or Reason.TOO_FEW_STEPS, "")
        if len(unmarked) in (0, len(busy)):
            return why
        first = ", ".join(map(str, unmarked[:5])) + (", ..." if len(unmarked) > 5 else "")
        return f"{why} on {len(unmarked)} of {len(busy)} ranks: {first}"

    @property
    def covered(self) -> str:
        """The span of the figures of all ranks: "per step", or the whole file of the ranks without steps."""
        if not self.unmarked:
            return "per step"
        every = self.unmarked in NO_STEPS.values()
        return f"over the whole file{'' if every else ' of ranks without steps'} ({self.unmarked})"

    @property
    def num_steps(self) -> int:
        """Number of steps that all ranks cover; 0 if the window of a rank is the whole file."""
        return min(view.windows.num_steps for view in self.ranks.values())

    @property
    def num_devices(self) -> int:
        """Number of accelerators: the world size, else the devices in the groups; at least one per rank."""
        return max(self.world_size or self._devices_in_groups, len(self.ranks))

    @cached_property
    def _devices_in_groups(self) -> int:
        """Number of devices in all groups of one collective; 0 if no collective lists all groups."""
        calls = (call for view in self.ranks.values() for call in view.table.collectives)
        return max((call.world_size or 0 for call in calls), default=0)

    @cached_property
    def device_count_caveat(self) -> str:
        """One line if the number of devices was counted from the traces and other evidence contradicts the count.

        Empty if the trace records its world size, or if nothing contradicts the count.
        """
        found = len(self.ranks)
        if self.world_size is not None or not found:
            return ""
        traced = f"traces of {found} devices were found"
        if self._devices_in_groups > found:
            return f"{traced}, but the groups of the collectives have {self._devices_in_groups}"
        from cclsearch.space.table import count_ranks  # with all that a search space needs

        configured = count_ranks(self.config) if self.config is not None and "dp" in self.config else None
        if configured is not None and configured != found:
            return f"{traced} (no world size recorded), but the configuration uses {configured}"
        card = self.card
        listed = if_available(lambda: card.hardware.num_accelerators) if card is not None else None
        if configured is None and listed is not None and listed != found:
            return f"{traced} (no world size recorded), but the card has {listed}"
        return ""

    def degree(self, knob: str) -> int:
        """Return a parallel degree (`pp`, `tp`, ...) of the configuration; 1 if unknown."""
        return self.config.as_int(knob) if self.config is not None else 1

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank: stages are the outermost mesh axis in every supported framework."""
        return rank * self.degree("pp") // max(self.num_devices, 1)

    @cached_property
    def matching(self) -> Matching:
        """Collectives matched across ranks; raises NotAvailable if the traces have no times."""
        if not self.is_timed:
            raise NotAvailable(Reason.NO_TIMES, NO_TIMES)
        return match_collectives({rank: view.table for rank, view in self.ranks.items()}, self.world_size)

    @property
    def unmatched_reason(self) -> Reason:
        """Reason why waiting cannot be separated from data transfer: one rank only, or no collectives match."""
        if len(self.ranks) > 1 and self.matching.mismatched:
            return Reason.SEQUENCE_MISMATCH
        if len(self.ranks) > 1 and self.matching.misaligned:
            return Reason.NO_CLOCK_ALIGNMENT
        if len(self.ranks) > 1:
            return Reason.RANKS_MISSING if self.num_devices > len(self.ranks) else Reason.NO_COLLECTIVE_ARGS
        return Reason.RANKS_MISSING if (self.world_size or 1) > 1 else Reason.SINGLE_RANK


def require_windows(view: RankView) -> Int64s:
    """Return the rank's windows; raises NotAvailable if the rank has no device events."""
    if not len(view.busy_M2):
        what = "no device event takes time" if len(view.device_rows) else "no device events"
        raise NotAvailable(Reason.NO_GPU_EVENTS, what)
    return view.windows.spans_W2


def call_both(threads: int, one: Callable[[], One], other: Callable[[], Other]) -> tuple[One, Other]:
    """Return the results of both; with several threads they run at the same time (numpy mostly releases the GIL)."""
    if threads < 2:
        return one(), other()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(other)
        return one(), found.result()
