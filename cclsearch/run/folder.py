"""A run on disk: creates its folder with the frozen inputs, and reads it for reports, exports and comparisons."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cclsearch.card.model import KnobDeclaration
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import has_job_file
from cclsearch.core.trial_folder import trial_folder
from cclsearch.record.event import EndKind, SpaceGrown
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.record.lock import FolderLock, is_locked
from cclsearch.record.state import RunState
from cclsearch.run.spec import SPEC_FILE, RunSpec, read_spec, write_spec
from cclsearch.run.usage import find_node_hour_limit


class Standing(StrEnum):
    """What became of a search."""

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

    @property
    def status(self) -> Standing:
        """What became of the search."""
        if self.is_running:
            return Standing.RUNNING
        if self.state.ended:
            return Standing.ENDED
        return Standing.STOPPED if self.state.stopped else Standing.KILLED


def load_run(folder: Path) -> Run:
    """Read a run folder; raises UserError if it is not one, is damaged, or was written by a newer version."""
    spec = read_spec(folder)
    ledger = folder / LEDGER_FILE
    state = fold_ledger(ledger) if has_job_file(ledger) else RunState()
    return Run(folder, grow_spec(spec, state.growth), state, is_locked(folder))


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
    return spec.model_copy(update=grown)


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
    return f"ccl-search resume {name}" + (f" --budget {state.num_spent + spec.limits.budget}" if is_used_up else "")
