"""Slurm's commands, called with argument lists, a clean environment and a time limit; answers as plain rows.

A refusal of sbatch means wait, use a smaller array, or never.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import public_environment
from cclsearch.core.text import one_line
from cclsearch.core.yaml_file import read_yaml
from cclsearch.launch.fault_rules import REFUSALS_FILE, read_refusals

SLURM_WORDS = read_yaml(REFUSALS_FILE)
"""Lists of the states and reasons that Slurm's listings name, by list."""
_POLICY = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")
_GENERIC_POLICY = "job violates accounting/qos policy"
_PER_JOB = re.compile(
    r"^(?:QOS|Assoc)(?:Max(?:\w*Per(?:Job|Node)(?:Limit)?|WallDuration\w*)|Min\w*)$|launch failed|held", re.IGNORECASE
)


class Reaction(StrEnum):
    """Reaction to a refused submission."""

    WAIT = "wait"
    """A limit on jobs in the queue was reached; retry when jobs have ended."""
    SMALLER_ARRAY = "smaller_array"
    NEVER = "never"


def classify_refusal(message: str, *, others_queued: bool) -> Reaction:
    """Return the meaning of sbatch's message; `others_queued`: whether jobs that count against a limit will end."""
    # Slurm's generic message names the submit limit along with size and time limits; only the name of the policy, if it
    # is given, distinguishes them.
    found = [refusal.means for refusal in read_refusals("slurm", message)]
    if "array" in found:
        return Reaction.SMALLER_ARRAY
    is_generic = _GENERIC_POLICY in message.lower() and not _POLICY.search(message)
    if "temporary" in found or "unavailable" in found or ((is_generic or "limit" in found) and others_queued):
        return Reaction.WAIT
    return Reaction.NEVER


def is_submit_limit(message: str) -> bool:
    """Whether the message names a limit on the number of jobs in the queue."""
    return any(refusal.means == "limit" for refusal in read_refusals("slurm", message))


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
    return next(
        (refusal.remedy for refusal in read_refusals("slurm", message) if refusal.remedy),
        "correct the profile: the cluster does not offer what it requests (`scontrol show partition`)",
    )


def never_starts(reason: str) -> bool:
    """Whether a pending job with that reason will never start."""
    return reason in SLURM_WORDS["slurm_reasons"] or bool(_PER_JOB.search(reason))


SEPARATOR = "\x1f"
QUEUE_FIELDS = ("%i", "%T", "%r", "%L", "%N", "%V", "%Z", "%k", "%j")
ACCOUNT_FIELDS = ("JobID", "State", "NodeList", "JobName", "Submit", "WorkDir")
IDS_PER_CALL = 200
MAX_TASKS = 10_000
"""Tasks of one line that are listed one by one; a line with more counts as one job."""

_STEERING = re.compile(r"(SBATCH|SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO|SALLOC|SRUN|SLURM)_")
SITE_DEFAULTS = {
    name: f"SBATCH_{name.upper()}" for name in ("account", "partition", "qos", "constraint", "reservation")
}
"""Field of a profile -> the variable with a site's default for it."""
OWN_SECRET = "SLURM_JWT"
"""Authenticates Slurm's commands at sites that use tokens; no rank of a trial ever gets it."""
_KEPT = frozenset(
    [*("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SBATCH_CLUSTERS", OWN_SECRET), *SITE_DEFAULTS.values()]
)
JOB_VARIABLES = frozenset(SLURM_WORDS["slurm_job_variables"])
"""The variables of the search that a job inherits; it gets no others."""


class SlurmError(Exception):
    """A command of Slurm failed; the message is Slurm's own, on one line."""


class SlurmUnavailable(SlurmError):
    """Slurm does not answer now but may later."""


class SlurmRefusal(SlurmError):
    """Slurm answered with an error."""


@dataclass(frozen=True)
class ListedJob:
    """A job in the output of squeue, sacct or scontrol; what a command does not say is empty."""

    job_id: str
    state: str
    nodes: str = ""
    name: str = ""
    submitted: str = ""
    folder: str = ""
    cluster: str = ""
    """Only if squeue was asked for several clusters (`SLURM_CLUSTERS`)."""
    reason: str = ""
    comment: str = ""
    left_s: float | None = None
    """Seconds until its time limit; None if it has none, or is not running."""
    step_states: tuple[str, ...] = ()
    # If the signal kills the trial, the state is FAILED, not PREEMPTED.
    preempted: bool = False
    """Whether Slurm has started to preempt it."""


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without variables that would change what Slurm's commands do or print.

    `SBATCH_REQUEUE`, `SBATCH_WCKEY`, `SQUEUE_FORMAT` and the like override a script and a caller. A site's own
    defaults for account, partition, QOS, constraint and reservation stay, for profiles that set none.
    """
    source = os.environ if environment is None else environment
    return {name: value for name, value in source.items() if name in _KEPT or not _STEERING.match(name)}


def job_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of sbatch, and so of the job: only known variables, and no secret."""
    clean = public_environment(clean_environment(environment))
    return {name: value for name, value in clean.items() if name in JOB_VARIABLES or name in _KEPT}


def require_command(name: str) -> str:
    """Return the path of a Slurm command; UserError if it is not installed here."""
    path = shutil.which(name)
    if path is None:
        raise UserError(
            f"the Slurm launcher needs {name!r} on the PATH, but it was not found; run this on a login node"
        )
    return path


def run_slurm(
    command: Sequence[str],
    *,
    timeout_s: float = 60.0,
    pass_fds: tuple[int, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return the output of a Slurm command; raise `SlurmUnavailable` or `SlurmRefusal` if it failed."""
    # Queries print times in UTC, so that submit times can be compared in any time zone.
    try:
        done = subprocess.run(
            [require_command(command[0]), *command[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env={**clean_environment(), "TZ": "UTC"} if environment is None else environment,
            pass_fds=pass_fds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"{command[0]} gave no answer in {timeout_s:.0f} s") from None
    except OSError as error:
        raise SlurmUnavailable(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode == 0:
        return done.stdout
    message = one_line(done.stderr or done.stdout or f"{command[0]} ended with {done.returncode}", 600)
    is_killed = done.returncode < 0 or done.returncode > 128  # by Ctrl-C: sbatch may have submitted the job before
    if is_killed or any(refusal.means == "unavailable" for refusal in read_refusals("slurm", message)):
        raise SlurmUnavailable(message)
    raise SlurmRefusal(message)


def ask_slurm(command: Sequence[str], *, timeout_s: float = 30.0) -> str | None:
    """Return the output of a query; None if its command is not installed, or Slurm does not answer."""
    if shutil.which(command[0]) is None:
        return None
    try:
        return run_slurm(command, timeout_s=timeout_s)
    except SlurmError:
        return None


def read_queue(*, timeout_s: float = 60.0) -> list[ListedJob]:
    """Return all jobs of this user that the controller lists, including those that ended minutes ago: one query."""
    text = run_slurm(
        [
            *("squeue", f"--user={os.getuid()}", "--states=all", "--array", "--noheader"),
            f"--format={SEPARATOR.join(QUEUE_FIELDS)}",
        ],
        timeout_s=timeout_s,
    )
    rows, cluster = [], ""
    for line in text.splitlines():
        parts = line.split(SEPARATOR, len(QUEUE_FIELDS) - 1)
        if len(parts) == len(QUEUE_FIELDS):
            ids, state, reason, left, nodes, submitted, folder, comment, name = parts
            own = (state, nodes, name, submitted, folder, cluster, reason, comment, parse_duration(left))
            rows += [ListedJob(job_id, *own) for job_id in expand_ids(ids)]
        elif line.startswith("CLUSTER: "):
            cluster = line.removeprefix("CLUSTER: ").strip()
    return rows


def has_live_jobs(whose: str | None = None) -> bool:
    """Whether this user, or the users that an option of squeue selects, have a job that has not ended."""
    whose = whose or f"--user={os.getuid()}"
    alive = "--states=pending,running,suspended,configuring,completing"
    return bool(run_slurm(["squeue", whose, alive, "--noheader", "--format=%i"]).strip())


def expand_ids(job_id: str) -> list[str]:
    """Return the job ids that one line of squeue lists: four for `12_[0-2,5%4]`, one for `12_3` and `12`.

    A list of tasks that has too many, or cannot be read (squeue cuts long ones), counts as the whole array: `12`.
    """
    array, bracket, tasks = job_id.partition("_[")
    if not bracket:
        return [job_id]
    numbers: list[int] = []
    for part in tasks.rstrip("]").partition("%")[0].split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", part)
        if match is None:
            return [array]
        first, last, step = int(match[1]), int(match[2] or match[1]), max(1, int(match[3] or 1))
        if len(numbers) + (last - first) // step >= MAX_TASKS:
            return [array]
        numbers += range(first, last + 1, step)
    return [f"{array}_{task}" for task in numbers]


def array_of(job_id: str) -> str:
    """Return the number of the array that a job is a task of: `12` for `12_3`, and for `12` itself."""
    return job_id.partition("_")[0]


def parse_duration(text: str) -> float | None:
    """Return the seconds of `D-HH:MM:SS`, `HH:MM:SS`, `MM:SS`; None for `UNLIMITED`, `INVALID`, `NOT_SET`."""
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?(?:([0-9]{1,9}):)?([0-9]{1,9}):([0-9]{1,9})", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_accounts(job_ids: Sequence[str]) -> list[ListedJob]:
    """Return the accounting's rows of these numbers, also of other jobs that had them, oldest first.

    Empty if the cluster has no accounting, or if accounting does not answer.
    """
    rows: list[ListedJob] = []
    for chunk in _chunks(sorted({array_of(job) for job in job_ids})):
        fields = ("--parsable2", f"--delimiter={SEPARATOR}", "--noheader", "--duplicates")
        text = ask_slurm(["sacct", *fields, f"--format={','.join(ACCOUNT_FIELDS)}", f"--jobs={','.join(chunk)}"])
        if text is None:
            return []
        for line in text.splitlines():
            job, state, nodes, name, submitted, folder = [*line.split(SEPARATOR), *[""] * 6][:6]
            if "." not in job:
                rows.append(ListedJob(job, state, nodes, name, submitted, folder))
            elif rows and rows[-1].job_id == job.split(".")[0]:  # a job's steps follow its own line
                rows[-1] = replace(rows[-1], step_states=(*rows[-1].step_states, state))
    return rows


def query_job(job_id: str) -> ListedJob | None:
    """Return one job by `scontrol show job`; None if the controller no longer lists it or does not answer."""
    shown = ask_slurm(["scontrol", "show", "job", "--oneliner", job_id]) or ""
    fields = dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", shown.partition("\n")[0]))
    if "JobState" not in fields:
        return None
    preempted = re.match(r"\d", fields.get("PreemptTime", "")) is not None
    name, submitted, folder = (fields.get(known, "") for known in ("JobName", "SubmitTime", "WorkDir"))
    return ListedJob(job_id, fields["JobState"], "", name, submitted, folder, preempted=preempted)


def find_bad_nodes(nodes: str) -> list[str]:
    """Return the nodes that are down, failing or silent; empty if Slurm does not answer."""
    if not nodes.strip():
        return []
    text = ask_slurm(["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T"]) or ""
    bad = {
        node
        for node, _, state in (line.partition("|") for line in text.splitlines())
        if state.endswith("*") or state.startswith(("down", "fail", "error", "unknown", "power"))
    }
    return sorted(bad)


def cancel_jobs(job_ids: Sequence[str], *, signal: str | None = None, cluster: str = "") -> None:
    """Run scancel; jobs that have ended already are not an error. `SlurmUnavailable` if Slurm does not answer."""
    options = [f"--clusters={cluster}"] if cluster else []
    options += [f"--signal={signal}", "--full"] if signal else []
    for chunk in _chunks(list(job_ids)):
        try:
            run_slurm(["scancel", *options, *chunk])
        except SlurmRefusal as refusal:
            if "invalid job" not in str(refusal).lower() and "already complet" not in str(refusal).lower():
                raise


def submit_script(script: Path, *, pass_fds: tuple[int, ...] = (), without: Iterable[str] = ()) -> str:
    """Submit a script and return its job id, parsed as submitit parses it.

    sbatch itself keeps `pass_fds` open; `without` names the site's defaults that the profile overrides. An answer
    without a job id leaves open whether there is a job: `SlurmUnavailable`.
    """
    from submitit.core.utils import FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    environment = step_environment(without)
    answer = run_slurm(["sbatch", str(script)], timeout_s=120.0, pass_fds=pass_fds, environment=environment)
    try:
        return str(SlurmExecutor._get_job_id_from_submission_command(answer))
    except FailedSubmissionError:
        raise SlurmUnavailable(f"sbatch printed no job id: {one_line(answer, 200)!r}") from None


def try_script(script: Path, *, without: Iterable[str] = ()) -> None:
    """Run `sbatch --test-only`, which submits nothing; `SlurmRefusal` if Slurm would refuse the script."""
    run_slurm(["sbatch", "--test-only", str(script)], timeout_s=120.0, environment=step_environment(without))


def step_environment(without: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of sbatch, or of a process that calls srun: a job's, and Slurm's own token."""
    # The node program removes the token before it starts the trial.
    own = {OWN_SECRET: os.environ[OWN_SECRET]} if OWN_SECRET in os.environ else {}
    return {name: value for name, value in {**job_environment(), **own}.items() if name not in set(without)}


def _chunks(ids: list[str]) -> Iterable[list[str]]:
    return (ids[start : start + IDS_PER_CALL] for start in range(0, len(ids), IDS_PER_CALL))
