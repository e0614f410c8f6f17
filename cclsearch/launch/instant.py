"""The `replay` and `simulate` launchers: trials from a recorded landscape or a simulated cluster; nothing runs."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import read_job_json
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Failure, FailureKind, Provenance, Stage
from cclsearch.launch.base import REFUSED, Check, Handle, InstantLauncher, Job, JobStatus, write_answer
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE
from cclsearch.launch.profile import LAUNCHERS, Profile
from cclsearch.recording.load import Recording, load_recording
from cclsearch.recording.table import RecordedRow, RowStatus
from cclsearch.space.table import Space
from cclsearch.stats.simulated import SimulatedCluster, SimulatedSettings, SimulatedTrial

RECORDED_FAILURES = {
    RowStatus.OOM: (FailureKind.OUT_OF_MEMORY, "recorded as out of memory"),
    RowStatus.FAILED: (FailureKind.CRASHED, 'the recording says only "failed": crashed or out of memory'),
}


@LAUNCHERS.register("replay")
class ReplayLauncher(InstantLauncher):
    """Answers trials from a recording; a run reads each row once, as reading it again would confirm nothing."""

    name = "replay"
    provenance = Provenance.RECORDED

    def __init__(self, recording: Recording, max_parallel: int = 64) -> None:
        self.recording = recording
        self.max_parallel = max_parallel
        self._readers: dict[Path, array[int]] = {}
        """Folder of a run's trials -> for each recorded row, the trial that read it; 0 for none."""

    @classmethod
    def from_profile(cls, profile: Profile) -> ReplayLauncher:
        """Return the launcher of the profile's `recording` folder; UserError if the folder has no recording."""
        folder = profile.settings.get("recording")
        if not isinstance(folder, str) or not folder:
            raise UserError(
                "the replay launcher needs a recording (`run --recording FOLDER`, or `recording:` in the profile): a"
                f" folder with card.yaml and trials.csv, but it is {folder!r}"
            )
        return cls(load_recording(Path(folder)))

    def render(self, job: Job) -> str:
        """Return a comment that takes the place of a job script."""
        source = one_line(redact(self.recording.card.source)) or "an unnamed source"
        return f"# nothing runs: the recorded row of {job.payload.config} is read ({source})\n"

    def check(self) -> list[Check]:
        """Return the size of the recording."""
        measured = sum(row.status is RowStatus.OK for row in self.recording.rows)
        detail = f"{self.recording.name}: {len(self.recording.rows)} recorded configurations, {measured} with a time"
        return [Check(name="recording", ok=True, detail=detail)]

    def _serve(self, job: Job, handle: Handle) -> Handle:
        """Refuses a row that another trial of the run has read."""
        row = self.recording.look_up(job.payload.config)
        taken = self._read_by(job)
        if row is None or taken is not None:
            what = "is not in the recording" if row is None else f"was read by trial {taken:04d}; each row is read once"
            return handle.model_copy(update={"details": {REFUSED: f"{job.payload.config} {what}"}})
        if not (job.trial_dir / RESULT_FILE).exists():
            self._write_row(job, row)
        return handle

    def _read_by(self, job: Job) -> int | None:
        """Return another trial of this run that has read the row, or None; read from disk, so it survives a kill."""
        runs = job.trial_dir.parent
        if runs not in self._readers:
            self._readers[runs] = self._find_readers(runs)
        row = self.recording.space.row(job.payload.config)
        if row is None:
            return None
        reader = self._readers[runs][row] = self._readers[runs][row] or job.trial
        return reader if reader != job.trial else None

    def _find_readers(self, runs: Path) -> array[int]:
        readers = array("i", [0]) * len(self.recording.rows)
        for path in sorted(runs.glob(f"*/{RESULT_FILE}")):
            config = _config_of(path.parent)
            row = None if config is None else self.recording.space.row(config)
            if row is not None and path.parent.name.isdecimal() and not readers[row]:
                readers[row] = int(path.parent.name)
        return readers

    def _write_row(self, job: Job, row: RecordedRow) -> None:
        failure = None
        if row.status in RECORDED_FAILURES:
            kind, message = RECORDED_FAILURES[row.status]
            failure = Failure(stage=Stage.RUN, kind=kind, message=message)
        card = self.recording.card
        loads = {"loads": row.loads} if row.loads and failure is None else {}
        extra = {"recording": self.recording.name, "source": redact(card.source), "licence": redact(card.licence)}
        write_answer(job, card, row.metrics, failure, recorded=True, **loads, extra=extra)


def _config_of(trial_dir: Path) -> Config | None:
    try:
        return Config(read_job_json(trial_dir / CONFIG_FILE)["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
