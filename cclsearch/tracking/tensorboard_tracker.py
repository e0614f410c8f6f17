"""`--log-to tensorboard[:FOLDER]`: scalars by trial, and a table of hyperparameters with a row per trial."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cclsearch.core.errors import UserError
from cclsearch.tracking.base import TRACKERS, TrackedSearch, TrackedTrial, Tracker, require_package

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

DEFAULT_FOLDER = "tensorboard"
EVENT_FILES = "events.out.tfevents.*"


@TRACKERS.register("tensorboard")
class TensorboardTracker(Tracker):
    """Writes into `FOLDER/RUN`, with a folder per trial below it."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._folder = folder
        self._search: TrackedSearch
        self._writer: SummaryWriter

    @classmethod
    def from_place(cls, place: str) -> TensorboardTracker:
        """Return a tracker for a folder; raises UserError if it is a file."""
        require_package("tensorboardX", "tensorboard")
        folder = Path(place or DEFAULT_FOLDER).expanduser().absolute()
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{str(folder)!r} is not a folder")
        return cls(folder)

    def begin(self, search: TrackedSearch) -> bool:
        """Open the folder of the search."""
        from tensorboardX import SummaryWriter

        self._search, self._folder = search, self._root / search.run_id
        is_known = any(self._folder.glob(EVENT_FILES))
        self._writer = SummaryWriter(str(self._folder))
        if not is_known:
            lines = [f"| {name} | {value} |" for name, value in search.tags.items()]
            self._writer.add_text("search", "\n".join(["| | |", "| --- | --- |", *lines]), 0)
        return is_known

    def log_trial(self, trial: TrackedTrial) -> None:
        """Write the trial as a point of the curves, and as a row of hyperparameters in a folder of its own."""
        from tensorboardX import SummaryWriter

        for name, value in trial.metrics.items():
            self._writer.add_scalar(f"trials/{name}", value, trial.number, walltime=trial.finished_s)
        if trial.best is not None:
            self._writer.add_scalar(f"best/{self._search.metric}", trial.best, trial.number, walltime=trial.finished_s)
        reason = trial.tags.get("reason")
        if reason:
            self._writer.add_text("reasons", f"{trial.tags['state']}: {reason}", trial.number)
        self._writer.flush()
        folder = self._folder / f"trial-{trial.number:04d}"
        for old in folder.glob(EVENT_FILES):
            old.unlink()
        params = {**trial.params, "state": trial.tags["state"], "proposer": trial.tags["proposer"]}
        with SummaryWriter(str(folder)) as writer:
            writer.add_hparams(params, {f"hparam/{name}": value for name, value in trial.metrics.items()}, name=".")

    def end(self, *, is_finished: bool, summary: str) -> None:
        """Write the summary and close the files."""
        self._writer.add_text("summary", summary, 1)
        self._writer.close()
