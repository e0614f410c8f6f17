"""Finds the trace files of one run by the names that frameworks give them.

torchtitan: `profile_trace/iteration_10/rank0_trace.json`; torch's default: `host_pid.timestamp.pt.trace.json.gz`;
Megatron and others: any name with `rank12`; MaxText and JAX: `plugins/profile/<time>/<host>.xplane.pb`. If a folder
contains several profiles of the same run (iterations, sessions), the latest is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cclsearch.trace.readers.base import READERS
from cclsearch.trace.readers.stream import read_head

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
