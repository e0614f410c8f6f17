"""Removes old evidence by the stated policy. Ledgers, frozen inputs and winners' evidence always stay.

Only folders `trials/NNNN` that really lie in a run of the series are ever removed: no link is followed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from cclsearch.errors import UserError
from cclsearch.nightly.config import Keep
from cclsearch.nightly.history import find_series
from cclsearch.record.lock import is_locked
from cclsearch.run_folder import load_run

_TRIAL = re.compile(r"^\d{4,}$")


@dataclass(frozen=True)
class Pruned:
    """What was removed, or would be."""

    num_trials: int = 0
    num_bytes: int = 0
    nights: tuple[str, ...] = ()
    """Nights that lost evidence."""
    notes: tuple[str, ...] = ()
    """What could not be removed, and why."""


@dataclass(frozen=True)
class _Evidence:
    stamp: str
    folder: Path
    num_bytes: int


def prune_evidence(runs: Path, name: str, keep: Keep, *, tonight: str, dry_run: bool = False) -> Pruned:
    """Remove what the policy does not keep, the oldest first; tonight's and what is being written is never touched."""
    series = find_series(runs, name)
    old = [stamp for stamp in series if stamp < tonight]
    removable = {stamp: [e for folder in series[stamp] for e in _removable(stamp, folder)] for stamp in old}
    chosen: list[_Evidence] = []
    others = keep.nights - 1 if keep.nights is not None else len(old)
    for stamp in old[: max(len(old) - others, 0)]:
        chosen += removable.pop(stamp)
    if keep.gib is not None:
        total = sum(measure_folder(folder) for folders in series.values() for folder in folders)
        total -= sum(evidence.num_bytes for evidence in chosen)
        for evidence in (e for stamp in list(removable) for e in removable[stamp]):
            if total <= keep.gib * 2**30:
                break
            chosen.append(evidence)
            total -= evidence.num_bytes
    return _remove(chosen, dry_run)


def measure_folder(folder: Path) -> int:
    """Bytes of the regular files under a folder; no link is followed."""
    total = 0
    for base, _, names in os.walk(folder, followlinks=False):
        for name in names:
            try:
                status = os.lstat(Path(base, name))
            except OSError:
                continue
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _removable(stamp: str, folder: Path) -> list[_Evidence]:
    """A run's trial folders that no winner owns; none where the run is in use or cannot be read."""
    trials = folder / "trials"
    if trials.is_symlink() or not trials.is_dir() or is_locked(folder):
        return []
    try:
        run = load_run(folder)
    except UserError:
        return []
    if run.state.unfinished:
        return []
    best = run.state.best
    kept = {trial.number for trial in run.state.runs_of(best.config)} if best else set()
    found = [p for p in sorted(trials.iterdir()) if _TRIAL.match(p.name) and not p.is_symlink() and p.is_dir()]
    return [_Evidence(stamp, path, measure_folder(path)) for path in found if int(path.name) not in kept]


def _remove(chosen: list[_Evidence], dry_run: bool) -> Pruned:
    removed: list[_Evidence] = []
    notes = []
    for evidence in chosen:
        try:
            if not dry_run:
                shutil.rmtree(evidence.folder)
            removed.append(evidence)
        except OSError as error:
            notes.append(f"cannot remove {str(evidence.folder)!r}: {error.strerror or error}")
    nights = tuple(dict.fromkeys(evidence.stamp for evidence in removed))
    return Pruned(len(removed), sum(evidence.num_bytes for evidence in removed), nights, tuple(notes))
