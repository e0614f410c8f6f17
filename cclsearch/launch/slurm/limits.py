"""How many jobs a search may have in the queue: the profile's `max_jobs`, then Slurm's own limits."""

from __future__ import annotations

import getpass
import re
import shutil

from cclsearch.core.errors import UserError
from cclsearch.launch.slurm.commands import SlurmRefusal, SlurmUnavailable, run_slurm
from cclsearch.launch.slurm.settings import SlurmSettings

DEFAULT_MAX_JOBS = 64
"""At a time, if the profile sets no limit: no proposer could use more."""
DEFAULT_MAX_ARRAY = 1000


def find_max_array() -> int:
    """Return the maximum number of tasks in an array: MaxArraySize minus one, or Slurm's default of 1000."""
    text = _query(["scontrol", "show", "config"])
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return max(1, int(match.group(1)) - 1) if match else DEFAULT_MAX_ARRAY


def find_max_jobs(settings: SlurmSettings) -> int:
    """Return the maximum number of jobs at a time: `max_jobs`, within the limits of the account and the QOS."""
    most = settings.max_jobs or DEFAULT_MAX_JOBS
    for limit in (_association_limit(settings), _qos_limit(settings)):
        if limit is not None:
            most = min(most, max(1, limit))
    return most


def _association_limit(settings: SlurmSettings) -> int | None:
    """Return MaxSubmitJobs of the user's association with the profile's account; None if unset or no answer."""
    selection = ["user=" + getpass.getuser()] + (["account=" + settings.account] if settings.account else [])
    text = _query(
        ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", *selection, "format=partition,maxsubmit,grpsubmit"]
    )
    limits = []
    for line in text.splitlines():
        partition, *numbers = line.split("|")
        if partition in {"", settings.partition or ""}:
            limits += [int(number) for number in numbers if number.isdigit()]
    return min(limits) if limits else None


def _qos_limit(settings: SlurmSettings) -> int | None:
    if settings.qos is None:
        return None
    text = _query(
        [
            *("sacctmgr", "--noheader", "--parsable2", "show", "qos", settings.qos),
            "format=MaxSubmitJobsPerUser,MaxSubmitJobsPerAccount,GrpSubmitJobs",
        ]
    )
    limits = [int(number) for line in text.splitlines() for number in line.split("|") if number.isdigit()]
    return min(limits) if limits else None


def _query(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        return run_slurm(command, timeout_s=20.0)
    except (SlurmUnavailable, SlurmRefusal, UserError):
        return ""
