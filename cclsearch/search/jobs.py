"""Trials in flight: submitted, polled together, adopted after a kill, repeated where the configuration is innocent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cclsearch.core.errors import TrialError
from cclsearch.core.values import Failure, FailureKind, Provenance
from cclsearch.launch.base import Handle, Job, JobState, JobStatus, Launcher
from cclsearch.launch.contract import RESULT_FILE, TrialInput
from cclsearch.record.event import TrialFinished, TrialRepeated, TrialSubmitted, TrialSubmitting
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.spec import RunSpec, hash_file
from cclsearch.run.trial_folder import prepare_folder
from cclsearch.score.outcome import Outcome

LOAD_RULE = "load"
"""The admission rule that a disturbed trial fails; such a trial is run again."""
CANCELLED = "cancelled when the search was stopped"
"""Why a trial goes again after a stop; it is nobody's failure, and uses up no attempt."""

OVER = f"{FailureKind.ALLOCATION_ENDED}: "
"""How the reason begins for which a trial waits for the next allocation; it uses up no attempt either."""

EvaluateTrial = Callable[[Trial, TrialInput, RunWriter, Failure | None], Outcome]
"""Reads a landed trial's evidence and says what it is worth; the failure is the launcher's own reason, if any."""

MakeInput = Callable[[Trial], TrialInput]


class StopSignal:
    """A wish to stop, from a signal, a deadline or the search itself; the first reason stands."""

    def __init__(self, *, leave_jobs: bool = False) -> None:
        self.leave_jobs = leave_jobs
        """Let running jobs go on (resume adopts them) instead of cancelling them."""
        self._event = threading.Event()
        self._reason = ""

    def request(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, but wake when a stop is requested."""
        self._event.wait(seconds)

    def describe(self) -> str:
        jobs = "jobs that run go on" if self.leave_jobs else "running jobs were cancelled"
        return f"{self._reason or 'stopped'}; {jobs}, and `resume` goes on from here"


@dataclass(frozen=True)
class JobRunner:
    """All traffic between the ledger and one launcher."""

    spec: RunSpec
    launcher: Launcher
    evaluate: EvaluateTrial
    make_input: MakeInput
    now_s: Callable[[], float] = time.time

    def free_slots(self, writer: RunWriter) -> int:
        """How many more trials may be begun now."""
        return min(self.spec.limits.parallel, self.launcher.max_parallel) - writer.state.num_unfinished

    def in_flight(self, writer: RunWriter) -> list[Trial]:
        """Trials whose job the launcher has."""
        return [trial for trial in writer.state.unfinished if trial.handle is not None]

    def adopt(self, writer: RunWriter) -> None:
        """Find the jobs that a killed search left: between submit and record too. None is submitted twice."""
        lost = [t for t in writer.state.unfinished if t.handle is None and t.attempt > len(t.repeats)]
        if not lost:
            return
        found = {handle.job_name: handle for handle in self.launcher.find(self.spec.run_id)}
        for trial in lost:
            handle = found.get(self._job(writer, trial, trial.attempt).name)
            if handle is not None:
                self._record_submitted(writer, trial, handle)
            elif (writer.trial_folder(trial.number) / RESULT_FILE).is_file():
                self._take(writer, trial, JobStatus(state=JobState.DONE))

    def start_waiting(self, writer: RunWriter) -> None:
        """Submit every proposed trial that has no job, together."""
        waiting = [trial for trial in writer.state.unfinished if trial.handle is None]
        if not waiting:
            return
        jobs = []
        for trial in waiting:
            attempt = len(trial.repeats) + 1
            job = self._job(writer, trial, attempt)
            prepare_folder(job, self.launcher.render(job))
            writer.record(TrialSubmitting(time_s=self.now_s(), trial=trial.number, attempt=attempt))
            jobs.append(job)
        self._submit(writer, waiting, jobs)

    def _submit(self, writer: RunWriter, trials: list[Trial], jobs: list[Job]) -> None:
        try:
            handles = self.launcher.submit(jobs)
        except TrialError as error:
            for trial in trials:
                self._take(
                    writer, writer.state.trials[trial.number], JobStatus(state=JobState.DONE, failure=error.failure)
                )
            return
        for trial, handle in zip(trials, handles, strict=True):
            self._record_submitted(writer, writer.state.trials[trial.number], handle)

    def collect_finished(self, writer: RunWriter, stop: StopSignal) -> None:
        """Poll once, take in what is done; pauses where nothing was."""
        flying = self.in_flight(writer)
        statuses = self.launcher.poll([trial.handle for trial in flying if trial.handle])
        landed = 0
        for trial, status in zip(flying, statuses, strict=True):
            if status.state is JobState.DONE:
                self._take(writer, trial, status)
                landed += 1
        writer.lock.refresh()
        if not landed and flying:
            stop.wait(self.launcher.poll_interval_s)

    def shut_down(self, writer: RunWriter, stop: StopSignal) -> None:
        """Cancel every running job unless they are to be left; what finished in the meantime is kept either way."""
        flying = self.in_flight(writer)
        handles = [trial.handle for trial in flying if trial.handle]
        if handles and not stop.leave_jobs:
            statuses = self.launcher.poll(handles)
            self.launcher.cancel(handles)
            for trial, status in zip(flying, statuses, strict=True):
                if status.state is JobState.DONE:
                    self._take(writer, trial, status)
                else:
                    self._repeat(writer, trial, CANCELLED, None)
        self.launcher.close()

    def detach(self) -> None:
        """Let go of the launcher; jobs go on and are adopted at resume."""
        self.launcher.close()

    def _take(self, writer: RunWriter, trial: Trial, status: JobStatus) -> None:
        """A job is done: judge it, then record its end, or that it goes again."""
        if trial.handle is not None and self._lacks_result(writer, trial, status):
            writer.check_present()
            status = self.launcher.poll([trial.handle])[0]
            if status.state is not JobState.DONE:
                return
        failure = status.failure
        if failure and (_is_over(failure) or (failure.kind.is_infrastructure and self._may_repeat(trial))):
            self._repeat(writer, trial, f"{failure.kind}: {failure.message}", failure)
            return
        outcome = self.evaluate(trial, self.make_input(trial), writer, failure)
        if outcome.failure:
            writer.check_present()
        if outcome.failure and outcome.failure.kind.is_infrastructure and self._may_repeat(trial):
            self._repeat(writer, trial, f"{outcome.failure.kind}: {outcome.failure.message}", outcome.failure)
        elif (disturbance := self._disturbance(outcome)) and self._may_repeat(trial):
            self._repeat(writer, trial, disturbance, None)
        else:
            self._finish(writer, trial, outcome)

    def _lacks_result(self, writer: RunWriter, trial: Trial, status: JobStatus) -> bool:
        """Whether a job is said to be done with nothing to show: so it looks, too, while a file system is away."""
        return status.failure is not None or not (writer.trial_folder(trial.number) / RESULT_FILE).is_file()

    def _finish(self, writer: RunWriter, trial: Trial, outcome: Outcome) -> None:
        result = writer.trial_folder(trial.number) / RESULT_FILE
        writer.record(
            TrialFinished(
                time_s=self.now_s(),
                trial=trial.number,
                attempt=max(trial.attempt, 1),
                outcome=outcome,
                result_sha256=hash_file(result) if result.is_file() else None,
            )
        )

    def _may_repeat(self, trial: Trial) -> bool:
        counted = sum(reason != CANCELLED and not reason.startswith(OVER) for reason in trial.repeats)
        return counted + 1 < self.spec.limits.max_attempts

    def _disturbance(self, outcome: Outcome) -> str | None:
        """Why a sound run was disturbed by foreign load and nothing else; None where it was not."""
        if outcome.provenance is not Provenance.MEASURED or outcome.admission is None or outcome.admission.admitted:
            return None
        broken = [verdict for verdict in outcome.admission.verdicts if verdict.ok is False]
        return broken[0].detail if len(broken) == 1 and broken[0].rule == LOAD_RULE else None

    def _repeat(self, writer: RunWriter, trial: Trial, reason: str, failure: Failure | None) -> None:
        writer.record(
            TrialRepeated(
                time_s=self.now_s(), trial=trial.number, attempt=max(trial.attempt, 1), reason=reason, failure=failure
            )
        )

    def _record_submitted(self, writer: RunWriter, trial: Trial, handle: Handle) -> None:
        writer.record(
            TrialSubmitted(time_s=self.now_s(), trial=trial.number, attempt=max(trial.attempt, 1), handle=handle)
        )

    def _job(self, writer: RunWriter, trial: Trial, attempt: int) -> Job:
        return Job(
            run_id=self.spec.run_id,
            trial=trial.number,
            attempt=attempt,
            trial_dir=writer.trial_folder(trial.number).absolute(),
            payload=self.make_input(trial),
            timeout_s=self.spec.limits.trial_timeout_s,
        )


def _is_over(failure: Failure) -> bool:
    """Whether no trial can run any more in the allocation that is held."""
    return failure.kind is FailureKind.ALLOCATION_ENDED
