"""Where a search runs: the profile that was named, this machine, or a recording; never a cluster that nobody named."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cclsearch.card.model import Card
from cclsearch.core.content import content_roots
from cclsearch.core.errors import UserError
from cclsearch.launch.profile import Profile, load_profile, profile_from_mapping

RECORDINGS_FOLDER = Path("workloads") / "recordings"


@dataclass(frozen=True)
class Target:
    """Where, and what the user must know about it."""

    profile: Profile
    recording: Path | None = None
    """Folder of the recorded landscape, where nothing will run."""
    banner: tuple[str, ...] = ()


def choose_target(
    card: Card, *, launcher: str | None, recording: str | None = None, in_allocation: bool = False
) -> Target:
    """The profile named, else this machine where it is enough, else the card's recording.

    Raises UserError that names the ways out where none applies; a recording and a place to run exclude each other.
    """
    if recording is not None and (in_allocation or launcher not in (None, "replay")):
        place = f"--launcher {launcher}" if launcher not in (None, "replay") else "--in-allocation"
        raise UserError(
            f"{place} and --recording {recording}: a recording is read and nothing runs, so name one of the two"
        )
    if in_allocation:
        return Target(_hold(load_profile(launcher or "slurm-generic")))
    if recording is not None:
        return _replay(find_recording(recording), ())
    if launcher is not None:
        if launcher == "replay":
            return _replay(find_recording(card.recording or _no_recording(card)), ())
        profile = load_profile(launcher)
        return Target(profile, banner=_too_few_here(card, profile))
    if card.hardware.accelerator == "cpu":
        return Target(load_profile("local"))
    found = count_local_gpus()
    if found >= card.hardware.num_accelerators:
        return Target(load_profile("local"), banner=(f"runs on this machine's {found} accelerators",))
    if card.recording is not None:
        return _replay(find_recording(card.recording), _cluster_hint())
    raise UserError(
        f"{card.name} needs {card.hardware.num_accelerators} x {card.hardware.accelerator}, this machine has"
        f" {found or 'none'}, no launcher is named and no recording stands in: name a cluster profile"
        " (`--launcher slurm-generic`, see `ccl-search launcher list`), a recording (`--recording FOLDER`), or try"
        " `--workload wl2` or `--workload tiny`"
    )


def _hold(profile: Profile) -> Profile:
    """The profile with its trials as steps of a held allocation."""
    if profile.launcher != "slurm":
        raise UserError(f"--in-allocation needs a Slurm profile, but {profile.name!r} runs on {profile.launcher!r}")
    if "in_allocation" not in profile.settings and not os.environ.get("SLURM_JOB_ID"):
        raise UserError(
            "--in-allocation needs a held allocation, but SLURM_JOB_ID is not set here: run inside `salloc`"
        )
    return profile.model_copy(update={"settings": {"in_allocation": True, **profile.settings}})


def _too_few_here(card: Card, profile: Profile) -> tuple[str, ...]:
    """A warning where this machine was named and shows fewer accelerators than the card asks for."""
    asked = type(card.hardware).model_validate({**card.hardware.model_dump(), **profile.hardware.overrides()})
    if profile.launcher != "local" or asked.accelerator == "cpu":
        return ()
    found = count_local_gpus()
    if found >= asked.num_accelerators:
        return ()
    return (
        f"{card.name} asks for {asked.num_accelerators} x {asked.accelerator}, and this machine shows"
        f" {found or 'none'}: trials that need them will fail",
    )


def find_recording(name: str) -> Path:
    """The recording's folder: a path, or a bare name under `workloads/recordings/`."""
    as_path = Path(name).expanduser()
    if os.path.isdir(as_path):
        return as_path.resolve()
    for root in content_roots():
        folder = root / RECORDINGS_FOLDER / name
        if "/" not in name and os.path.isdir(folder):
            return folder
    known = ", ".join(list_recordings()) or "none"
    raise UserError(f"there is no recording {name!r}; there are: {known}, or give a folder")


def list_recordings() -> list[str]:
    """Bare names of the recordings there are, sorted."""
    return sorted({p.name for root in content_roots() for p in (root / RECORDINGS_FOLDER).glob("*") if p.is_dir()})


def count_local_gpus() -> int:
    """Accelerators that this machine's `nvidia-smi` or `rocm-smi` lists; 0 where there is neither."""
    for command, mark in ((["nvidia-smi", "-L"], "GPU "), (["rocm-smi", "-i"], "Device Name")):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return sum(line.lstrip().startswith(mark) or mark in line for line in done.stdout.splitlines())
    return 0


def _replay(folder: Path, banner: tuple[str, ...]) -> Target:
    profile = profile_from_mapping({"launcher": "replay", "recording": str(folder)}, name="replay")
    return Target(profile, recording=folder, banner=banner)


def _no_recording(card: Card) -> str:
    raise UserError(f"{card.name} names no recording: give one with `--recording FOLDER`")


def _cluster_hint() -> tuple[str, ...]:
    if shutil.which("sbatch"):
        return (
            "Slurm is here, but no profile was named, so nothing was submitted: `--launcher slurm-generic` runs there",
        )
    return ("to run it on a cluster: `--launcher NAME` (see `ccl-search launcher list`)",)
