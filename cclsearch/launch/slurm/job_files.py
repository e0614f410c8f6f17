"""The files of one attempt: the job spec that the node program reads, and the records that the job leaves.

They hold the state of a job when Slurm does not answer or has already forgotten it. Slurm reuses numbers, so they also
identify the job: name, folder and submit time must match too. The folder of a submission has a random part, so no other
job has it as its working directory unless somebody chose it.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclsearch.core.content import TRIALS_FOLDER
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import RESULT_BYTES, JobFileError, read_job_json
from cclsearch.core.values import BootMoment, Failure, Model, TimeLimit, Value
from cclsearch.launch.base import Job, write_model
from cclsearch.launch.collect import collect_end
from cclsearch.launch.contract import RESULT_FILE, TRACE_FOLDER, RunStatus, trial_environment
from cclsearch.launch.ownership import find_attempt_files, read_inode, run_folder_of
from cclsearch.launch.slurm.commands import ListedJob, array_of
from cclsearch.launch.slurm.node import srun_command
from cclsearch.launch.slurm.script import Shape, choose_shape, container_prefix, mounted_folders, srun_arguments
from cclsearch.launch.slurm.settings import SlurmSettings
from cclsearch.space.promises import RequiredVariable

SPEC_FILE = "payload.json"
JOBS_FILE = "jobs.json"
SCRIPT_FILE = "job.sbatch"
SUBMISSION_FILE = "submission.json"
SUBMITTED_FILE = "submitted.json"
STARTED_FILE = "started.json"
END_FILE = "end.json"
CANCELLED_FILE = "cancelled.json"
BAD_NODE_FILE = "bad_node.json"

NODE_PROGRAM = Path(__file__).with_name("node.py")


class JobSpec(Model):
    """`payload.json`: one attempt at one trial, as the node program reads it."""

    run_id: str
    trial: int
    attempt: int
    name: str
    trial_dir: Path
    folder: Path
    """The attempt's folder: this file and everything that the job writes about itself."""
    shape: Shape
    nodes: int
    num_ranks: int
    ranks_per_node: int
    runner: str
    """`torchrun` or `process`."""
    python: str
    host_python: str
    program: Path
    """Path of `node.py`: a copy in the attempt's folder, which every node can read."""
    script: Path
    prefix: tuple[str, ...] = ()
    """Container command in front of the rank's own."""
    srun_arguments: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    timeout_s: TimeLimit
    step_name: str = ""
    """Name of the step in a held allocation, in which several runs of one name may have steps; empty: `name`."""
    run_inode: str = ""
    """Inode of the run's folder: a copy of the run has another one."""


class JobList(Model):
    """`jobs.json` of one submission: array index (0 for a single job) -> path of the job spec."""

    run_id: str
    jobs: tuple[Path, ...]


class Submission(Model):
    """`submission.json` of an attempt: written before sbatch is called, so that a kill during the call is noticed."""

    folder: Path
    """The folder whose `jobs.json` was submitted."""
    index: int | None
    """Index in the array; None for a single job."""
    moment: BootMoment
    # Slurm lists only a user's own jobs.
    user: int
    """User id of the submitter."""


class SbatchAnswer(Model):
    """`submitted.json` of a submission: sbatch's answer."""

    job_id: str


class StartRecord(Model):
    """`started.json`: the job that claimed the attempt; a second job, and the same job started again, does nothing."""

    job_id: str
    host: str
    at: float
    start: str = ""
    """Number of restarts by Slurm (0 for the first start), and a random part."""


class EndRecord(Model):
    """`end.json`: how the job ended, as its node program saw it."""

    job_id: str
    started_at: float
    ended_at: float
    exit_code: int
    reason: str
    """`finished`, `timeout`, `signal`, `lingered` or `unlaunched` (srun could not be started)."""
    signal: str | None = None


class NodeReport(Model):
    """`node-<k>.json`: how the task of one node ended."""

    node: str
    exit_code: int
    terminated: bool = False
    """Whether a signal ended it: preemption, cancellation, or the failure of another node's task."""
    oom_kills: int
    unlaunched: str = ""
    """Reason why the run script could not start at all."""


class BadNode(Model):
    """`bad_node.json`: the node whose hardware ended the attempt; later jobs of the run leave it out."""

    node: str


def list_bad_nodes(run_dir: Path | None) -> list[str]:
    """Return the nodes whose hardware ended an attempt of the run, sorted.

    A trial that ends on two nodes in the same way shows that the nodes are not the reason.
    """
    blamed: dict[str, set[str]] = {}
    for path in find_attempt_files(run_dir, f"slurm-a*/{BAD_NODE_FILE}"):
        bad, trial = BadNode.read(path), path.relative_to((run_dir or path).absolute()).parts[1]
        if bad is not None and re.fullmatch(r"[\w.-]+", bad.node):
            blamed.setdefault(trial, set()).add(bad.node)
    return sorted({node for nodes in blamed.values() if len(nodes) == 1 for node in nodes})


@dataclass(frozen=True)
class RunScript:
    """The run script of the trials, with what its framework and the profile add."""

    path: Path | None
    """None only for a launcher that is made for `check`."""
    runner: str
    """`torchrun`, or `process`: one process per node that starts or drives its own ranks."""
    environment: dict[str, str]
    """The profile's `environment`."""
    knob_environment: Callable[[Mapping[str, Value]], dict[str, str]] = lambda _: {}
    """Variables that a configuration sets (`NCCL_ALGO`)."""
    needs: tuple[RequiredVariable, ...] = ()
    """Variables that the framework needs on the nodes; without a script, those of any framework."""


def make_job_spec(job: Job, run_script: RunScript, settings: SlurmSettings) -> JobSpec:
    """Return the job spec of one attempt: absolute paths, no secrets, nothing that depends on the search's host."""
    if run_script.path is None:
        raise UserError("trials need a run script: set `framework` in the profile or the card")
    trial_dir, run_dir = job.trial_dir.absolute(), run_folder_of(job.trial_dir.absolute())
    folder = trial_dir / f"slurm-a{job.attempt}"
    ranks, per_node = job.payload.num_ranks, job.payload.ranks_per_node
    environment = {
        **run_script.environment,
        **run_script.knob_environment(job.payload.config),
        **trial_environment(trial_dir, job.payload),
    }
    script = run_script.path.absolute()
    folders = mounted_folders(settings, run_dir / TRIALS_FOLDER if run_dir else trial_dir.parent, script)
    shape = choose_shape(ranks, per_node, job.timeout_s, settings)
    return JobSpec(
        run_id=job.run_id,
        trial=job.trial,
        attempt=job.attempt,
        name=job.name,
        trial_dir=trial_dir,
        folder=folder,
        shape=shape,
        nodes=shape.nodes,
        num_ranks=ranks,
        ranks_per_node=min(ranks, per_node),
        runner=run_script.runner,
        python=settings.default_python(),
        host_python=settings.default_host_python(),
        program=folder / NODE_PROGRAM.name,
        script=script,
        prefix=container_prefix(settings, folders, environment),
        srun_arguments=srun_arguments(settings, folders),
        environment=environment,
        timeout_s=min(job.timeout_s, settings.time_limit * 60.0),
        run_inode=read_inode(run_dir),
    )


def describe_job_spec(spec: JobSpec) -> list[str]:
    """Return lines for readers of the script: the command that the node program starts on each node."""
    ranks = [
        f"-m torch.distributed.run --nnodes={spec.nodes} --node-rank=K --nproc-per-node={spec.ranks_per_node} "
        "--master-addr=HEAD --master-port=PORT"
    ]
    words = [*spec.prefix, spec.python, *(ranks if spec.runner == "torchrun" else []), str(spec.script)]
    srun = srun_command(spec.model_dump(mode="json"), str(spec.folder / SPEC_FILE))
    return [
        f"node.py starts this once, for at most {spec.timeout_s:.0f} s, from a copy of this script:",
        f"  {shlex.join(srun)}",
        "which starts on each node, with these variables:",
        *(f"  {name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items())),
        f"  {' '.join(words)}",
    ]


def prepare_folder(spec: JobSpec) -> None:
    """Make the attempt's folder with the job spec and the node program."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(NODE_PROGRAM, spec.program)
    write_model(spec.folder / SPEC_FILE, spec)


def link_scratch(spec: JobSpec, settings: SlurmSettings) -> None:
    """Put the traces on `scratch`, if the profile has one: `trace` becomes a link to a new folder there.

    Its name has a random part: runs of the same name in two projects may share a scratch folder.
    """
    link = spec.trial_dir / TRACE_FOLDER
    if settings.scratch is None or link.exists():
        return
    scratch = Path(settings.scratch).expanduser()
    target = scratch / f"{spec.name}-{secrets.token_hex(4)}" / TRACE_FOLDER
    link.unlink(missing_ok=True)  # a link to a folder that was removed since
    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"scratch must be a writable folder, but {str(scratch)!r}: {error.strerror}") from None
    link.symlink_to(target, target_is_directory=True)


def remove_scratch(spec: JobSpec, settings: SlurmSettings) -> None:
    """Remove the trial's folder on `scratch`, if `trace` links to one there."""
    link = spec.trial_dir / TRACE_FOLDER
    if settings.scratch is not None and link.is_symlink():
        folder = link.readlink().parent
        if folder.parent == Path(settings.scratch).expanduser() and folder.name.startswith(spec.name):
            shutil.rmtree(folder, ignore_errors=True)


def sees_file(path: Path) -> bool:
    """Whether the file exists."""
    # Lists the folder: network file systems cache that a file was missing.
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


def read_result_status(spec: JobSpec) -> RunStatus | None:
    """Return the status, or None if there is no result yet; an unreadable result is left to the evaluation."""
    path = spec.trial_dir / RESULT_FILE
    if not sees_file(path):
        return None
    return RunStatus.FAILED if read_object(path).get("status") == RunStatus.FAILED else RunStatus.OK


def read_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if it is missing or not an object."""
    try:
        found = read_job_json(path, RESULT_BYTES)
    except (OSError, JobFileError):
        return {}
    return found if isinstance(found, dict) else {}


def classify_trial(trial_dir: Path, exit_code: int | None) -> Failure | None:
    """Return the failure that the trial's own files show; None if they hold a valid result."""
    found = collect_end(trial_dir, exit_code=exit_code)
    return found if isinstance(found, Failure) else None


SEEN_FILE = "seen.json"


class JobIdentity(Model):
    """Fields that a listed job must share with an attempt's job; empty fields are unknown, and not compared.

    `seen.json` of an attempt has the job as Slurm first listed it.
    """

    job_id: str
    name: str = ""
    folder: str = ""
    submitted: str = ""
    """Slurm's submit time; a requeue sets a later one."""
    cluster: str = ""
    """Only if `SLURM_CLUSTERS` is set."""

    def is_of(self, listed: ListedJob) -> bool:
        """Whether that is this job: number, name, folder and submit time match."""
        # Slurm lists all waiting tasks of an array in one line; the array's number then means all of them.
        return (
            listed.job_id in (self.job_id, array_of(self.job_id))
            and self._has_folder(listed.folder)
            and self.name in ("", listed.name)
            and self.cluster in ("", listed.cluster)
            and (listed.submitted == "" or listed.submitted >= self.submitted)
        )

    def _has_folder(self, folder: str) -> bool:
        return folder == self.folder or (folder != "" and os.path.realpath(folder) == os.path.realpath(self.folder))


def identify_job(spec: JobSpec, job_id: str) -> JobIdentity:
    """Return the identity of an attempt's job, from the attempt's files.

    Before the job was listed once, its folder decides: a site's plugin may have renamed it.
    """
    submission = Submission.read(spec.folder / SUBMISSION_FILE)
    seen = JobIdentity.read(spec.folder / SEEN_FILE)
    known = seen if seen is not None and seen.job_id == job_id else JobIdentity(job_id=job_id)
    return known.model_copy(update={"folder": str(submission.folder if submission else spec.folder)})


def record_sight(spec: JobSpec, job_id: str, listed: ListedJob) -> JobIdentity:
    """Record name and submit time of the attempt's job, and return its identity."""
    seen = JobIdentity(job_id=job_id, name=listed.name, submitted=listed.submitted, cluster=listed.cluster)
    write_model(spec.folder / SEEN_FILE, seen)
    return identify_job(spec, job_id)
