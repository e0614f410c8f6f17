"""Finds the trace files of one run by the names that frameworks give them, and merges their tables by rank.

torchtitan: `profile_trace/iteration_10/rank0_trace.json`; torch's default: `host_pid.timestamp.pt.trace.json.gz`;
Megatron and others: any name with `rank12`; MaxText and JAX: `plugins/profile/<time>/<host>.xplane.pb`. If a folder
contains several profiles of the same run (iterations, sessions), the latest is used. Files of different runs are
refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cclsearch.core.text import one_line
from cclsearch.trace.events import EventTable, FileReport, FileStatus, Reason, Status, TraceSet
from cclsearch.trace.files.cache import release_memory
from cclsearch.trace.matching import blocking_groups, share_clock
from cclsearch.trace.readers.base import READERS
from cclsearch.trace.readers.stream import TraceError, read_head

MAX_FILES = 100_000
MAX_DEPTH = 12
# It is asked last, so that a package can add a reader for one of them.
UNSUPPORTED = "unsupported"
"""The reader that refuses known formats."""

_RANK = re.compile(r"(?:^|[^a-z])(?:global_?)?(?:rank|worker|process|proc|gpu)[-_=.]?(\d{1,6})", re.IGNORECASE)
_SHORT_RANK = re.compile(r"(?:^|[._-])r(\d{1,6})(?=[._-])", re.IGNORECASE)
_CYCLE = re.compile(r"(?:^|[^a-z])(?:iteration|iter|step|cycle)[-_=.]?(\d{1,12})", re.IGNORECASE)
_TORCH_DEFAULT = re.compile(r"^(?P<worker>.+?)\.(?P<time>\d{10,20})\.pt\.trace\.json(\.gz)?$")
_MAY_BE_TRACE = (".json", ".json.gz", ".trace", ".trace.gz", ".db", ".pb", ".pb.gz")
"""Ends of names; other files (logs, scripts, checkpoints) are not opened."""
_SESSION = re.compile(r"(?:^|/)plugins/profile/(?P<time>[^/]+)/")


@dataclass(frozen=True)
class TraceFile:
    """One file that a reader claims."""

    path: Path
    relative: str
    """Posix path relative to the searched folder."""
    reader: str
    format: str

    @property
    def rank_in_name(self) -> int | None:
        """Rank in the file's name, else in the name of the nearest folder that has one; None without."""
        for part in reversed(self.relative.split("/")):
            found = _RANK.search(part) or _SHORT_RANK.search(part)
            if found:
                return int(found[1])
        return None


def find_traces(path: Path) -> list[TraceFile]:
    """Return the trace files of the latest profile at `path` (a file, or a folder with subfolders), sorted by path."""
    if path.is_file():
        claimed = _claim(path, path.name)
        return [claimed] if claimed else []
    files = [file for found in _walk(path) if (file := _claim(found, found.relative_to(path).as_posix()))]
    files = _drop_duplicates(files)
    return _keep_latest(files)


def _walk(folder: Path) -> Iterator[Path]:
    seen = 0
    for root, folders, names in os.walk(folder):
        depth = len(Path(root).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and depth < MAX_DEPTH)
        for name in sorted(names):
            seen += 1
            if seen > MAX_FILES:
                return
            if not name.startswith("."):
                yield Path(root) / name


def _claim(path: Path, relative: str) -> TraceFile | None:
    if not os.path.isfile(path):  # False also where a link leads to what this user may not see
        return None
    head: bytes | None = None
    for name in sorted(READERS.names(), key=lambda name: name == UNSUPPORTED):
        reader = READERS.get(name)()
        if head is None:
            head = read_head(path) if path.name.lower().endswith(_MAY_BE_TRACE) else b""
        if reader.claims(path, head):
            return TraceFile(path, relative, name, reader.format)
    return None


def _drop_duplicates(files: list[TraceFile]) -> list[TraceFile]:
    """Keep one file per profile: XLA's XSpace, which has more than its JSON; the export of an Nsight report.

    Files of an unsupported format are kept only if there are no others.
    """
    files = [file for file in files if file.reader != UNSUPPORTED] or files
    spaces = {file.path.parent for file in files if file.reader == "xspace"}
    exports = {file.path.with_suffix("") for file in files if file.path.suffix.lower() in (".sqlite", ".sqlite3")}
    kept = []
    for file in files:
        is_xla_json = file.path.parent in spaces and file.reader == "chrome-json" and ".trace.json" in file.path.name
        is_report = file.path.suffix.lower() in (".nsys-rep", ".qdrep") and file.path.with_suffix("") in exports
        if not is_xla_json and not is_report:
            kept.append(file)
    return kept


def _keep_latest(files: list[TraceFile]) -> list[TraceFile]:
    """Keep the last session of each host (hosts may name one session a second apart), and the last iteration."""
    last: dict[str, str] = {}
    for file in files:
        session = _session_of(file)
        if session is not None:
            last[_host_of(file)] = max(session, last.get(_host_of(file), ""))
    files = [file for file in files if _session_of(file) in (None, last.get(_host_of(file)))]
    cycles = {cycle for file in files if (cycle := _cycle_of(file)) is not None}
    if len(cycles) > 1:
        newest = max(cycles)
        files = [file for file in files if _cycle_of(file) in (None, newest)]
    by_worker: dict[tuple[Path, str], tuple[int, TraceFile]] = {}
    others = []
    for file in files:
        found = _TORCH_DEFAULT.match(file.path.name)
        if not found:
            others.append(file)
            continue
        key, time = (file.path.parent, found["worker"]), int(found["time"])
        if key not in by_worker or by_worker[key][0] < time:
            by_worker[key] = (time, file)
    return sorted([*others, *(file for _, file in by_worker.values())], key=lambda file: _path_key(file.relative))


def _session_of(file: TraceFile) -> str | None:
    found = _SESSION.search("/" + file.relative)
    return found["time"] if found else None


def _host_of(file: TraceFile) -> str:
    """The file's path without its session: equal for all sessions of one host's process."""
    return _SESSION.sub("/", "/" + file.relative)


def _cycle_of(file: TraceFile) -> int | None:
    found = _CYCLE.search(file.relative)
    return int(found[1]) if found else None


def _path_key(text: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text) if part]


MAX_GAP_NS = 600 * 10**9
"""Largest gap between the profiled windows of one run's ranks on one clock; a wider gap means two runs."""
EXECUTION = "pytorch-et"
_FORMATS = ("kineto", "xla", "nsys", "rocprof", "chakra", EXECUTION)
_MOST_SEVERE_FIRST = (
    Reason.MIXED_RUNS,
    Reason.UNREADABLE,
    Reason.TOO_LARGE,
    Reason.FORMAT_UNSUPPORTED,
    Reason.NO_GPU_EVENTS,
    Reason.MISSING_KERNELS,
    Reason.IMPOSSIBLE_TIMES,
    Reason.RANKS_MISSING,
    Reason.TRACE_TRUNCATED,
)

_TimedTable = tuple[int, int, EventTable]
"""First start and last end of a table, absolute in ns, and the table."""
FileTables = tuple[tuple[EventTable, ...], FileReport]


def merge_tables(files: Sequence[TraceFile], results: Sequence[FileTables], *, folder: Path) -> TraceSet:
    """Return the run's tables by rank; status `not_available` if no file is usable or if files are of two runs."""
    reports = tuple(report for _, report in results)
    pairs = [(file, table) for file, (tables, _) in zip(files, results, strict=True) for table in tables]
    if not pairs:
        worst = _by_severity({report.reason or Reason.UNREADABLE for report in reports})
        first = next((r for r in reports if (r.reason or Reason.UNREADABLE) == worst[0]), reports[0])
        message = f"{first.path}: {first.message or 'cannot be read'}"
        return TraceSet({}, Status.NOT_AVAILABLE, worst, message, files=reports, folder=folder)
    pairs, notes = _join_execution_traces(pairs)
    formats = {table.format for _, table in pairs}  # a run recorded by two profilers would count twice
    chosen = next((name for name in _FORMATS if name in formats), min(formats))
    pairs = [(file, table) for file, table in pairs if table.format == chosen]
    if pairs[0][1].format != EXECUTION:  # what only adds to a profile cannot make it partial
        unusable = [r for f, r in zip(files, reports, strict=True) if f.format == EXECUTION and r.reason]
        notes += [f"{report.path} is not used: {report.message or report.reason}" for report in unusable]
        reports = tuple(report for report in reports if report not in unusable)
    ranks = assign_ranks(pairs)
    tables = [replace(table, rank=rank) for rank, (_, table) in zip(ranks, pairs, strict=True)]
    mixed = find_mixed_runs(tables)
    if mixed:
        return TraceSet({}, Status.NOT_AVAILABLE, (Reason.MIXED_RUNS,), mixed, files=reports, folder=folder)
    return _finish(tables, reports, folder, notes)


def _join_execution_traces(
    pairs: list[tuple[TraceFile, EventTable]],
) -> tuple[list[tuple[TraceFile, EventTable]], list[str]]:
    """Return the pairs, Kineto's tables joined with execution traces of their ranks, and notes on the joins."""
    executions = [pair for pair in pairs if pair[1].format == EXECUTION]
    profiles = [pair for pair in pairs if pair[1].format == "kineto"]
    if not executions or not profiles:
        return pairs, []
    ranks = assign_ranks(profiles)
    from cclsearch.trace.files.execution_join import join_execution_trace, read_record_ids

    of_rank = dict(zip(_ranks_beside(executions, ranks), executions, strict=True))
    joined, notes = [], []
    for rank, (file, table) in zip(ranks, profiles, strict=True):
        if rank not in of_rank:
            joined.append((file, table))
            continue
        try:
            table, note = join_execution_trace(table, of_rank[rank][1], read_record_ids(file.path))
        except (TraceError, OSError) as error:
            note = f"{file.relative} cannot be joined: {one_line(str(error))}"
        joined.append((file, table))
        notes.append(note)
    strangers = sorted(table.source for rank, (_, table) in of_rank.items() if rank not in ranks)
    notes += [f"{source} is of a rank without a profiler's trace: not joined" for source in strangers]
    return joined, notes


def _ranks_beside(executions: Sequence[tuple[TraceFile, EventTable]], ranks: Sequence[int]) -> list[int]:
    """Return the rank of each execution trace; for one without any number, beside one profile, the profile's."""
    (file, table), alone = executions[0], len(executions) == len(ranks) == 1
    if alone and table.rank < 0 and file.rank_in_name is None:
        return [ranks[0]]
    return assign_ranks(executions)


def _finish(
    tables: Sequence[EventTable], reports: tuple[FileReport, ...], folder: Path, notes: Sequence[str]
) -> TraceSet:
    worlds = [table.world_size for table in tables if table.world_size is not None]
    world = max(worlds) if worlds else None
    by_rank = {table.rank: table for table in sorted(tables, key=lambda table: table.rank)}
    missing = tuple(sorted(set(range(world)) - set(by_rank))) if world is not None else ()
    reasons = {reason for table in tables for reason in table.reasons}
    refused = [report for report in reports if report.status == FileStatus.NOT_AVAILABLE]
    reasons |= {report.reason or Reason.UNREADABLE for report in refused}
    problems = [f"{report.path}: {report.message or report.reason}" for report in refused]
    partial = [table for table in tables if table.status == FileStatus.PARTIAL]
    problems += dict.fromkeys(f"{t.source}: {'; '.join(t.problems) or ', '.join(t.reasons)}" for t in partial)
    if missing:
        reasons.add(Reason.RANKS_MISSING)
        problems.append(f"{len(missing)} of {world} ranks have no trace")
    problems += _describe_devices(tables)
    problems += filter(None, notes)
    return TraceSet(
        by_rank,
        Status.PARTIAL if reasons else Status.OK,
        _by_severity(reasons),
        "; ".join(problems)[:2000],
        world_size=world,
        missing_ranks=missing,
        files=reports,
        folder=folder,
    )


def _describe_devices(tables: Sequence[EventTable]) -> list[str]:
    """Return a line for each file whose rank has work on several devices, since no figure separates them."""
    return [
        f"{table.source}: one rank with {len(table.devices)} devices, which count as busy while any of them is"
        for table in tables
        if len(table.devices) > 1
    ]


def assign_ranks(pairs: Sequence[tuple[TraceFile, EventTable]]) -> list[int]:
    """Return the rank of each table: from the trace, else from the file's name, else by order.

    If all traces have the same rank but the names differ (ranks that never joined a group), the names decide.
    """
    stated = [table.rank for _, table in pairs]
    named = [file.rank_in_name for file, _ in pairs]
    several_in_a_file = len({file.path for file, _ in pairs}) < len(pairs)
    if max(stated) < 0 and (len(pairs) == 1 or several_in_a_file):
        return list(range(len(pairs))) if len(pairs) > 1 else [named[0] or 0]
    names_differ = None not in named and len(set(named)) == len(pairs)
    never_joined = len(set(stated)) == 1 and all(table.world_size in (None, 1) for _, table in pairs)
    if names_differ and never_joined and len(pairs) > 1:
        return [rank for rank in named if rank is not None]
    chosen = [rank if rank >= 0 else name for rank, name in zip(stated, named, strict=True)]
    free = (number for number in range(len(pairs) * 2 + 1) if number not in chosen)
    return [rank if rank is not None else next(free) for rank in chosen]


def find_mixed_runs(tables: Sequence[EventTable]) -> str:
    """One line that says why the tables cannot be of one run; "" if they can."""
    by_rank: dict[int, EventTable] = {}
    for table in tables:
        other = by_rank.setdefault(table.rank, table)
        if other is not table:
            return f"rank {table.rank} appears twice: {other.source} and {table.source}"
    worlds = {table.world_size for table in tables if table.world_size is not None}
    if len(worlds) > 1:
        return f"the traces are of runs with {' and '.join(str(world) for world in sorted(worlds))} ranks"
    world = next(iter(worlds), None)
    if world is not None and max(by_rank) >= world:
        return f"rank {max(by_rank)} in a run of {world} ranks"
    several = tables if len(tables) > 1 else ()
    timed: list[_TimedTable] = []
    for table in several:
        if table.clock == "unix" and len(table):
            timed.append((table.base_ns + int(table.ts_ns.min()), table.base_ns + int(table.end_ns.max()), table))
            release_memory(table)  # its columns do not stay in memory
    return _find_differing_groups(tables) or _find_distant_windows(timed) or _find_disjoint_ranks(tables, timed)


def _find_differing_groups(tables: Sequence[EventTable]) -> str:
    """One line if a group of all ranks has different members in two traces; else ""."""
    members: dict[str, tuple[int, ...]] = {}
    for table in tables:
        for group in table.groups:
            if group.desc == "default_pg" and group.ranks:
                known = members.setdefault(group.name, group.ranks)
                if known != group.ranks:
                    return f"process group {group.name} has different members in {table.source}"
    return ""


def _find_distant_windows(timed: Sequence[_TimedTable]) -> str:
    if len(timed) < 2:
        return ""
    spans = sorted((start, end, table.source) for start, end, table in timed)
    end = spans[0][1]
    for start, stop, source in spans[1:]:
        if start - end > max(MAX_GAP_NS, stop - start):
            return f"{source} begins {(start - end) / 1e9:.0f} s after the others end"
        end = max(end, stop)
    return ""


def _find_disjoint_ranks(tables: Sequence[EventTable], timed: Sequence[_TimedTable]) -> str:
    """One line if two ranks on one clock use the same blocking group, but never at the same time; else ""."""
    if len({table.source for table in tables}) < 2 or not share_clock(tables):
        return ""
    world = next((table.world_size for table in tables if table.world_size is not None), len(tables))
    calling = [(start, end, blocking_groups(t, t.rank, world), t.source) for start, end, t in timed]
    for start, _, groups, source in calling:
        for _, end, others, earlier in calling:
            if start > end and groups & others:
                gap = f"{source} begins {(start - end) / 1e9:.3g} s after {earlier} ends"
                return f"{gap}, on the same clock and with the same collectives"
    return ""


def _by_severity(reasons: set[Reason]) -> tuple[Reason, ...]:
    order = {reason: place for place, reason in enumerate(_MOST_SEVERE_FIRST)}
    return tuple(sorted(reasons, key=lambda reason: (order.get(reason, len(order)), reason)))
