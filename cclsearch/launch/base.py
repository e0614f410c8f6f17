"""The launcher protocol: submit, poll many at once, cancel, find again after a kill."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from cclsearch.core.values import Failure, Model, Provenance
from cclsearch.launch.contract import TrialInput


class Job(Model):
    """One attempt at one trial, ready to run. `trial_dir` exists and holds `config.json`."""

    run_id: str
    trial: int
    attempt: int
    """1 for the first; more after an infrastructure failure."""
    trial_dir: Path
    payload: TrialInput
    timeout_s: float

    @property
    def name(self) -> str:
        """Name under which a scheduler knows the job; unique in a project: how a killed search finds it again."""
        return f"{self.run_id}-t{self.trial:04d}-a{self.attempt}"


class Handle(Model):
    """What is needed to find a submitted job again: goes into the ledger as it is."""

    launcher: str
    job_name: str
    job_id: str
    """The scheduler's number, a process id, a resource name."""
    trial_dir: Path
    details: dict[str, str] = {}


class JobState(StrEnum):
    """Where a job is. `done` means `result.json` is there to be read, or `failure` says why it never will be."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class JobStatus(Model):
    """One answer of a poll."""

    state: JobState
    failure: Failure | None = None
    """Only with `done`: the launcher's own reason where there is no usable result (timeout, node failed, ...)."""
    note: str = ""
    """One line for people (`pending: Resources`)."""


class Check(Model):
    """One line of `launcher check` and of `doctor`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    """What to do about it; empty where it is ok."""


class Leftover(Model):
    """Something of a run that still exists: a job, or a resource that costs money."""

    kind: str
    """`job`, `queued resource`, ..."""
    name: str
    state: str


@runtime_checkable
class Cleaner(Protocol):
    """A launcher that creates more than jobs: what `clean` shows and removes."""

    def leftovers(self, run_id: str) -> list[Leftover]:
        """What of the run still exists; nothing is started or changed."""
        ...

    def remove_leftovers(self, run_id: str) -> None:
        """End and delete all of it, and wait until it is gone; UserError where it stays."""
        ...


class Launcher(Protocol):
    """Runs trials somewhere. Every call may be repeated after a kill; none raises for a single job's failure.

    `UserError` from `__init__` or `submit` means that no job can ever run (bad account, no such partition).
    """

    name: str
    provenance: Provenance
    max_parallel: int
    """Most jobs in flight that make sense here; 1 where trials would disturb each other."""
    poll_interval_s: float
    """Pause between two polls; 0 where a job is done as soon as it is submitted."""

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Start these jobs; one handle a job, in order."""
        ...

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        """Where these jobs are now, in order: one query however many there are."""
        ...

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Stop these jobs and wait until they are gone."""
        ...

    def find(self, run_id: str) -> list[Handle]:
        """Jobs of that run that exist, whether or not the ledger knows of them (killed between submit and record)."""
        ...

    def render(self, job: Job) -> str:
        """The job script as it would be submitted: for `job.sh`, `--dry-run` and `best`."""
        ...

    def check(self) -> list[Check]:
        """Whether this launcher can run here, with what to do where it cannot."""
        ...

    def close(self) -> None:
        """Let go of what was held (connections); jobs go on."""
        ...
