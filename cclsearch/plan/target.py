"""Choose where trials run: a named profile, this machine, a recording or a simulation."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cclsearch.card.load import SUFFIXES
from cclsearch.card.model import Card, Hardware
from cclsearch.core.content import RECORDINGS_FOLDER, content_roots, list_content, list_recordings
from cclsearch.core.errors import UserError
from cclsearch.core.text import guess_name
from cclsearch.launch.command import Command
from cclsearch.launch.profile import Profile, load_profile, profile_from_mapping
from cclsearch.launch.slurm.by_hand import list_doubts
from cclsearch.launch.slurm.settings import SlurmSettings
from cclsearch.plan.hardware import resolve_hardware

IN_PROCESS = "in-process"
"""Name of the launcher that calls a function of the caller."""
SIMULATE = "simulate"
"""Name of the profile of simulated clusters."""


@dataclass(frozen=True)
class Target:
    """Launcher profile of the trials, and notes for the user about it."""

    profile: Profile
    recording: Path | None = None
    """Folder of the recording to replay; None if trials really run."""
    notes: tuple[str, ...] = ()


def choose_target(
    card: Card,
    *,
    launcher: str | None,
    recording: str | None = None,
    in_allocation: bool = False,
    may_simulate: bool = True,
    threads: int | None = None,
    command: Command | None = None,
) -> Target:
    """Return the named profile, else this machine if it has the accelerators, else the card's recording, else a
    simulated cluster.

    Raises UserError for a recording together with a launcher, and in place of a simulation that was not asked for,
    unless `may_simulate`. With `threads`, a function of the caller or a command measures trials, in so many threads.
    """
    if threads is not None:
        return _measure_here(threads, command)
    if recording is not None and (in_allocation or launcher not in (None, "replay")):
        option = f"--launcher {launcher}" if launcher not in (None, "replay") else "--in-allocation"
        raise UserError(f"{option} and --recording {recording} exclude each other: a recording runs no trial")
    if in_allocation:
        return Target(_use_allocation(load_profile(launcher or "slurm-generic")))
    if recording is not None or launcher == "replay":
        name = card.recording if recording is None else recording
        if name is None:
            raise UserError(f"{card.name} names no recording: choose one with `--recording FOLDER`")
        return _replay(find_recording(name))
    if launcher is not None:
        profile = load_profile(launcher)
        if profile.launcher == IN_PROCESS:
            raise UserError(f"--launcher {launcher}: only `cclsearch.search(card, measure)` in Python has the function")
        return Target(profile, notes=(*_warn_too_few(card, profile), *_warn_unfilled(card, profile)))
    return _choose_default(card, may_simulate=may_simulate)


def find_recording(name: str) -> Path:
    """Return the recording's folder: a path, or a bare name under `workloads/recordings/`."""
    as_path = Path(name).expanduser()
    if os.path.isdir(as_path):
        return as_path.resolve()
    for root in content_roots():
        folder = root / RECORDINGS_FOLDER / name
        if "/" not in name and os.path.isdir(folder):
            return folder
    names = list_recordings()
    known = ", ".join(names) or "none"
    raise UserError(
        f"there is no recording {name!r}{guess_name(name, names)}; known recordings: {known}; or give a folder"
    )


def read_names(workload: str | None, recording: str | None, launcher: str | None) -> tuple[str | None, str | None]:
    """The workload and the recording that were named: a workload may be the name of a recording, which has a card."""
    is_bare = workload is not None and recording is None and launcher in (None, "replay") and os.sep not in workload
    if is_bare and workload not in list_content("workloads", *SUFFIXES) and workload in list_recordings():
        return None, workload
    return workload, recording


def count_local_gpus() -> int:
    """Return how many accelerators `nvidia-smi` or `rocm-smi` lists on this machine; 0 without either."""
    for command, mark in ((["nvidia-smi", "-L"], "GPU "), (["rocm-smi", "-i"], "Device Name")):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, errors="replace", timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return sum(mark in line for line in done.stdout.splitlines())
    return 0


def _choose_default(card: Card, *, may_simulate: bool) -> Target:
    """Choose the target if the user named neither a launcher nor a recording."""
    if card.hardware.accelerator == "cpu":
        return Target(load_profile("local"))
    found = count_local_gpus()
    if found >= card.hardware.num_accelerators:
        return Target(load_profile("local"), notes=(f"trials run on this machine's {found} accelerators",))
    lack = _describe_lack(card, card.hardware, found)
    if card.recording is not None:
        return _replay(find_recording(card.recording), f"{lack}; {_name_cluster()}")
    if not may_simulate:
        raise UserError(
            f"{lack}: name where its trials run, a cluster profile (`ccl-search launcher list`) or"
            f" `launcher: {SIMULATE}`, which computes figures instead of measuring them"
        )
    what = "so trials are simulated: figures are computed, with drawn surprises, noise and failures, and not measured"
    return Target(load_profile(SIMULATE), notes=(f"{lack}, {what}; {_name_cluster()}",))


def _name_cluster() -> str:
    """Say how to run trials on a cluster instead."""
    if shutil.which("sbatch"):
        return "to run on Slurm, add `--launcher slurm-generic`; without it nothing is submitted"
    return "to run on a cluster, add `--launcher NAME` (see `ccl-search launcher list`)"


def _use_allocation(profile: Profile) -> Profile:
    """The profile with trials as steps of the Slurm allocation that this process is in."""
    if profile.launcher != "slurm":
        raise UserError(f"--in-allocation needs a Slurm profile, but {profile.name!r} uses {profile.launcher!r}")
    if "in_allocation" not in profile.settings and not os.environ.get("SLURM_JOB_ID"):
        raise UserError("--in-allocation needs an allocation, but SLURM_JOB_ID is not set: run inside `salloc`")
    return profile.model_copy(update={"settings": {"in_allocation": True, **profile.settings}})


def _warn_too_few(card: Card, profile: Profile) -> tuple[str, ...]:
    """A warning if the trials run on this machine and it has fewer accelerators than the card needs."""
    hardware, _ = resolve_hardware(card, profile)
    if profile.launcher != "local" or hardware.accelerator == "cpu":
        return ()
    found = count_local_gpus()
    if found >= hardware.num_accelerators:
        return ()
    return (f"{_describe_lack(card, hardware, found)}: trials that need them will fail",)


def _warn_unfilled(card: Card, profile: Profile) -> tuple[str, ...]:
    """Warnings about what a Slurm profile leaves to the cluster's defaults."""
    if profile.launcher != "slurm":
        return ()
    hardware, _ = resolve_hardware(card, profile)
    return tuple(list_doubts(profile.read_settings(SlurmSettings), hardware.accelerators_per_node))


def _describe_lack(card: Card, hardware: Hardware, found: int) -> str:
    needed = f"{hardware.num_accelerators} x {hardware.accelerator}"
    return f"{card.name} needs {needed}, but this machine has {found or 'none'}"


def _measure_here(threads: int, command: Command | None) -> Target:
    who = "your command measures" if command else "your function, or `ccl-search tell`, measures"
    note = (
        f"{who} the trials: no run script declares their work and no trace shows it, so the work was not checked;"
        " figures are marked caller-measured"
    )
    settings = {"command": command.model_dump(mode="json")} if command else {}
    profile = profile_from_mapping({"launcher": IN_PROCESS, "threads": threads, **settings}, name=IN_PROCESS)
    return Target(profile, notes=(note,))


def _replay(folder: Path, *notes: str) -> Target:
    profile = profile_from_mapping({"launcher": "replay", "recording": str(folder)}, name="replay")
    return Target(profile, recording=folder, notes=notes)
