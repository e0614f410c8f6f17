"""The `simulate` launcher: computes trials on a simulated cluster. Nothing runs; every result is marked `simulated`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cclsearch.card.model import Card
from cclsearch.core.values import Failure, FailureKind, Provenance, Stage
from cclsearch.launch.base import Check, Handle, Job, JobState, JobStatus, write_model
from cclsearch.launch.contract import RESULT_FILE, RunStatus, TrialResult, make_result
from cclsearch.launch.profile import LAUNCHERS, Profile
from cclsearch.space.table import Space
from cclsearch.stats.simulated import SimulatedCluster, SimulatedSettings, SimulatedTrial

ACCIDENT = "accident"
"""Key of a handle's details: the kind of the infrastructure failure that ended the attempt."""
REFUSED = "refused"
"""Key of a handle's details: why nothing was computed."""


@LAUNCHERS.register("simulate")
class SimulateLauncher:
    """Answers trials with the closed forms of the card's task and the surprises of one simulated cluster."""

    name = "simulate"
    provenance = Provenance.SIMULATED
    runs_scripts = False
    poll_interval_s = 0.0

    def __init__(self, settings: SimulatedSettings, max_parallel: int = 64) -> None:
        self.settings = settings
        self.max_parallel = max_parallel
        self._cluster: SimulatedCluster | None = None

    @classmethod
    def from_profile(cls, profile: Profile) -> SimulateLauncher:
        """Return the launcher of the cluster that the profile's fields describe; UserError if one is wrong."""
        return cls(profile.read_settings(SimulatedSettings))

    def use_workload(self, card: Card, space: Space) -> None:
        """Simulate this workload; UserError if its task predicts nothing."""
        self._cluster = SimulatedCluster.of(self.settings, card, space)

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Write each job's `result.json` at once, except for attempts that the infrastructure ends."""
        return [self._serve(job) for job in jobs]

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        """Return done for all: a computation takes no time."""
        return [_status_of(handle) for handle in handles]

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Does nothing: no job runs."""

    def find(self, run_id: str) -> list[Handle]:
        """Return nothing: no job outlives the search, and answers are in the trial folders."""
        return []

    def render(self, job: Job) -> str:
        """Return a comment that takes the place of a job script."""
        return f"# nothing runs: {job.payload.config} is simulated ({self.settings.describe()})\n"

    def check(self) -> list[Check]:
        """Return a description of the simulation: nothing can fail."""
        given = self.settings.model_dump().items()
        chosen = ", ".join(
            f"{name} {value if isinstance(value, str) else f'{value:g}'}" for name, value in given if value != ""
        )
        detail = (
            f"nothing runs: closed forms with drawn surprises, noise and failures ({chosen}); no figure is measured"
        )
        return [Check(name="simulated cluster", ok=True, detail=detail)]

    def close(self) -> None:
        """Does nothing: no connection is open."""

    def _serve(self, job: Job) -> Handle:
        handle = Handle(launcher=self.name, job_name=job.name, job_id=job.name, trial_dir=job.trial_dir)
        if self._cluster is None:
            raise ValueError("the simulate launcher was given no workload")
        config = job.payload.config
        row = self._cluster.space.row(config)
        if row is None:
            return handle.model_copy(update={"details": {REFUSED: f"{config} is not in the search space"}})
        trial = self._cluster.run(row, job.attempt)
        if trial.accident is not None:
            return handle.model_copy(update={"details": {ACCIDENT: trial.accident}})
        write_model(job.trial_dir / RESULT_FILE, _make_result(self._cluster, job, trial))
        return handle


def _make_result(cluster: SimulatedCluster, job: Job, trial: SimulatedTrial) -> TrialResult:
    failure = _find_failure(trial, cluster)
    card = cluster.card.for_trial(job.payload.config)
    return make_result(
        card,
        trial.metrics,
        status=RunStatus.OK if failure is None else RunStatus.FAILED,
        failure=failure,
        world_size=job.payload.num_ranks,
        simulated=True,
        extra={"simulated": cluster.settings.describe()},
    )


def _find_failure(trial: SimulatedTrial, cluster: SimulatedCluster) -> Failure | None:
    memory = cluster.predictor.memory
    if trial.needed_gib is not None and memory is not None:
        usable = f"{math.exp(memory.log_limit):.1f} of {cluster.card.hardware.memory_gib:g} GiB"
        message = f"simulated: needs {trial.needed_gib:.1f} GiB of a device's memory, and a job can use {usable}"
        return Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message=message)
    if trial.crashed:
        message = "simulated: a crash that nothing predicts"
        return Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message=message)
    return None


def _status_of(handle: Handle) -> JobStatus:
    """The end of a job, from its handle: the same after a kill."""
    if ACCIDENT in handle.details:
        kind = FailureKind(handle.details[ACCIDENT])
        return JobStatus.failed(kind, "simulated: the infrastructure failed, not the configuration")
    if REFUSED in handle.details:
        return JobStatus.failed(FailureKind.LAUNCHER, handle.details[REFUSED], Stage.SUBMIT)
    if (handle.trial_dir / RESULT_FILE).exists():
        return JobStatus(state=JobState.DONE)
    return JobStatus.failed(FailureKind.LAUNCHER, "the trial was not simulated; submit it again", Stage.SUBMIT)
