"""The `simulate` launcher: computes trials on a simulated cluster. Nothing runs; every result is marked `simulated`."""

from __future__ import annotations

import math

from cclsearch.card.model import Card
from cclsearch.core.values import Failure, FailureKind, Provenance, Stage
from cclsearch.launch.base import REFUSED, Check, Handle, InstantLauncher, Job, JobStatus, write_answer
from cclsearch.launch.profile import LAUNCHERS, Profile
from cclsearch.space.table import Space
from cclsearch.stats.simulated import SimulatedCluster, SimulatedSettings, SimulatedTrial

ACCIDENT = "accident"
"""Key of a handle's details: the kind of the infrastructure failure that ended the attempt."""


@LAUNCHERS.register("simulate")
class SimulateLauncher(InstantLauncher):
    """Answers trials with the closed forms of the card's task and the surprises of one simulated cluster."""

    name = "simulate"
    provenance = Provenance.SIMULATED

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

    def _serve(self, job: Job, handle: Handle) -> Handle:
        """Writes no result for an attempt that the infrastructure ends."""
        if self._cluster is None:
            raise ValueError("the simulate launcher was given no workload")
        cluster, config = self._cluster, job.payload.config
        row = cluster.space.row(config)
        if row is None:
            return handle.model_copy(update={"details": {REFUSED: f"{config} is not in the search space"}})
        trial = cluster.run(row, job.attempt)
        if trial.accident is not None:
            return handle.model_copy(update={"details": {ACCIDENT: trial.accident}})
        card, extra = cluster.card.for_trial(config), {"simulated": cluster.settings.describe()}
        write_answer(job, card, trial.metrics, _find_failure(trial, cluster), simulated=True, extra=extra)
        return handle

    def _status(self, handle: Handle) -> JobStatus:
        if ACCIDENT in handle.details:
            kind = FailureKind(handle.details[ACCIDENT])
            return JobStatus.failed(kind, "simulated: the infrastructure failed, not the configuration")
        return super()._status(handle)


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
