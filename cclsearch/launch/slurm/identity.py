"""Identify a job: Slurm reuses numbers, so name, folder and submit time must match too.

The folder of a submission has a random part, so no other job has it as its working directory unless somebody chose it.
Name and submit time are recorded when the queue first lists the job (`seen.json`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from cclsearch.core.values import Model
from cclsearch.launch.base import write_model
from cclsearch.launch.slurm.commands import ListedJob, array_of
from cclsearch.launch.slurm.job_files import JOBS_FILE, SUBMISSION_FILE, JobList, JobSpec, Submission

SEEN_FILE = "seen.json"


class SeenRecord(Model):
    """`seen.json` of an attempt: its job as Slurm first listed it."""

    job_id: str
    name: str
    submitted: str
    """Slurm's submit time; a requeue sets a later one."""
    cluster: str = ""
    """Only if `SLURM_CLUSTERS` is set."""


@dataclass(frozen=True)
class JobIdentity:
    """Fields that a listed job must share with an attempt's job; empty fields are unknown, and not compared."""

    job_id: str
    name: str
    folder: str
    submitted: str = ""
    cluster: str = ""

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

    Before the job was listed once, its folder decides: a site's plugin may have renamed it. A job that an earlier
    version submitted has its expected name.
    """
    submission = Submission.read(spec.folder / SUBMISSION_FILE)
    folder = str(submission.folder) if submission else str(spec.folder)
    seen = SeenRecord.read(spec.folder / SEEN_FILE)
    if seen is not None and seen.job_id == job_id:
        return JobIdentity(job_id, seen.name, folder, seen.submitted, seen.cluster)
    if submission is not None and submission.is_identified:
        return JobIdentity(job_id, "", folder)
    return JobIdentity(job_id, _expected_name(spec, submission), folder)


def record_sight(spec: JobSpec, job_id: str, listed: ListedJob) -> JobIdentity:
    """Record name and submit time of the attempt's job, and return its identity."""
    seen = SeenRecord(job_id=job_id, name=listed.name, submitted=listed.submitted, cluster=listed.cluster)
    write_model(spec.folder / SEEN_FILE, seen)
    return identify_job(spec, job_id)


def name_chunk(run_id: str, first_name: str, count: int) -> str:
    """Return the name of a submission: the attempt's own if it is alone, else one of the array."""
    return first_name if count == 1 else f"{run_id}-x{count}"


def _expected_name(spec: JobSpec, submission: Submission | None) -> str:
    jobs = JobList.read(submission.folder / JOBS_FILE) if submission and submission.index is not None else None
    return name_chunk(spec.run_id, spec.name, len(jobs.jobs) if jobs else 1)
