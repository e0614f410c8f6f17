"""Decide which run a job belongs to: a copied run folder has the original's records, but not its jobs.

A folder that was moved is still the run: its jobs' recorded path is gone, and its inode is the recorded one.
"""

from __future__ import annotations

from pathlib import Path

from cclsearch.core.content import TRIALS_FOLDER
from cclsearch.core.values import Model
from cclsearch.launch.base import Handle

INODE_DETAIL = "run_inode"
_RUN_FILES = ("search.yaml", "ledger.jsonl")


def run_folder_of(trial_dir: Path) -> Path | None:
    """Return the run folder of a trial's or an attempt's folder; None if it is in none."""
    return next((folder.parent for folder in trial_dir.parents if folder.name == TRIALS_FOLDER), None)


def read_inode(run_dir: Path | None) -> str:
    """Return a run folder's inode, which a move within a file system keeps and a copy does not; empty if unknown."""
    try:
        return str(run_dir.stat().st_ino) if run_dir is not None else ""
    except OSError:
        return ""


def is_own(run_dir: Path | None, trial_dir: Path, inode: str = "") -> bool:
    """Whether a job that started in `trial_dir` belongs to the run in `run_dir`, and not to one it is a copy of.

    `inode` is the job's run folder's when it started; empty if unknown.
    """
    recorded = run_folder_of(trial_dir)
    if run_dir is None or recorded is None or recorded == run_dir:
        return True
    if any((recorded / name).exists() for name in _RUN_FILES):
        return recorded.samefile(run_dir) if run_dir.exists() else False
    return inode in ("", read_inode(run_dir))


class RunPlace(Model):
    """Place of the run when a record was written: in a copy of the run's folder, the record is the original's."""

    folder: Path
    inode: str

    @classmethod
    def of(cls, run_dir: Path) -> RunPlace:
        """Return the place of the run in that folder."""
        return cls(folder=run_dir.absolute(), inode=read_inode(run_dir))

    def is_of(self, run_dir: Path) -> bool:
        """Whether the run in that folder is the one that wrote the record."""
        return is_own(run_dir.absolute(), self.folder / TRIALS_FOLDER / "any", self.inode)


def find_attempt_files(run_dir: Path | None, name: str) -> list[Path]:
    """Return the files or folders of that name (or pattern) of all attempts of a run, in order."""
    trials = (run_dir or Path()).absolute() / TRIALS_FOLDER
    return sorted([*trials.glob(f"*/{name}"), *trials.glob(f"*/attempts/*/{name}")]) if run_dir is not None else []


def place_in(run_dir: Path, trial_dir: Path) -> Path:
    """Return where a folder of the run is now that the run is in `run_dir`."""
    recorded = run_folder_of(trial_dir)
    return trial_dir if recorded is None else run_dir / trial_dir.relative_to(recorded)


def stamp_handle(handle: Handle, run_dir: Path) -> Handle:
    """Return the handle with the inode of its run folder, for `is_own_handle`."""
    return handle.model_copy(update={"details": {**handle.details, INODE_DETAIL: read_inode(run_dir)}})


def is_own_handle(handle: Handle, run_dir: Path) -> bool:
    """Whether the handle's job belongs to the run in this folder."""
    return is_own(run_dir, handle.trial_dir, handle.details.get(INODE_DETAIL, ""))


def move_handle(handle: Handle, run_dir: Path) -> Handle:
    """Return the handle of a run's own job with its paths in the run's present folder."""
    recorded = run_folder_of(handle.trial_dir)
    if recorded is None or recorded == run_dir:
        return handle
    paths = {name: value for name, value in handle.details.items() if value.startswith(f"{recorded}/")}
    moved = {name: str(place_in(run_dir, Path(value))) for name, value in paths.items()}
    place = place_in(run_dir, handle.trial_dir)
    return handle.model_copy(update={"trial_dir": place, "details": {**handle.details, **moved}})
