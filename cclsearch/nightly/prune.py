"""Remove old evidence by the rules of `keep`. Ledgers, frozen inputs and winners' evidence always stay.

Only real folders `trials/NNNN` inside a run of the series are ever removed, and with them the traces of exactly those
trials on the profile's scratch: no link is followed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from cclsearch.core.content import TRIALS_FOLDER
from cclsearch.core.errors import UserError
from cclsearch.core.values import Model
from cclsearch.launch.contract import TRACE_FOLDER
from cclsearch.nightly.config import Keep
from cclsearch.nightly.history import find_series, read_night
from cclsearch.nightly.window import NIGHT_FILE, SUMMARY_FILE, nights_folder
from cclsearch.record.lock import is_locked
from cclsearch.record.writer import list_trial_folders
from cclsearch.run.folder import Run, load_run
from cclsearch.run.trial_folder import ATTEMPTS_FOLDER


class Pruned(Model):
    """Evidence that was removed, or would be."""

    trials: int = 0
    gib: float = 0.0
    nights: tuple[str, ...] = ()
    """Nights that lost evidence."""
    notes: tuple[str, ...] = Field(default=(), exclude=True)
    """Folders that could not be removed, and why."""


@dataclass(frozen=True)
class _Evidence:
    stamp: str
    folder: Path
    scratch: tuple[Path, ...]
    """Folders on the profile's scratch with this trial's traces."""

    @property
    def num_bytes(self) -> int:
        return sum(measure_folder(folder) for folder in (self.folder, *self.scratch))


def prune_evidence(
    runs: Path, name: str, keep: Keep, *, tonight: str, current_runs: Collection[str] = (), dry_run: bool = False
) -> Pruned:
    """Remove the evidence that the policy does not keep, the oldest first.

    Never touched: runs in use, winners, and the run folders of the present night. These are the ones with its stamp and
    the ones named in `current_runs`, since a night may continue a run that an earlier one started.
    """
    series_folder = nights_folder(runs, name)
    series = _find_nights(find_series(runs, name), series_folder, tonight=tonight, current_runs=current_runs)
    winners = _find_winners(series_folder)
    old = [stamp for stamp in series if stamp < tonight]
    removable = {stamp: [e for folder in series[stamp] for e in _removable(stamp, folder, winners)] for stamp in old}
    chosen: list[_Evidence] = []
    others = keep.nights - 1 if keep.nights is not None else len(old)
    for stamp in old[: max(len(old) - others, 0)]:
        chosen += removable.pop(stamp)
    if keep.gib is not None:
        total = sum(_measure_run(folder) for folders in series.values() for folder in folders)
        total -= sum(evidence.num_bytes for evidence in chosen)
        for evidence in (e for stamp in list(removable) for e in removable[stamp]):
            if total <= keep.gib * 2**30:
                break
            chosen.append(evidence)
            total -= evidence.num_bytes
    return _remove(chosen, dry_run)


def measure_folder(folder: Path) -> int:
    """Count the bytes of the regular files under a folder; no link is followed."""
    total = 0
    for base, _, names in os.walk(folder, followlinks=False):
        for name in names:
            try:
                status = os.lstat(Path(base, name))
            except OSError:
                continue
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def find_scratch(run: Run, trial: Path) -> tuple[Path, ...]:
    """Folders on the profile's scratch with the traces of a trial's attempts, found through the links in its evidence.

    Only real folders `SCRATCH/RUN-tNNNN-aN-RANDOM` of this trial: a link to any other place is not ours and is ignored.
    """
    setting = run.spec.profile.settings.get("scratch")
    scratch = Path(setting).expanduser() if isinstance(setting, str) else Path()
    if not scratch.is_absolute():
        return ()
    own = re.compile(rf"{re.escape(run.spec.run_id)}-t{re.escape(trial.name)}-a\d+-[0-9a-f]{{8}}")
    found = []
    for link in (trial / TRACE_FOLDER, *sorted(trial.glob(f"{ATTEMPTS_FOLDER}/*/{TRACE_FOLDER}"))):
        if not link.is_symlink():
            continue
        target = Path(os.readlink(link))
        folder = target.parent
        is_own = target.name == TRACE_FOLDER and folder.parent == scratch and own.fullmatch(folder.name)
        if is_own and not folder.is_symlink() and folder.is_dir():
            found.append(folder)
    return tuple(found)


def _find_nights(
    series: Mapping[str, list[Path]], series_folder: Path, *, tonight: str, current_runs: Collection[str]
) -> dict[str, list[Path]]:
    """Run folders by the last night that worked on them, the oldest night first."""
    last: dict[str, str] = {}
    for folder, data in _read_nights(series_folder, NIGHT_FILE):
        jobs = data.get("jobs")
        for run in jobs.values() if isinstance(jobs, dict) else ():
            last[str(run)] = folder.name
    found: dict[str, list[Path]] = {}
    for stamp, folders in series.items():
        for folder in folders:
            night = tonight if folder.name in current_runs else max(stamp, last.get(folder.name, stamp))
            found.setdefault(night, []).append(folder)
    return dict(sorted(found.items()))


def _find_winners(series_folder: Path) -> set[tuple[str, int]]:
    """Run and trial of every best in a night's summary: a later night may find another best in the same run."""
    found = set()
    for _, data in _read_nights(series_folder, SUMMARY_FILE):
        jobs = data.get("jobs")
        for job in jobs if isinstance(jobs, list) else ():
            best = job.get("best") if isinstance(job, dict) else None
            if isinstance(best, dict) and isinstance(best.get("trial"), int):
                found.add((str(job.get("run")), best["trial"]))
    return found


def _read_nights(series_folder: Path, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder of each night and the content of its file `name`, the oldest first; unreadable files are left out."""
    for path in sorted(series_folder.glob(f"*/{name}")):
        try:
            data = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(data, dict):
            yield path.parent, data


def _measure_run(folder: Path) -> int:
    """Bytes of a run, including its traces on scratch."""
    total = measure_folder(folder)
    try:
        run = load_run(folder)
    except UserError:
        return total
    return total + sum(measure_folder(path) for trial in _list_trials(folder) for path in find_scratch(run, trial))


def _list_trials(folder: Path) -> list[Path]:
    """Real trial folders inside the run; links are left out."""
    return [] if (folder / TRIALS_FOLDER).is_symlink() else list(list_trial_folders(folder).values())


def _removable(stamp: str, folder: Path, winners: Collection[tuple[str, int]]) -> list[_Evidence]:
    """Trial folders of a run that belong to no winner; none if the run is in use or unreadable."""
    if is_locked(folder):
        return []
    try:
        run = load_run(folder)
        if run.state.unfinished:
            return []
        kept = _winning_trials(run, winners)
    except UserError:
        return []
    others = [path for path in _list_trials(folder) if int(path.name) not in kept]
    return [_Evidence(stamp, path, find_scratch(run, path)) for path in others]


def _winning_trials(run: Run, winners: Collection[tuple[str, int]]) -> set[int]:
    """All trials of the winning configurations: of the search, of the nightly comparison, or of any night's summary."""
    names = {run.folder.name, run.spec.run_id}  # the folder may have been renamed
    named = {number for name, number in winners if name in names and number in run.state.trials}
    configs = {run.state.trials[number].config for number in named}
    configs |= {best.config for best in [run.state.best] if best is not None}
    configs |= {config for config in [read_night(run).best] if config is not None}
    return named | {trial.number for config in configs for trial in run.state.runs_of(config)}


def _remove(chosen: list[_Evidence], dry_run: bool) -> Pruned:
    """Remove the chosen evidence, scratch first."""
    # If that fails, the trial's folder stays, whose links are needed to find scratch again.
    removed: list[tuple[_Evidence, int]] = []
    notes = []
    for evidence in chosen:
        num_bytes = evidence.num_bytes
        try:
            for folder in () if dry_run else (*evidence.scratch, evidence.folder):
                shutil.rmtree(folder)
            removed.append((evidence, num_bytes))
        except OSError as error:
            notes.append(f"cannot remove {str(evidence.folder)!r}: {error.strerror or error}")
    nights = tuple(dict.fromkeys(evidence.stamp for evidence, _ in removed))
    gib = sum(num_bytes for _, num_bytes in removed) / 2**30
    return Pruned(trials=len(removed), gib=gib, nights=nights, notes=tuple(notes))
