"""Limit the jobs of a search in the queue: by the profile's `max_jobs`, then by Slurm's own limits."""

from __future__ import annotations

import getpass
import re

from cclsearch.launch.slurm.commands import ask_slurm
from cclsearch.launch.slurm.settings import SlurmSettings

# No proposer could use more.
DEFAULT_MAX_JOBS = 64
"""Jobs at a time, if the profile sets no limit."""
DEFAULT_MAX_ARRAY = 1000
TIMEOUT_S = 20.0


def find_max_array() -> int:
    """Return the maximum number of tasks in an array: MaxArraySize minus one, or Slurm's default of 1000."""
    text = ask_slurm(["scontrol", "show", "config"], timeout_s=TIMEOUT_S) or ""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return max(1, int(match.group(1)) - 1) if match else DEFAULT_MAX_ARRAY


def find_max_jobs(settings: SlurmSettings) -> int:
    """Return the maximum number of jobs at a time: `max_jobs`, within the limits of the account and the QOS."""
    account = [f"account={settings.account}"] if settings.account else []
    associations = _show("assoc", f"user={getpass.getuser()}", *account, "format=partition,maxsubmit,grpsubmit")
    limits = [row[1:] for row in associations if row[0] in {"", settings.partition or ""}]
    if settings.qos is not None:
        limits += _show("qos", settings.qos, "format=MaxSubmitJobsPerUser,MaxSubmitJobsPerAccount,GrpSubmitJobs")
    numbers = [max(1, int(limit)) for row in limits for limit in row if limit.isdigit()]
    return min([settings.max_jobs or DEFAULT_MAX_JOBS, *numbers])


def _show(*words: str) -> list[list[str]]:
    """Return the rows that sacctmgr shows; none if it does not answer."""
    text = ask_slurm(["sacctmgr", "--noheader", "--parsable2", "show", *words], timeout_s=TIMEOUT_S) or ""
    return [line.split("|") for line in text.splitlines()]
