"""A launcher for tests: the test decides how each submitted trial ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cclsearch.core.values import Failure, FailureKind, Provenance, Stage
from cclsearch.launch.base import Check, Handle, Job, JobState, JobStatus
from cclsearch.launch.contract import RESULT_FILE, RunStatus
from cclsearch.tasks.training.contract import TrainingResult

Ending = TrainingResult | Failure | None
"""A result file, the launcher's own failure, or None for a job that keeps running."""


def ran(job: Job, step_time_s: float = 1.0, **changes: object) -> TrainingResult:
    """Return a valid result of that job."""
    payload = job.payload
    fields = {
        "status": RunStatus.OK,
        "world_size": payload.num_ranks,
        "global_batch_size": payload.global_batch_size,
        "seq_len": payload.seq_len,
        "num_layers": payload.arch.num_layers,
        "step_times_s": (step_time_s,) * payload.timed_steps,
        "warmup_steps": payload.warmup_steps,
        "peak_memory_bytes": (2**28,) * payload.num_ranks,
        "devices": ("cpu",) * payload.num_ranks,
        "simulated": True,
    }
    return TrainingResult.model_validate({**fields, **changes})


def failed(kind: FailureKind) -> Failure:
    return Failure(stage=Stage.RUN, kind=kind, message=f"the test said {kind.value}")


class ScriptedLauncher:
    """Calls `decide(job)` for how a submitted job ends; records every submission and cancellation."""

    name = "scripted"
    provenance: Provenance = Provenance.SIMULATED
    max_parallel = 8
    poll_interval_s = 0.0

    def __init__(self, decide: Callable[[Job], Ending]) -> None:
        self.decide = decide
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self._endings: dict[str, Ending] = {}
        self.alive: dict[str, Handle] = {}
        self.looked = False

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        return [self._submit(job) for job in jobs]

    def _submit(self, job: Job) -> Handle:
        self.submitted.append(job.name)
        ending = self.decide(job)
        if isinstance(ending, TrainingResult):
            (job.trial_dir / RESULT_FILE).write_text(ending.model_dump_json())
        self._endings[job.name] = ending
        handle = Handle(launcher=self.name, job_name=job.name, job_id=job.name, trial_dir=job.trial_dir)
        self.alive[job.name] = handle
        return handle

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        return [self._status(self._endings.get(handle.job_id)) for handle in handles]

    def _status(self, ending: Ending) -> JobStatus:
        if ending is None:
            return JobStatus(state=JobState.RUNNING)
        return JobStatus(state=JobState.DONE, failure=ending if isinstance(ending, Failure) else None)

    def cancel(self, handles: Sequence[Handle]) -> None:
        self.cancelled += [handle.job_id for handle in handles]

    def find(self, run_id: str) -> list[Handle]:
        return list(self.alive.values())

    def render(self, job: Job) -> str:
        return f"# {job.name}\n"

    def check(self) -> list[Check]:
        return []

    def close(self) -> None:
        pass


class MeasuredLauncher(ScriptedLauncher):
    """Its figures count as measured."""

    provenance = Provenance.MEASURED


class FirstJobFinishesLast(ScriptedLauncher):
    """Reports the first job as running as long as another job runs."""

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        statuses = super().poll(handles)
        if len(handles) > 1:
            statuses[0] = JobStatus(state=JobState.RUNNING)
        return statuses
