"""What a refusal of sbatch means: wait, use a smaller array, or this job can never run here."""

from __future__ import annotations

import re
from enum import StrEnum

_POLICY = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")
_SUBMIT_LIMITS = ("maxsubmit", "grpsubmit")
"""Limits on jobs in the queue of one user, or of all users of an account or QOS: 0 freezes them."""
_WAIT = (
    "maximum number of jobs",
    "maxjobcount",
    "resource temporarily unavailable",
    "slurm temporarily unable",
    "too many jobs",
    "queue is full",
    "submission rate",
)
_GENERIC_POLICY = "job violates accounting/qos policy"
_REMEDIES = (
    ("account", "set `account` in the profile (`sacctmgr show assoc user=$USER format=account` lists yours)"),
    ("qos", "set `qos` in the profile to one that your account may use (`sacctmgr show assoc user=$USER format=qos`)"),
    ("partition", "set `partition` in the profile (`sinfo -s` lists them)"),
    ("time limit", "lower `time_limit` in the profile (`sinfo -o '%P %l'` shows each partition's)"),
    ("walldurationperjob", "lower `time_limit` in the profile: the QOS or account allows less"),
    ("feature", "correct `constraint` in the profile (`sinfo -o '%n %f'` lists features)"),
    ("node count", "the trial needs more nodes than the partition has: correct the profile's hardware"),
    (
        "node configuration",
        "no node has what the profile requests: correct `gpus_per_node`, `gpu_type`, `mem` or `cpus_per_task`",
    ),
    ("processors", "lower `cpus_per_task` in the profile (`sinfo -o '%n %c'` shows what nodes have)"),
    ("memory", "lower `mem` in the profile (`sinfo -o '%n %m'` shows what nodes have, in MB)"),
    ("gres", "correct `gpu_request` or `gpu_type` in the profile (`sinfo -o '%n %G'` shows what nodes have)"),
    ("reservation", "correct `reservation` in the profile (`scontrol show reservation`)"),
    ("unrecognized option", "remove the option from the profile's `options`"),
)


class Refusal(StrEnum):
    """What to do about a refused submission."""

    WAIT = "wait"
    """A limit on jobs in the queue was reached; retry when jobs have ended."""
    SMALLER_ARRAY = "smaller_array"
    NEVER = "never"


def classify_refusal(message: str, *, others_queued: bool) -> Refusal:
    """Return what sbatch's message means; `others_queued`: whether jobs that count against a limit will end.

    Slurm's generic message names the submit limit along with size and time limits; only the name of the policy, if it
    is given, distinguishes them.
    """
    text = message.lower()
    if "invalid job array" in text:
        return Refusal.SMALLER_ARRAY
    policies = [name.lower() for name in _POLICY.findall(message)]
    if any(sign in text for sign in _WAIT) or (is_submit_limit(message) and others_queued):
        return Refusal.WAIT
    if _GENERIC_POLICY in text and not policies and others_queued:
        return Refusal.WAIT
    return Refusal.NEVER


def is_submit_limit(message: str) -> bool:
    """Whether the message names a limit on the number of jobs in the queue."""
    return any(sign in message.lower() for sign in _SUBMIT_LIMITS)


def find_squeue_filter(message: str, *, account: str | None, qos: str | None) -> str | None:
    """Return squeue's option for all jobs that count against a submit limit; None if only this user's jobs do."""
    text = message.lower()
    if "grpsubmit" not in text:
        return None
    if "qosgrpsubmit" in text:
        return f"--qos={qos}" if qos else None
    return f"--account={account}" if account else None


def suggest_remedy(message: str) -> str:
    """Return what to do about a job that can never run."""
    if is_submit_limit(message):
        return (
            "the account or QOS accepts no job although none in the queue uses its limit: is it frozen? ask its owner"
        )
    text = message.lower()
    return next(
        (remedy for sign, remedy in _REMEDIES if sign in text),
        "correct the profile: the cluster does not offer what it requests (`scontrol show partition`)",
    )


NEVER_STARTS = (
    *("BadConstraints", "PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "AccountNotAllowed"),
    *("QOSNotAllowed", "InvalidAccount", "InvalidQOS", "DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin"),
    *("AssociationJobLimitInvalid", "InactiveLimit", "FrontEndDown", "JobArrayTaskLimitInvalid"),
    *("ReservationDeleted", "MaxMemPerLimit"),
)
_PER_JOB = re.compile(
    r"^(?:QOS|Assoc)(?:Max(?:\w*Per(?:Job|Node)(?:Limit)?|WallDuration\w*)|Min\w*)$|launch failed|held", re.IGNORECASE
)


def never_starts(reason: str) -> bool:
    """Whether a pending job with that reason can never start by waiting."""
    return reason in NEVER_STARTS or bool(_PER_JOB.search(reason))
