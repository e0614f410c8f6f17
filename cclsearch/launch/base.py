"""The launcher protocol: submit jobs, poll many at once, cancel them, and find them again after a kill.

Launchers that answer a trial while it is submitted share a base class.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self, runtime_checkable

from pydantic import AfterValidator

from cclsearch.card.model import Card
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import TrialError, UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.values import Failure, FailureKind, Model, Provenance, Stage
from cclsearch.launch.contract import RESULT_FILE, RunStatus, TrialInput, make_result
from cclsearch.space.table import Space

# Output of programs such as scontrol and gcloud may name secrets.
Masked = Annotated[str, AfterValidator(lambda text: redact(text))]
"""Text with its secrets masked."""


class Job(Model):
    """One attempt at one trial, ready to run. `trial_dir` exists and contains `config.json`."""

    run_id: str
    trial: int
    attempt: int
    """1 for the first attempt; higher for retries after an infrastructure failure."""
    trial_dir: Path
    payload: TrialInput
    timeout_s: float

    @property
    def name(self) -> str:
        """The job's name in the scheduler; unique in a project, so that a resumed search finds the job again."""
        return f"{self.run_id}-t{self.trial:04d}-a{self.attempt}"


class Handle(Model):
    """Identifies a submitted job, so that it is found again; stored in the ledger as it is."""

    launcher: str
    job_name: str
    job_id: str
    """A scheduler's job id, a process id or a resource name."""
    trial_dir: Path
    details: dict[str, str] = {}


class JobState(StrEnum):
    """State of a job. `done` means that `result.json` can be read, or that `failure` says why there is none."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class JobStatus(Model):
    """One answer of a poll."""

    state: JobState
    failure: Failure | None = None
    """Only with `done`: the launcher's reason if there is no usable result (timeout, node failed, ...)."""
    note: str = ""
    """One line for people (`pending: Resources`)."""

    @classmethod
    def failed(cls, kind: FailureKind, message: str, stage: Stage = Stage.RUN) -> Self:
        """Return the status of a job that ended with this failure."""
        return cls(state=JobState.DONE, failure=Failure(stage=stage, kind=kind, message=message))


class Check(Model):
    """One line of `launcher check` and of `doctor`."""

    name: str
    ok: bool
    detail: Masked
    remedy: Masked = ""
    """Step that fixes it; empty if `ok`."""

    @classmethod
    def of(cls, name: str, ok: bool, detail: str, remedy: str = "") -> Self:
        """Return the line; the remedy only if it is not ok."""
        return cls(name=name, ok=ok, detail=detail, remedy="" if ok else remedy)

    @classmethod
    def of_program(cls, name: str, program: str, remedy: str) -> Self:
        """Check that a program is on the PATH."""
        found = shutil.which(program)
        return cls.of(name, found is not None, found or f"{program!r} was not found", remedy)


class Leftover(Model):
    """A job of a run that has not ended, or a resource of it that still exists and may cost money."""

    kind: str
    """`job`, `queued resource`, ..."""
    name: str
    state: str


def write_model(path: Path, value: Model) -> None:
    """Write the file atomically, and its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, value.model_dump_json(indent=1))


def refuse_places(jobs: Sequence[Job], launcher: str) -> None:
    """Raise UserError if a job asks for an order of its nodes: this launcher uses them as the scheduler gives them."""
    for job in jobs:
        if job.payload.moves_nodes:
            asked = job.payload.config.get("host_order", "links")
            raise UserError(
                f"host_order={asked}: the {launcher} launcher uses the nodes in the scheduler's order; search with"
                " host_order=given, and write the order for the final run with `ccl-search links place`"
            )


def refuse_cpu_devices(jobs: Sequence[Job]) -> None:
    """Raise UserError if ranks on CPUs ask for an order of devices: only namespaces can be theirs."""
    if any(job.payload.devices and job.payload.accelerator == "cpu" for job in jobs):
        raise UserError(
            "device_order=links: ranks on CPUs have no devices; give the profile `network_namespaces` and"
            " `namespaces_per_node`, so that namespaces are their devices, or search with device_order=given"
        )


def submit_error(message: str) -> TrialError:
    """Return the error about a job that could not be started now."""
    return TrialError(Failure(stage=Stage.SUBMIT, kind=FailureKind.LAUNCHER, message=message))


@runtime_checkable
class Cleaner(Protocol):
    """A launcher that creates resources besides jobs; `clean` shows and removes both."""

    def leftovers(self, run_id: str) -> list[Leftover]:
        """Return the run's jobs and resources that still exist; starts and changes nothing."""

    def remove_leftovers(self, run_id: str) -> None:
        """Cancel and delete all of them and wait until they are gone; UserError if one cannot be removed."""


@runtime_checkable
class StartWarner(Protocol):
    """A launcher that can warn before the first trial of disturbances of the measurements."""

    def warn_at_start(self) -> str | None:
        """Return a line with the finding and the remedy; None if nothing was found."""


@runtime_checkable
class StartRefuser(Protocol):
    """A launcher that can see at once that no job could start here."""

    def refuse_at_start(self) -> None:
        """Raise UserError, with the missing part and the remedy, before a new run has a folder."""


@runtime_checkable
class WorkloadUser(Protocol):
    """A launcher that computes trials itself, so it needs the card and the search space."""

    def use_workload(self, card: Card, space: Space) -> None:
        """Take the search's workload before the first job, and again if its space grows; UserError if it cannot."""


class Launcher(Protocol):
    """Runs trials. Every call is safe to repeat after a kill; none raises for the failure of a single job.

    `UserError` from `__init__` or `submit` means that no job can ever run (bad account, no such partition).
    """

    name: str
    provenance: Provenance
    max_parallel: int
    """Maximum number of jobs at a time; 1 if trials would disturb each other."""
    poll_interval_s: float
    """Pause between two polls; 0 if a job is done as soon as it is submitted."""

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Start these jobs; return one handle per job, in order."""

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        """Return the status of these jobs, in order: one query however many there are."""

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Stop these jobs and wait until they are gone."""

    def find(self, run_id: str) -> list[Handle]:
        """Return the existing jobs of that run, also those not in the ledger (killed between submit and record)."""

    def render(self, job: Job) -> str:
        """Return the job script as it would be submitted: for `job.sh`, `--dry-run` and `best`."""

    def check(self) -> list[Check]:
        """Check whether this launcher works here; each failed check has a remedy."""

    def close(self) -> None:
        """Close connections; jobs keep running."""


REFUSED = "refused"
"""Key of a handle's details: why there is no result."""


class InstantLauncher(ABC):
    """Has `_serve` write each job's `result.json` at once."""

    name: ClassVar[str]
    runs_scripts = False
    poll_interval_s = 0.0

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Answer each job at once; a handle says why there is no result."""
        return [
            self._serve(job, Handle(launcher=self.name, job_name=job.name, job_id=job.name, trial_dir=job.trial_dir))
            for job in jobs
        ]

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        """Return done for all: they were answered when they were submitted."""
        return [self._status(handle) for handle in handles]

    def cancel(self, handles: Sequence[Handle]) -> None:  # noqa: B027
        """Does nothing: no job runs."""

    def find(self, run_id: str) -> list[Handle]:
        """Return nothing: no job outlives the search, and answers are in the trial folders."""
        return []

    def close(self) -> None:  # noqa: B027
        """Does nothing: no connection is open."""

    @abstractmethod
    def _serve(self, job: Job, handle: Handle) -> Handle:
        """Write the job's result; return the handle, with `REFUSED` in its details if there is none."""

    def _status(self, handle: Handle) -> JobStatus:
        """Return the end of a job, from its handle and its folder: the same after a kill."""
        refused = handle.details.get(REFUSED)
        if refused is None and (handle.trial_dir / RESULT_FILE).exists():
            return JobStatus(state=JobState.DONE)
        message = refused or f"the {self.name} launcher wrote no result for this trial; submit it again"
        return JobStatus.failed(FailureKind.LAUNCHER, message, Stage.SUBMIT)


def write_answer(job: Job, card: Card, metrics: Mapping[str, float], failure: Failure | None, **fields: Any) -> None:
    """Write the `result.json` of a trial that was measured elsewhere or computed: its metrics, or its failure."""
    status = RunStatus.OK if failure is None else RunStatus.FAILED
    ranks = job.payload.num_ranks
    result = make_result(card, metrics, status=status, failure=failure, world_size=ranks, **fields)
    write_model(job.trial_dir / RESULT_FILE, result)
