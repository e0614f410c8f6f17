"""The files of a trial that pages show as text, without secrets, and CCL-Bench's metrics of its traces."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import JobFileError, open_inside, open_job_file
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import format_value as format_bytes
from cclsearch.core.text import plain
from cclsearch.record.trial import Trial
from cclsearch.report.figures import format_value
from cclsearch.run.folder import Run
from cclsearch.tasks.base import task_of
from cclsearch.trace.ccl_bench import DASHBOARD, describe_name, measure_by_name
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

MAX_FILES = 200
MAX_DEPTH = 3
# The end of a log shows what happened.
SHOWN_BYTES = 2**20
"""Number of last bytes shown of a longer file."""
TEXT_SUFFIXES = (".json", ".jsonl", ".log", ".sh", ".txt", ".yaml", ".yml", ".csv", ".out", ".err")


@dataclass(frozen=True)
class EvidenceFile:
    """One file of a trial."""

    path: str
    """Relative to the run folder."""
    num_bytes: int
    is_text: bool

    @property
    def size(self) -> str:
        """`812 B`, `14.2 kB`, `3.1 MB`."""
        return format_bytes(self.num_bytes, "B")


def list_files(run: Run, trial: Trial) -> list[EvidenceFile]:
    """The regular files in the trial's folder, and the LLM's turn that proposed it; links are left out."""
    found = [*_walk(run.trial_folder(trial.number), MAX_DEPTH, MAX_FILES)]
    if trial.turn is not None:
        found += [one for one in _walk(run.folder / "turns", 0) if one[0].name == f"{trial.turn:04d}.json"]
    return [
        EvidenceFile(path.relative_to(run.folder).as_posix(), num_bytes, path.name.endswith(TEXT_SUFFIXES))
        for path, num_bytes in found
    ]


def _walk(root: Path, depth: int, most: float = math.inf) -> Iterator[tuple[Path, int]]:
    """The regular files under a folder, and their bytes: at most `most`, not deeper than `depth` folders.

    No link is followed, and none on the way to the folder; files with a second name (hard links) are left out.
    """
    with contextlib.suppress(OSError):
        descriptor = open_inside(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for base, folders, names, folder in os.fwalk(".", dir_fd=descriptor):
                folders[:] = sorted(folders) if len(Path(base).parts) < depth else []
                for name in sorted(names):
                    with contextlib.suppress(OSError):  # it was deleted meanwhile
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                            yield root / base / name, status.st_size
                            most -= 1
                            if most <= 0:
                                return
        finally:
            os.close(descriptor)


def read_text(run: Run, trial: Trial, path: str) -> str:
    """The end of one of the trial's files as plain text with secrets masked; UserError if it is not one of them."""
    if not any(file.path == path and file.is_text for file in list_files(run, trial)):
        raise UserError(f"trial {trial.number} has no such file of text")
    try:
        with open_job_file(run.folder / path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - SHOWN_BYTES))
            text = file.read(SHOWN_BYTES).decode(errors="replace")
    except (OSError, JobFileError) as error:
        raise UserError(f"the file cannot be read: {error}") from None
    cut = f"[the last {SHOWN_BYTES:,} of {size:,} bytes]\n" if size > SHOWN_BYTES else ""
    return cut + plain(redact(text))


# A page waits for the result.
MAX_BYTES, MAX_TRACE_DEPTH = 512 * 2**20, 12
"""Traces that are larger are left to `ccl-search score`, files in deeper folders out."""


@dataclass(frozen=True)
class TracedName:
    """One name of the dashboard, as a trial's traces answer it."""

    name: str
    value: float | None
    shown: str
    """The value with its unit; `-` if there is none."""
    status: str
    why: str
    answered_by: str
    differs: str


class TraceMetrics:
    """Reads traces of trials, one at a time, and keeps their results."""

    def __init__(self) -> None:
        self.known: dict[tuple[Path, int], dict[str, TracedName]] = {}
        """Run folder and trial -> name -> its traces' result, for the trials that were read."""
        self._lock = threading.Lock()

    def measure(self, run: Run, trial: Trial) -> list[TracedName]:
        """Every name of the dashboard; raises UserError if the trial has no traces, or too large ones."""
        folder = run.trial_folder(trial.number) / "trace"
        with self._lock:
            known = self.known.get((run.folder, trial.number))
            if known is None:
                with _copy_traces(folder) as copy:
                    traces = read_traces(copy, use_cache=False)
                    view = TraceView(traces, card=run.spec.card.for_trial(trial.config), config=trial.config)
                    known = {name: _measure_one(run, view, name) for name in DASHBOARD}
                self.known[run.folder, trial.number] = known
        return list(known.values())


@contextlib.contextmanager
def _copy_traces(folder: Path) -> Iterator[Path]:
    """A copy of the trial's own trace files: readers open files by name, which may become a link meanwhile."""
    left = MAX_BYTES
    with tempfile.TemporaryDirectory(prefix="ccl-search-ui-") as scratch:
        for path, _ in _walk(folder, MAX_TRACE_DEPTH):
            if path.name.startswith("."):
                continue
            copy = Path(scratch, path.relative_to(folder))
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open_job_file(path) as source, copy.open("wb") as target:
                    while block := source.read(2**20):
                        target.write(block)
                        left -= len(block)
                        if left < 0:
                            why = f"its traces have over {MAX_BYTES >> 20} MiB"
                            raise UserError(f"{why}: run `ccl-search score` on the trial's folder")
            except (OSError, JobFileError):
                continue
        if left == MAX_BYTES:
            raise UserError("this trial has no traces: nothing was profiled, or its evidence was removed")
        yield Path(scratch)


def _measure_one(run: Run, view: TraceView, name: str) -> TracedName:
    (result,) = measure_by_name(view, name).values()
    known = describe_name(name)
    metric = task_of(run.spec.card).metric(name).model_copy(update={"unit": result.unit})
    return TracedName(
        name=name,
        value=result.value,
        shown="-" if result.value is None else format_value(metric, result.value),
        status=result.status.value.replace("_", " "),
        why=result.detail or (result.reason.value.replace("_", " ") if result.reason else ""),
        answered_by=known.metric,
        differs=known.differs,
    )
