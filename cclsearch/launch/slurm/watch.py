"""The status of jobs: by the result file, then one queue query for all, then accounting and controller, then time."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.core.processes import boot_clock_s
from cclsearch.core.text import one_line
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.launch.base import JobState, JobStatus, write_model
from cclsearch.launch.collect import AT_FAULT
from cclsearch.launch.contract import RunStatus
from cclsearch.launch.slurm.commands import (
    ListedJob,
    SlurmError,
    SlurmUnavailable,
    array_of,
    cancel_jobs,
    find_bad_nodes,
    never_starts,
    query_job,
    read_accounts,
    read_queue,
)
from cclsearch.launch.slurm.ending import (
    ENDED_STATES,
    WAITING_STATES,
    Ending,
    explain_end,
    explain_infrastructure,
    find_exit_code,
    read_ending,
)
from cclsearch.launch.slurm.job_files import (
    BAD_NODE_FILE,
    CANCELLED_FILE,
    END_FILE,
    STARTED_FILE,
    SUBMISSION_FILE,
    BadNode,
    JobIdentity,
    JobSpec,
    NodeReport,
    Submission,
    classify_trial,
    identify_job,
    read_result_status,
    record_sight,
    sees_file,
)
from cclsearch.launch.slurm.settings import SlurmSettings

MAX_RETRY_PAUSE_S = 60.0
"""Maximum pause between two queries while the controller does not answer."""
# Shorter after a failed query, so that result files are still read meanwhile.
QUERY_TIMEOUT_S, RETRY_TIMEOUT_S = 60.0, 10.0
"""Time limits of a query, and of one after a failed query."""
SETTLE_S = 5.0
"""Seconds that a job may be missing from the queue just after its submission."""
MAX_SINGLE_QUERIES = 20
"""Maximum number of single queries per poll for jobs that neither queue nor accounting lists."""
DEADLINE_S = 900.0
"""Seconds beyond a trial's time limit after which a job is given up if Slurm does not answer either."""


@dataclass
class QueueCache:
    """The user's queue as last seen; queried at most once per `poll_s` seconds however many jobs there are."""

    poll_s: float
    rows: dict[str, list[ListedJob]] = field(default_factory=dict)
    """Number -> the jobs listed with it: several clusters may have the same one."""
    queried_at: float = 0.0
    """Time of the last query by the boot clock; 0 before the first."""
    last_error: str = ""
    """Slurm's message while it does not answer; else empty."""
    _last_try: float = -1e9
    _failures: int = 0

    def row(self, job: JobIdentity) -> ListedJob | None:
        """Return the job's row; None if it is not listed. A row of another job with its number does not count."""
        return find_row(self.rows, job)

    def row_by_number(self, job_id: str) -> ListedJob | None:
        """Return the row of a number that the user gave."""
        return next(iter(self.rows.get(job_id, [])), None)

    def refresh(self, *, urgent: bool = False) -> bool:
        """Query again if it is time; return whether there is a new answer."""
        pause = min(self.poll_s * 2**self._failures, max(MAX_RETRY_PAUSE_S, self.poll_s))
        if urgent and not self._failures:
            pause = min(pause, 1.0)
        if time.monotonic() - self._last_try < pause:
            return False
        started = boot_clock_s()
        try:
            rows = read_queue(timeout_s=QUERY_TIMEOUT_S if self._failures % 4 == 0 else RETRY_TIMEOUT_S)
        except SlurmError as error:
            self.last_error, self._failures = str(error), min(self._failures + 1, 10)
            return False
        finally:
            self._last_try = time.monotonic()
        self.rows = index_rows(rows)
        self.queried_at, self.last_error, self._failures = started, "", 0
        return True


@dataclass
class Watcher:
    """Finds the status of submitted attempts; its state only saves queries."""

    settings: SlurmSettings
    queue: QueueCache
    _accounts: dict[str, ListedJob] = field(default_factory=dict)
    _accounts_at: float = 0.0
    _ended_since: dict[str, float] = field(default_factory=dict)
    _started_since: dict[str, float] = field(default_factory=dict)
    """Job -> when it was first seen to have started while Slurm did not list it, by the boot clock."""
    _identities: dict[Path, JobIdentity] = field(default_factory=dict)

    def poll(self, attempts: Sequence[tuple[JobSpec, str]]) -> list[JobStatus]:
        """Return the status of every attempt with a job id, in order."""
        done = {spec.folder: self.read_result(spec) for spec, _ in attempts}
        open_ones = [(spec, job) for spec, job in attempts if done[spec.folder] is not RunStatus.OK]
        if open_ones:
            self.queue.refresh(urgent=any(sees_file(spec.folder / END_FILE) for spec, _ in open_ones))
            jobs = {spec.folder: self._identify(spec, job) for spec, job in open_ones}
            self._query_accounts(
                [jobs[spec.folder] for spec, _ in open_ones if self._is_missing(spec, jobs[spec.folder])]
            )
        return [
            JobStatus(state=JobState.DONE)
            if done[spec.folder] is RunStatus.OK
            else self._status(spec, jobs[spec.folder], failed_result=done[spec.folder] is RunStatus.FAILED)
            for spec, _ in attempts
        ]

    def read_result(self, spec: JobSpec) -> RunStatus | None:
        """Return the status of the result; None while the logs of several nodes are put together."""
        status = read_result_status(spec)
        if status is RunStatus.OK and spec.nodes > 1 and not sees_file(spec.folder / END_FILE):
            return status if self._ended_for(str(spec.folder)) > self.settings.grace_s else None
        return status

    def _identify(self, spec: JobSpec, job_id: str) -> JobIdentity:
        """Return the identity of the attempt's job; records name and submit time when it is listed first."""
        known = self._identities.get(spec.folder)
        job = known if known is not None and known.job_id == job_id else identify_job(spec, job_id)
        if not job.submitted and (row := self.queue.row(job)) is not None:
            job = record_sight(spec, job_id, row)
        self._identities[spec.folder] = job
        return job

    def _is_missing(self, spec: JobSpec, job: JobIdentity) -> bool:
        """Whether a query after the submission did not list the job."""
        if not self.queue.queried_at or self.queue.row(job) is not None:
            return False
        submission = Submission.read(spec.folder / SUBMISSION_FILE)
        queried_s = boot_clock_s() - self.queue.queried_at
        return submission is None or submission.moment.elapsed_s() - queried_s > SETTLE_S

    def _query_accounts(self, missing: list[JobIdentity]) -> None:
        wanted = [
            job
            for job in missing
            if job.job_id not in self._accounts or not _has_ended(self._accounts[job.job_id].state)
        ]
        if wanted and self.queue.queried_at > self._accounts_at:
            self._accounts_at = self.queue.queried_at
            self._read_accounts(wanted)
            for job in [job for job in wanted if job.job_id not in self._accounts][:MAX_SINGLE_QUERIES]:
                record = query_job(job.job_id)
                if record is not None and job.is_of(record):
                    self._accounts[job.job_id] = ListedJob(job.job_id, record.state)

    def _read_accounts(self, jobs: Sequence[JobIdentity]) -> None:
        """Keep the accounting's last row of each of these jobs; other jobs may have had the number before or since."""
        rows = index_rows(read_accounts([job.job_id for job in jobs]))
        found = {job.job_id: row for job in jobs if (row := find_row(rows, job)) is not None}
        self._accounts.update(found)

    def _status(self, spec: JobSpec, job: JobIdentity, *, failed_result: bool) -> JobStatus:
        row, job_id = self.queue.row(job), job.job_id
        ended = sees_file(spec.folder / END_FILE)
        if row is not None and not _has_ended(row.state):
            if row.state in WAITING_STATES and not sees_file(spec.folder / STARTED_FILE):
                return self._pending(spec, row)
            if not ended or row.state == "COMPLETING" or self._ended_for(job_id) <= self.settings.grace_s:
                note = f"{row.state.lower()} on {row.nodes}" if row.nodes else row.state.lower()
                return JobStatus(state=JobState.RUNNING, note=note)
        if row is None and not self._is_missing(spec, job):
            return self._not_listed(spec, job_id, ended=ended)
        return self._explain_end(spec, job, ended=ended, failed_result=failed_result)

    def _ended_for(self, job_id: str) -> float:
        """Return the seconds since the first call for this job: since it was first seen to have ended."""
        return time.monotonic() - self._ended_since.setdefault(job_id, time.monotonic())

    def _pending(self, spec: JobSpec, row: ListedJob) -> JobStatus:
        if never_starts(row.reason):
            return _give_up(row, f"job {row.job_id} can never start: Slurm's reason is {row.reason}")
        submission = Submission.read(spec.folder / SUBMISSION_FILE)
        limit = self.settings.queue_limit
        if limit is not None and submission and submission.moment.elapsed_s() > limit * 60:
            message = f"job {row.job_id} waited {limit} min in the queue ({row.reason}), the limit set by queue_limit"
            return _give_up(row, message)
        return JobStatus(state=JobState.QUEUED, note=f"pending: {one_line(row.reason, 80)}")

    def _not_listed(self, spec: JobSpec, job_id: str, *, ended: bool) -> JobStatus:
        """Return the status of a job that no query has listed yet, because it is new or Slurm does not answer."""
        started = sees_file(spec.folder / STARTED_FILE)
        ran_for_s = boot_clock_s() - self._started_since.setdefault(job_id, boot_clock_s()) if started else 0.0
        if self.queue.last_error and not ended and ran_for_s > spec.timeout_s + DEADLINE_S:
            message = f"job {job_id} exceeded its time limit, and Slurm does not answer: {self.queue.last_error}"
            return JobStatus.failed(FailureKind.LAUNCHER, message)
        note = (
            f"Slurm does not answer: {one_line(self.queue.last_error, 120)}" if self.queue.last_error else "submitted"
        )
        return JobStatus(state=JobState.RUNNING if started else JobState.QUEUED, note=note)

    def _explain_end(self, spec: JobSpec, job: JobIdentity, *, ended: bool, failed_result: bool) -> JobStatus:
        """Return the end of a job that Slurm lists as ended or not at all, once its files have had time to appear."""
        row, job_id = self.queue.row(job), job.job_id
        known = row or self._accounts.get(job_id)
        state = known.state if known is not None else None
        if state is not None and not _has_ended(state) and row is None:
            return JobStatus(state=JobState.RUNNING, note=f"{state} in the accounting")
        ended_for_s = self._ended_for(job_id)
        may_come = state is None or state.startswith(("COMPLETED", "FAILED"))
        if may_come and not ended and not failed_result and ended_for_s < self.settings.grace_s:
            return JobStatus(state=JobState.RUNNING, note="ended; its result file may still appear")
        submission = Submission.read(spec.folder / SUBMISSION_FILE)
        ending = read_ending(
            spec,
            job_id,
            state=state,
            step_states=self._step_states(job, state),
            preempted=_may_be(state, "FAILED", "COMPLETED", "CANCELLED")
            and (record := query_job(job_id)) is not None
            and job.is_of(record)
            and record.preempted,
            bad_nodes=tuple(find_bad_nodes(known.nodes)) if known and _may_be(state, "FAILED", "NODE_FAIL") else (),
            submission_folder=submission.folder if submission else None,
        )
        return self.conclude(spec, ending, failed_result=failed_result)

    def conclude(self, spec: JobSpec, ending: Ending, *, failed_result: bool) -> JobStatus:
        """Return the final status; with a result that says `failed`, only a cause outside the trial overrides it."""
        limit_min = spec.shape.time_min
        own = classify_trial(spec.trial_dir, find_exit_code(ending))
        if failed_result:
            failure = explain_infrastructure(ending, spec.timeout_s, limit_min)
        else:
            failure = explain_end(ending, spec.timeout_s, limit_min, own)
        if own is not None and own.kind is FailureKind.NODE_FAILED and failure in (None, own):
            failure = _blame_node(spec, ending, own)
        return JobStatus(state=JobState.DONE, failure=failure)

    def _step_states(self, job: JobIdentity, state: str | None) -> tuple[str, ...]:
        """Return the states of a failed job's steps: only the accounting of steps shows that memory ran out."""
        if state is not None and not state.startswith("FAILED"):
            return ()
        if job.job_id not in self._accounts:
            self._read_accounts([job])
        return self._accounts[job.job_id].step_states if job.job_id in self._accounts else ()


def _blame_node(spec: JobSpec, ending: Ending, own: Failure) -> Failure:
    """Record the node of the rank whose hardware failed, and return the failure with its name; as it is if unknown."""
    reports = ending.reports
    if own.rank is not None and len(reports) > 1:
        report = NodeReport.read(spec.folder / f"node-{own.rank // spec.ranks_per_node}.json")
        reports = () if report is None else (report,)
    nodes = [report.node for report in reports]
    named = nodes if len(nodes) == 1 else [n for n in nodes if re.search(rf"\b{re.escape(n)}\b", own.message)]
    if len(named) != 1:
        return own
    write_model(spec.folder / BAD_NODE_FILE, BadNode(node=named[0]))
    cause = own.message.partition(AT_FAULT)[2]
    message = f"the hardware of node {named[0]}{AT_FAULT}{cause}; later jobs leave the node out"
    return own.model_copy(update={"message": message})


def cancel_attempts(attempts: Sequence[tuple[JobSpec, str]], *, patience_s: float = 120.0) -> list[str]:
    """Cancel these jobs and wait until they have ended; return the ids of those that Slurm still lists.

    A job that only has the number of one of them is left alone. Raises `SlurmUnavailable` if Slurm does not answer in
    that time.
    """
    wanted = [identify_job(spec, job) for spec, job in attempts]
    deadline, harder = time.monotonic() + patience_s, time.monotonic() + patience_s / 2
    pause = 0.2
    while True:
        try:
            rows = index_rows(read_queue())
            found = [(job.job_id, row) for job in wanted if (row := find_row(rows, job)) is not None]
            alive = sorted((row.cluster, job_id) for job_id, row in found if not _has_ended(row.state))
            if not alive:
                return []
            for cluster in dict.fromkeys(cluster for cluster, _ in alive):
                jobs = [job_id for there, job_id in alive if there == cluster]
                cancel_jobs(jobs, signal="KILL" if time.monotonic() > harder else None, cluster=cluster)
        except SlurmError as error:
            if time.monotonic() > deadline:
                raise SlurmUnavailable(str(error)) from None
        else:
            if time.monotonic() > deadline:
                return [job_id for _, job_id in alive]
        time.sleep(pause)
        pause = min(pause * 1.5, 3.0)


def index_rows(rows: Iterable[ListedJob]) -> dict[str, list[ListedJob]]:
    """Return the jobs that are listed with each number."""
    found: dict[str, list[ListedJob]] = {}
    for row in rows:
        found.setdefault(row.job_id, []).append(row)
    return found


def find_row(rows: Mapping[str, list[ListedJob]], job: JobIdentity) -> ListedJob | None:
    """Return the job's last row, or its array's if the task is not listed by itself; None if there is none."""
    for number in dict.fromkeys((job.job_id, array_of(job.job_id))):
        for row in reversed(rows.get(number, [])):
            if job.is_of(row):
                return row
    return None


def mark_cancelled(spec: JobSpec) -> None:
    """Record that the search itself cancels the attempt, so that its end is not attributed to someone else."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    (spec.folder / CANCELLED_FILE).write_text("{}\n", encoding="utf-8")


def _has_ended(state: str) -> bool:
    return state.split()[0] in ENDED_STATES if state.strip() else False


def _may_be(state: str | None, *states: str) -> bool:
    return state is None or state.startswith(states)


def _give_up(row: ListedJob, message: str) -> JobStatus:
    with contextlib.suppress(SlurmError):
        cancel_jobs([row.job_id], cluster=row.cluster)
    return JobStatus.failed(FailureKind.LAUNCHER, message, Stage.SUBMIT)
