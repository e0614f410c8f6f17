"""A run on disk: creates its folder with the frozen inputs, and reads it for reports, exports and comparisons."""

from __future__ import annotations

import math
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.content import trial_folder
from cclsearch.core.errors import DamagedLedger, UserError
from cclsearch.core.job_file import has_job_file
from cclsearch.core.text import count_of
from cclsearch.core.values import Config, Provenance
from cclsearch.record.event import EndKind, Event, SpaceGrown, explain_bad_lines
from cclsearch.record.ledger import LEDGER_FILE, LedgerFollower
from cclsearch.record.lock import FolderLock, is_locked
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.run.spec import SPEC_FILE, RunSpec, read_spec, write_spec
from cclsearch.run.usage import find_node_hour_limit


class Standing(StrEnum):
    """Status of a search."""

    RUNNING = "running"
    ENDED = "ended"
    STOPPED = "stopped"
    KILLED = "killed"
    """Its process is gone and recorded no end."""

    @property
    def is_resumable(self) -> bool:
        """Whether it ended before its work was done."""
        return self in (Standing.STOPPED, Standing.KILLED)


@dataclass(frozen=True)
class Run:
    """A search as read from its folder."""

    folder: Path
    spec: RunSpec
    state: RunState
    is_running: bool
    """Whether a running process writes to it."""

    def trial_folder(self, number: int) -> Path:
        """`trials/0007`: the evidence of trial 7."""
        return trial_folder(self.folder, number)

    def find_trial(self, number: int) -> Trial:
        """The trial of that number; raises UserError if there is none."""
        trial = self.state.trials.get(number)
        if trial is None:
            raise UserError(
                f"run {self.spec.run_id!r} has {count_of(len(self.state.trials), 'trial')}; there is no trial {number}"
            )
        return trial

    @property
    def status(self) -> Standing:
        """Return the status of the search."""
        if self.is_running:
            return Standing.RUNNING
        if self.state.ended:
            return Standing.ENDED
        return Standing.STOPPED if self.state.stopped else Standing.KILLED


def load_run(folder: Path) -> Run:
    """Read a run folder; raises UserError if it is not one, is damaged, or was written by a newer version."""
    return RunFollower(folder).read()


def load_runs(folders: Iterable[Path], skip: Callable[[str, UserError], None]) -> Iterator[Run]:
    """Read several run folders; one that cannot be read is skipped, and `skip` gets its name and the reason."""
    for folder in folders:
        try:
            yield load_run(folder)
        except UserError as error:
            skip(folder.name, error)


class RunFollower:
    """Reads a run that may still be searched: each time only the new part of its ledger."""

    def __init__(self, folder: Path) -> None:
        """Read the frozen inputs; raises UserError as `load_run` does."""
        self.folder = folder
        self.is_complete = False
        """Whether the last call of `read` came to the end of the ledger."""
        self.spec = read_spec(folder)
        self._ledger = LedgerFollower(folder / LEDGER_FILE)
        self._num_bad = 0

    @property
    def state(self) -> RunState:
        """The state as far as it was read."""
        return self._ledger.state

    @property
    def offset(self) -> int:
        """The number of bytes of the ledger that were read."""
        return self._ledger.offset

    def read(self, take: Callable[[Event], None] = lambda event: None, *, limit_s: float = math.inf) -> Run:
        """Read on to the end of the ledger, or for about that many seconds; `take` gets each event.

        The state of the returned run is the same object each time, unless the ledger was replaced: then it is begun
        anew. Raises UserError as `load_run` does, also if the run was deleted.
        """
        if not os.path.lexists(self.folder / SPEC_FILE):
            raise UserError(f"{str(self.folder)!r} is not a run folder: it has no {SPEC_FILE}")
        until_s, self.is_complete = time.monotonic() + limit_s, True
        if has_job_file(self._ledger.path):
            for event in self._ledger.read():
                take(event)
                if time.monotonic() >= until_s:
                    self.is_complete = False
                    break
        state = self.state
        if len(state.bad_lines) > self._num_bad:
            warnings.warn(explain_bad_lines(self._ledger.path, state.bad_lines), DamagedLedger, stacklevel=2)
        self._num_bad = len(state.bad_lines)
        return Run(self.folder, grow_spec(self.spec, state.growth), state, is_locked(self.folder))


def grow_spec(spec: RunSpec, growth: SpaceGrown | None) -> RunSpec:
    """The spec with the choices that were added to the search space since the search began."""
    if growth is None:
        return spec
    knobs = {knob.name: knob for knob in spec.knobs}
    knobs |= {
        name: KnobDeclaration(name=name, choices=choices, neutral=growth.neutral.get(name))
        for name, choices in growth.choices.items()
    }
    grown = {"knobs": tuple(knobs.values()), "space_sha256": growth.space_sha256, "space_size": growth.space_size}
    return spec.model_copy(update={**grown, "bases": growth.bases})


def create_run(spec: RunSpec, runs_folder: Path, *, extra_files: Mapping[str, str] | None = None) -> Path:
    """Create the run's folder with its frozen inputs; raises UserError if that is not possible.

    `extra_files` (file name -> text) are written before `search.yaml`, the file that makes the folder a run. A folder
    that an earlier call left without it, because it was killed, is reused.
    """
    folder = runs_folder.absolute() / spec.run_id
    extra = extra_files or {}
    unfinished = ("lock", f".{SPEC_FILE}.", *extra, *(f".{name}." for name in extra))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(folder):
            if any(not path.name.startswith(unfinished) for path in folder.iterdir()):
                raise FileExistsError
            for name, text in extra.items():
                write_atomically(folder / name, text)
            write_spec(folder, spec)
    except FileExistsError:
        resume = f"`ccl-search resume {shlex.quote(str(folder))}`"
        raise UserError(f"{str(folder)!r} exists already: choose another --name, or run {resume}") from None
    except OSError as error:
        raise UserError(f"cannot create the run folder {str(folder)!r}: {error.strerror or error}") from None
    return folder


def resume_command(spec: RunSpec, state: RunState, name: str) -> str:
    """The command that continues the search; with a greater budget or limit if the present one leaves nothing to do."""
    end, limit = state.ended or state.stopped, find_node_hour_limit(spec, state)
    if end is not None and end.kind is EndKind.NODE_HOURS and limit is not None:
        return f"ccl-search resume {name} --max-node-hours {2 * limit:g}"
    left = max(spec.limits.budget, state.budget_raised_to) - state.num_spent
    is_used_up = left <= 0 and not state.num_unfinished and state.best is None
    is_told = spec.provenance is Provenance.CALLER and not spec.profile.settings.get("command")
    verb = "ask" if is_told else "resume"
    return f"ccl-search {verb} {name}" + (f" --budget {state.num_spent + spec.limits.budget}" if is_used_up else "")


def find_trial_inputs(path: Path) -> tuple[Card, Config] | None:
    """Card and configuration of the trial that a path is part of, `RUN/trials/0001` or below; None without one."""
    for folder in (path.resolve(), *path.resolve().parents):
        if folder.parent.name == "trials" and folder.name.isdigit() and (folder.parent.parent / SPEC_FILE).is_file():
            run = load_run(folder.parent.parent)
            trial = run.state.trials.get(int(folder.name))
            return None if trial is None else (run.spec.card, trial.config)
    return None
