"""Slurm's commands, called with argument lists, a clean environment and a time limit; answers as plain rows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.redact import public_environment
from cclsearch.core.text import one_line
from cclsearch.launch.slurm.refusal import read_messages

SEPARATOR = "\x1f"
QUEUE_FIELDS = ("%i", "%T", "%r", "%L", "%N", "%Z", "%k", "%j")
IDS_PER_CALL = 200

_STEERING = re.compile(r"(SBATCH|SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO|SALLOC|SRUN|SLURM)_")
SITE_DEFAULTS = {
    name: f"SBATCH_{name.upper()}" for name in ("account", "partition", "qos", "constraint", "reservation")
}
"""Field of a profile -> the variable with a site's default for it."""
OWN_SECRET = "SLURM_JWT"
"""Authenticates Slurm's commands at sites that use tokens; no rank of a trial ever gets it."""
_KEPT = frozenset(
    [
        *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SBATCH_CLUSTERS", OWN_SECRET),
        *SITE_DEFAULTS.values(),
    ]
)
JOB_VARIABLES = frozenset(
    [
        *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "KRB5CCNAME"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "MODULEPATH", "MODULESHOME", "LMOD_CMD", "LMOD_PKG", "LMOD_DIR"),
    ]
)
"""The variables of the search that a job inherits; it gets no others."""


class SlurmError(Exception):
    """A command of Slurm failed; the message is Slurm's own, on one line."""


class SlurmUnavailable(SlurmError):
    """Slurm does not answer now but may later."""


class SlurmRefusal(SlurmError):
    """Slurm answered with an error."""


@dataclass(frozen=True)
class QueueRow:
    """One line of squeue. `left_s` is None if the job has no time limit or is not running."""

    job_id: str
    state: str
    reason: str
    left_s: float | None
    nodes: str
    folder: str
    comment: str
    name: str


@dataclass(frozen=True)
class AccountRow:
    """A job in sacct: its own line and the states of its steps."""

    job_id: str
    state: str
    nodes: str = ""
    step_states: tuple[str, ...] = ()


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
    """Return what a Slurm command printed; raise `SlurmUnavailable` or `SlurmRefusal` if it failed."""
    try:
        done = subprocess.run(
            [require_command(command[0]), *command[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=clean_environment() if environment is None else environment,
            pass_fds=pass_fds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"{command[0]} gave no answer in {timeout_s:.0f} s") from None
    if done.returncode == 0:
        return done.stdout
    message = one_line(done.stderr or done.stdout or f"{command[0]} ended with {done.returncode}", 600)
    if any(sign in message.lower() for sign in read_messages()["unavailable"]):
        raise SlurmUnavailable(message)
    raise SlurmRefusal(message)


def ask_slurm(command: Sequence[str], *, timeout_s: float = 30.0) -> str | None:
    """Return what a query printed; None if its command is not installed, or Slurm does not answer it."""
    if shutil.which(command[0]) is None:
        return None
    try:
        return run_slurm(command, timeout_s=timeout_s)
    except SlurmError:
        return None


def read_queue(*, timeout_s: float = 60.0) -> list[QueueRow]:
    """Return all jobs of this user that the controller lists, including those that ended minutes ago: one query."""
    text = run_slurm(
        [
            *("squeue", f"--user={os.getuid()}", "--states=all", "--array", "--noheader"),
            f"--format={SEPARATOR.join(QUEUE_FIELDS)}",
        ],
        timeout_s=timeout_s,
    )
    rows = [row for line in text.splitlines() if (row := _parse_row(line)) is not None]
    return [replace(row, job_id=job_id) for row in rows for job_id in expand_ids(row.job_id)]


def has_live_jobs(whose: str | None = None) -> bool:
    """Whether this user, or the users that an option of squeue selects, have a job that has not ended."""
    whose = whose or f"--user={os.getuid()}"
    alive = "--states=pending,running,suspended,configuring,completing"
    return bool(run_slurm(["squeue", whose, alive, "--noheader", "--format=%i"]).strip())


def expand_ids(job_id: str) -> list[str]:
    """Return the job ids that one line of squeue lists: four for `12_[0-2,5%4]`, one for `12_3` and `12`."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job_id)
    if match is None:
        return [job_id]
    tasks: list[str] = []
    for part in match.group(2).split(","):
        first, _, last = part.partition("-")
        tasks += [f"{match.group(1)}_{task}" for task in range(int(first), int(last or first) + 1)]
    return tasks


def _parse_row(line: str) -> QueueRow | None:
    parts = line.split(SEPARATOR, len(QUEUE_FIELDS) - 1)
    if len(parts) < len(QUEUE_FIELDS):
        return None
    job_id, state, reason, left, nodes, folder, comment, name = parts
    return QueueRow(job_id, state, reason, parse_duration(left), nodes, folder, comment, name)


def parse_duration(text: str) -> float | None:
    """Return the seconds of `D-HH:MM:SS`, `HH:MM:SS`, `MM:SS`; None for `UNLIMITED`, `INVALID`, `NOT_SET`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_accounts(job_ids: Sequence[str]) -> dict[str, AccountRow]:
    """Return these jobs' rows of the accounting; empty if there is no accounting or it does not answer."""
    states: dict[str, tuple[str, str]] = {}
    steps: dict[str, list[str]] = {}
    for chunk in _chunks(sorted({job.split("_")[0] for job in job_ids})):
        fields = ("--parsable2", "--noheader", "--duplicates", "--format=JobID,State,NodeList")
        text = ask_slurm(["sacct", *fields, f"--jobs={','.join(chunk)}"])
        if text is None:
            return {}
        for line in text.splitlines():
            job, state, nodes = [*line.split("|", 2), "", ""][:3]
            if "." in job:
                steps.setdefault(job.split(".")[0], []).append(state)
            elif job:
                states[job] = (state, nodes)
    return {
        job: AccountRow(job_id=job, state=state, nodes=nodes, step_states=tuple(steps.get(job, ())))
        for job, (state, nodes) in states.items()
        if job in set(job_ids)
    }


@dataclass(frozen=True)
class ControllerRecord:
    """The controller's record of one job: what it adds to the job's line in the queue."""

    state: str
    preempted: bool
    """Whether Slurm has started to preempt it: if the signal kills the trial, the state is FAILED, not PREEMPTED."""


def query_job(job_id: str) -> ControllerRecord | None:
    """Return one job by `scontrol show job`; None if the controller no longer lists it or does not answer."""
    shown = ask_slurm(["scontrol", "show", "job", "--oneliner", job_id]) or ""
    state = re.search(r"\bJobState=(\S+)", shown)
    preempted = re.search(r"\bPreemptTime=\d", shown) is not None
    return ControllerRecord(state.group(1), preempted) if state else None


def find_bad_nodes(nodes: str) -> list[str]:
    """Return those of these nodes that are down, failing or silent; empty if Slurm does not answer."""
    if not nodes.strip():
        return []
    text = ask_slurm(["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T"]) or ""
    bad = {
        node
        for node, _, state in (line.partition("|") for line in text.splitlines())
        if state.endswith("*") or state.startswith(("down", "fail", "error", "unknown", "power"))
    }
    return sorted(bad)


def cancel_jobs(job_ids: Sequence[str], *, signal: str | None = None) -> None:
    """Run scancel; jobs that have ended already are not an error. `SlurmUnavailable` if Slurm does not answer."""
    for chunk in _chunks(list(job_ids)):
        try:
            run_slurm(["scancel", *([f"--signal={signal}", "--full"] if signal else []), *chunk])
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
    """Return the environment of sbatch, or of a process that calls srun: a job's, and Slurm's own token.

    The node program removes the token before it starts the trial.
    """
    own = {OWN_SECRET: os.environ[OWN_SECRET]} if OWN_SECRET in os.environ else {}
    return {name: value for name, value in {**job_environment(), **own}.items() if name not in set(without)}


def _chunks(ids: list[str]) -> Iterable[list[str]]:
    return (ids[start : start + IDS_PER_CALL] for start in range(0, len(ids), IDS_PER_CALL))
