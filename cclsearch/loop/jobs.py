"""The jobs of a search: submits, polls, adopts after a kill, and retries if the configuration is not at fault."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from cclsearch.core.errors import TrialError, UnavailableError
from cclsearch.core.job_file import has_job_file, hash_job_file
from cclsearch.core.values import BootMoment, Failure, FailureKind, Provenance
from cclsearch.evaluation.evaluate import redact_failure
from cclsearch.launch.base import Handle, Job, JobState, JobStatus, Launcher
from cclsearch.launch.contract import RESULT_FILE, TrialInput
from cclsearch.launch.ownership import is_own_handle, move_handle, stamp_handle
from cclsearch.launch.windows import WindowKeeper
from cclsearch.record.event import (
    EndKind,
    RetryKind,
    TrialFinished,
    TrialRetried,
    TrialSubmitted,
    TrialSubmitting,
    TrialWindow,
)
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.spec import RunSpec
from cclsearch.run.trial_folder import attempt_folder, prepare_folder, publish_attempt, read_published, seal_files
from cclsearch.scoring.outcome import CONSTRAINTS_RULE, EARLY_STOP_RULE, LOAD_RULE, Outcome
from cclsearch.tasks.base import task_of

EvaluateTrial = Callable[[Trial, TrialInput, RunWriter, Failure | None], Outcome]
"""Evaluates a finished trial from its evidence; the failure is the launcher's own reason, if it has one."""

MakeInput = Callable[[Trial], TrialInput]


class StopSignal:
    """A request to stop, from a signal, a deadline or the search itself; the first one is kept."""

    def __init__(self, *, leave_jobs: bool = False) -> None:
        self.leave_jobs = leave_jobs
        """Leave running jobs alone, for `resume` to adopt, instead of cancelling them."""
        self._event = threading.Event()
        self.kind = EndKind.OTHER
        self._reason = "stopped"

    def request(self, reason: str, kind: EndKind = EndKind.OTHER) -> None:
        if not self._event.is_set():
            self.kind, self._reason = kind, reason
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, but return early if a stop is requested."""
        self._event.wait(seconds)

    def describe(self, *, has_jobs: bool = True) -> str:
        """Return why the search stopped, and what happened to its jobs, if it had any."""
        if not has_jobs:
            return self._reason
        jobs = "running jobs continue, and `resume` adopts them" if self.leave_jobs else "running jobs were cancelled"
        return f"{self._reason}; {jobs}"


@dataclass(frozen=True)
class JobRunner:
    """Submits, polls and cancels the jobs of one search, and records their ends."""

    spec: RunSpec
    launcher: Launcher
    evaluate: EvaluateTrial
    make_input: MakeInput
    now_s: Callable[[], float] = time.time
    find_stop_above: Callable[[RunState, Trial], float | None] = lambda state, trial: None
    """Returns the value of the primary metric above which a trial may end early."""
    opens_window: bool = False
    """Whether run script and search share a file system, and the script asks for the nonce of its timed window."""
    keeper: WindowKeeper = field(default_factory=WindowKeeper)
    statuses: dict[int, JobStatus] = field(default_factory=dict)
    """Number of a running trial -> the launcher's last status of its job."""

    def describe_status(self, trial: int) -> str:
        """Return the launcher's last status of a running trial, in one line; empty if none."""
        status = self.statuses.get(trial)
        return "" if status is None else f"{status.state.value}{': ' * bool(status.note)}{status.note}"

    def free_slots(self, writer: RunWriter) -> int:
        """Return how many more trials may start now."""
        return self._most_at_once - writer.state.num_unfinished

    @property
    def _most_at_once(self) -> int:
        return min(self.spec.limits.parallel, self.launcher.max_parallel)

    def adopt(self, writer: RunWriter) -> None:
        """Find jobs that a killed search submitted but did not record; no job is submitted a second time.

        Each damaged line of the ledger may have recorded a job: then every trial without a job may have one.
        """
        for trial in self._running(writer):
            self._adopt_recorded(writer, trial)
        is_doubtful = bool(writer.state.bad_lines)
        without = [trial for trial in writer.state.unfinished if trial.handle is None]
        unrecorded = [trial for trial in without if is_doubtful or trial.attempt > len(trial.retries)]
        if not unrecorded:
            return
        found = {handle.job_name: handle for handle in self.launcher.find(self.spec.run_id)}
        for trial in unrecorded:
            self._adopt_unrecorded(writer, trial, found)

    def _adopt_unrecorded(self, writer: RunWriter, trial: Trial, found: Mapping[str, Handle]) -> None:
        """Record the job of the trial's latest attempt, if there is one, or the end of one that left a result."""
        attempts = range(self.spec.limits.max_attempts + len(trial.retries), len(trial.retries), -1)
        jobs = ((attempt, found.get(self._job(writer, trial, attempt).name)) for attempt in attempts)
        attempt, handle = next(((a, handle) for a, handle in jobs if handle is not None), (trial.attempt, None))
        job = self._job(writer, trial, max(attempt, 1))
        if handle is not None:
            self._record_submitted(writer, replace(trial, attempt=attempt), handle)
            self._adopt_recorded(writer, writer.state.trials[trial.number])
        elif trial.attempt > len(trial.retries) or not trial.retries:
            folders = (job.trial_dir, writer.trial_folder(trial.number))
            if any(has_job_file(folder / RESULT_FILE) for folder in folders):
                ended = read_published(job.trial_dir)
                self._collect(writer, trial, ended or JobStatus(state=JobState.DONE))

    def _adopt_recorded(self, writer: RunWriter, trial: Trial) -> None:
        """Record the end of a job whose files a killed search had moved, and the loss of a job of another run."""
        handle = self.handle(writer, trial)
        ended = read_published(handle.trial_dir)
        if ended is None and not is_own_handle(cast(Handle, trial.handle), writer.folder.absolute()):
            if has_job_file(handle.trial_dir / RESULT_FILE):
                ended = JobStatus(state=JobState.DONE)  # it had finished when the run was copied
            else:
                reason = f"its job belongs to the run that this folder is a copy of ({handle.job_name})"
                self._retry(writer, trial, RetryKind.CANCELLED, reason)
        if ended is not None:
            self._judge(writer, trial, ended)

    def start_waiting(self, writer: RunWriter, *, more: int = 0) -> None:
        """Submit the proposed trials that have no job, all in one call, and `more` than may run at once at most."""
        waiting = [trial for trial in writer.state.unfinished if trial.handle is None]
        waiting = waiting[: max(self._most_at_once + more - len(self._running(writer)), 0)]
        if not waiting:
            return
        jobs = []
        for trial in waiting:
            attempt = len(trial.retries) + 1
            is_measured = self.spec.provenance is Provenance.MEASURED
            nonce, moment = (secrets.token_hex(8), BootMoment.now()) if is_measured else ("", None)
            stop_above = self.find_stop_above(writer.state, trial)
            opens = is_measured and self.opens_window
            job = self._job(writer, replace(trial, nonce=nonce, stop_above=stop_above, opens_window=opens), attempt)
            prepare_folder(job, self.launcher.render(job))
            event = TrialSubmitting(
                trial=trial.number,
                attempt=attempt,
                nonce=nonce,
                moment=moment,
                stop_above=stop_above,
                opens_window=opens,
            )
            writer.record(event.at(self.now_s()))
            jobs.append(job)
        self._submit(writer, waiting, jobs)

    def collect_finished(self, writer: RunWriter, stop: StopSignal) -> None:
        """Poll once and record the finished jobs; waits for a poll interval if there were none."""
        running = self._running(writer)
        for trial in running:
            self._watch(writer, trial)
            self._record_windows(writer, trial, self.handle(writer, trial).trial_dir)
        statuses = self.launcher.poll([self.handle(writer, trial) for trial in running])
        self.statuses.clear()
        self.statuses.update({trial.number: status for trial, status in zip(running, statuses, strict=True)})
        for trial, status in zip(running, statuses, strict=True):
            if status.state is JobState.DONE:
                self._collect(writer, trial, status)
        writer.lock.refresh()
        if running and all(status.state is not JobState.DONE for status in statuses):
            stop.wait(self.launcher.poll_interval_s)

    def shut_down(self, writer: RunWriter, stop: StopSignal) -> None:
        """Cancel the running jobs, unless they are to be left; record the jobs that finished meanwhile either way."""
        running = self._running(writer)
        handles = [self.handle(writer, trial) for trial in running]
        if handles and not stop.leave_jobs:
            statuses = self.launcher.poll(handles)
            self.launcher.cancel(handles)
            for trial, status in zip(running, statuses, strict=True):
                if status.state is JobState.DONE:
                    self._collect(writer, trial, status)
                else:
                    self._retry(writer, trial, RetryKind.CANCELLED, "cancelled when the search was stopped")
        self.keeper.stop()
        self.launcher.close()

    def detach(self) -> None:
        """Close the launcher; its jobs continue, and `resume` adopts them."""
        self.keeper.stop()
        self.launcher.close()

    def _running(self, writer: RunWriter) -> list[Trial]:
        return [trial for trial in writer.state.unfinished if trial.handle is not None]

    def handle(self, writer: RunWriter, trial: Trial) -> Handle:
        """Return the trial's handle, with its paths where the run is now."""
        return move_handle(cast(Handle, trial.handle), writer.folder.absolute())

    def _submit(self, writer: RunWriter, trials: list[Trial], jobs: list[Job]) -> None:
        try:
            handles = self.launcher.submit(jobs)
        except TrialError as error:
            status = JobStatus(state=JobState.DONE, failure=error.failure)
            for trial in trials:
                self._collect(writer, writer.state.trials[trial.number], status)
            return
        for trial, handle in zip(trials, handles, strict=True):
            self._record_submitted(writer, writer.state.trials[trial.number], handle, is_new=True)

    def _collect(self, writer: RunWriter, trial: Trial, status: JobStatus) -> None:
        """Judge a finished job, once its end is certain."""
        handle = self.handle(writer, trial) if trial.handle is not None else None
        if handle is not None and (status.failure is not None or not has_job_file(handle.trial_dir / RESULT_FILE)):
            # A finished job has no result also while its file system is unavailable.
            writer.check_present()
            status = self.launcher.poll([handle])[0]
            if status.state is not JobState.DONE:
                return
        self._judge(writer, trial, status)

    def _judge(self, writer: RunWriter, trial: Trial, status: JobStatus) -> None:
        """Evaluate a job that has ended, then record the trial's end, or that it is retried."""
        failure = redact_failure(status.failure) if status.failure else None
        status = status.model_copy(update={"failure": failure})
        if failure and (
            failure.kind is FailureKind.ALLOCATION_ENDED or (failure.kind.is_infrastructure and self._may_retry(trial))
        ):
            self._retry_failed(writer, trial, failure)
            return
        job = self._job(writer, trial, max(trial.attempt, 1))
        folder = self.handle(writer, trial).trial_dir if trial.handle is not None else job.trial_dir
        publish_attempt(writer.trial_folder(trial.number), folder, status)
        effects = task_of(self.spec.card).load_effects
        if trial.opens_window:
            self._record_windows(writer, trial, folder)
            trial = replace(trial, timed=self.keeper.end(folder, writer.state.trials[trial.number].timed))
        outcome = self.evaluate(trial, self.make_input(trial), writer, failure)
        if outcome.failure:
            writer.check_present()
        if outcome.failure and outcome.failure.kind.is_infrastructure and self._may_retry(trial):
            self._retry_failed(writer, trial, outcome.failure)
        elif self._may_retry(trial) and (disturbance := find_disturbance(outcome, effects)):
            self._retry(writer, trial, RetryKind.DISTURBED, disturbance)
        else:
            self._finish(writer, trial, outcome)

    def _watch(self, writer: RunWriter, trial: Trial, *, is_new: bool = False) -> None:
        """Answer the trial's timed windows; one that recomputes another trial gets that one's nonce."""
        if trial.opens_window:
            other = writer.state.trials[trial.recomputes].outcome if trial.recomputes is not None else None
            nonce = other.nonce if other else ""
            self.keeper.watch(self.handle(writer, trial).trial_dir, trial.timed, first=nonce, is_new=is_new)

    def _record_windows(self, writer: RunWriter, trial: Trial, folder: Path) -> None:
        """Record the windows that opened since the last look."""
        known = len(writer.state.trials[trial.number].timed)  # `trial` may be older
        for window in self.keeper.list_opened(folder)[known:]:
            opened = window.model_copy(update={"seconds": None, "digest": ""})
            event = TrialWindow(trial=trial.number, attempt=max(trial.attempt, 1), window=opened)
            writer.record(event.at(self.now_s()))

    def _finish(self, writer: RunWriter, trial: Trial, outcome: Outcome) -> None:
        sha256 = None
        with contextlib.suppress(PermissionError):  # a job may forbid reading its result, which is then its failure
            sha256 = hash_job_file(writer.trial_folder(trial.number) / RESULT_FILE)
        attempt = max(trial.attempt, 1)
        event = TrialFinished(trial=trial.number, attempt=attempt, outcome=outcome, result_sha256=sha256)
        writer.record(event.at(self.now_s()))
        if self.spec.provenance is Provenance.MEASURED:
            seal_files(writer.trial_folder(trial.number))

    def _may_retry(self, trial: Trial) -> bool:
        return trial.num_counted_retries + 1 < self.spec.limits.max_attempts

    def _retry_failed(self, writer: RunWriter, trial: Trial, failure: Failure) -> None:
        has_ended = failure.kind is FailureKind.ALLOCATION_ENDED
        kind = RetryKind.ALLOCATION_ENDED if has_ended else RetryKind.FAILURE
        self._retry(writer, trial, kind, f"{failure.kind}: {failure.message}", failure)

    def _retry(
        self, writer: RunWriter, trial: Trial, kind: RetryKind, reason: str, failure: Failure | None = None
    ) -> None:
        """Record that the trial is retried, once its job is gone: a scheduler may start a job again that ended."""
        if trial.handle is not None:
            self.keeper.end(self.handle(writer, trial).trial_dir)
        if trial.handle is not None and kind is not RetryKind.CANCELLED:
            try:
                self.launcher.cancel([self.handle(writer, trial)])
            except UnavailableError:
                return  # the job may still run: it is polled again
        attempt = max(trial.attempt, 1)
        event = TrialRetried(trial=trial.number, attempt=attempt, kind=kind, reason=reason, failure=failure)
        writer.record(event.at(self.now_s()))

    def _record_submitted(self, writer: RunWriter, trial: Trial, handle: Handle, *, is_new: bool = False) -> None:
        attempt, stamped = max(trial.attempt, 1), stamp_handle(handle, writer.folder)
        writer.record(TrialSubmitted(time_s=self.now_s(), trial=trial.number, attempt=attempt, handle=stamped))
        self._watch(writer, writer.state.trials[trial.number], is_new=is_new)

    def _job(self, writer: RunWriter, trial: Trial, attempt: int) -> Job:
        folder = writer.trial_folder(trial.number).absolute()
        runs_on = self.launcher.poll_interval_s > 0  # else a job has ended once it is submitted, and cannot write later
        return Job(
            run_id=self.spec.run_id,
            trial=trial.number,
            attempt=attempt,
            trial_dir=attempt_folder(folder, attempt) if runs_on else folder,
            payload=self.make_input(trial),
            timeout_s=self.spec.limits.trial_timeout_s,
        )


def find_disturbance(outcome: Outcome, effects: Collection[str]) -> str | None:
    """Return how other processes disturbed a measured run, which may violate the rules in `effects` for that reason.

    None if they did not, or if another rule is violated: the run would be excluded without the load too.
    """
    if outcome.provenance is not Provenance.MEASURED or outcome.admission is None or outcome.admission.admitted:
        return None
    violated = {verdict.rule: verdict.detail for verdict in outcome.admission.verdicts if verdict.ok is False}
    is_explained = violated.keys() <= {LOAD_RULE, CONSTRAINTS_RULE, EARLY_STOP_RULE, *effects}
    return violated.get(LOAD_RULE) if is_explained else None
