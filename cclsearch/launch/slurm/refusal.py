"""Interpret Slurm's messages; a refusal of sbatch means wait, use a smaller array, or never."""

from __future__ import annotations

import functools
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

from cclsearch.core.yaml_file import read_yaml

_POLICY = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")
_GENERIC_POLICY = "job violates accounting/qos policy"
_PER_JOB = re.compile(
    r"^(?:QOS|Assoc)(?:Max(?:\w*Per(?:Job|Node)(?:Limit)?|WallDuration\w*)|Min\w*)$|launch failed|held", re.IGNORECASE
)


@functools.cache
def read_messages() -> dict[str, Any]:
    """Return the parts of Slurm's messages by meaning (`messages.yaml`)."""
    return read_yaml(Path(__file__).with_name("messages.yaml"))


class Refusal(StrEnum):
    """Reaction to a refused submission."""

    WAIT = "wait"
    """A limit on jobs in the queue was reached; retry when jobs have ended."""
    SMALLER_ARRAY = "smaller_array"
    NEVER = "never"


def classify_refusal(message: str, *, others_queued: bool) -> Refusal:
    """Return the meaning of sbatch's message; `others_queued`: whether jobs that count against a limit will end."""
    # Slurm's generic message names the submit limit along with size and time limits; only the name of the policy, if it
    # is given, distinguishes them.
    text = message.lower()
    if "invalid job array" in text:
        return Refusal.SMALLER_ARRAY
    policies = [name.lower() for name in _POLICY.findall(message)]
    if any(sign in text for sign in read_messages()["wait"]) or (is_submit_limit(message) and others_queued):
        return Refusal.WAIT
    if _GENERIC_POLICY in text and not policies and others_queued:
        return Refusal.WAIT
    return Refusal.NEVER


def is_submit_limit(message: str) -> bool:
    """Whether the message names a limit on the number of jobs in the queue."""
    return any(sign in message.lower() for sign in read_messages()["submit_limits"])


def find_squeue_filter(message: str, *, account: str | None, qos: str | None) -> str | None:
    """Return squeue's option for all jobs that count against a submit limit; None if only this user's jobs do."""
    text = message.lower()
    if "grpsubmit" not in text:
        return None
    if "qosgrpsubmit" in text:
        return f"--qos={qos}" if qos else None
    return f"--account={account}" if account else None


def suggest_remedy(message: str) -> str:
    """Return the remedy for a job that can never run."""
    if is_submit_limit(message):
        return (
            "the account or QOS accepts no job although none in the queue uses its limit: is it frozen? ask its owner"
        )
    text = message.lower()
    return next(
        (remedy for sign, remedy in read_messages()["remedies"].items() if sign in text),
        "correct the profile: the cluster does not offer what it requests (`scontrol show partition`)",
    )


def never_starts(reason: str) -> bool:
    """Whether a pending job with that reason will never start."""
    return reason in read_messages()["never_starts"] or bool(_PER_JOB.search(reason))
