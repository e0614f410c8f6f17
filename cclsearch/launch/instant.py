"""The base of launchers that answer a trial in this process, while it is submitted: no job outlives the search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cclsearch.card.model import Card
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.launch.base import Handle, Job, JobState, JobStatus, write_model
from cclsearch.launch.contract import RESULT_FILE, RunStatus, make_result

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
