"""`--log-to wandb[:PROJECT]`: a group per search with a run per trial; offline unless WANDB_MODE=online."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

from cclsearch.core.errors import UserError
from cclsearch.core.offline import refuse_outside
from cclsearch.tracking.base import TRACKERS, TrackedSearch, TrackedTrial, Tracker, require_package

DEFAULT_PROJECT = "ccl-search"
SETTINGS: dict[str, Any] = {
    **{"console": "off", "silent": True, "disable_git": True, "disable_code": True, "disable_job_creation": True},
    **{"x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True, "x_save_requirements": False},
    "host": "",
}
"""Settings with which the run has only the ledger's facts, and nothing of this machine or its terminal."""
_PROJECT = re.compile(r"[A-Za-z0-9][\w.\- ]{0,100}")


@TRACKERS.register("wandb")
class WandbTracker(Tracker):
    """Writes `wandb/offline-run-...` folders in the current folder, which `wandb sync` sends when the user wants it."""

    def __init__(self, project: str, mode: str) -> None:
        self._project = project
        self._mode = mode
        self._search: TrackedSearch
        self._run: Any = None
        """W&B's run of the search."""

    @classmethod
    def from_place(cls, place: str) -> WandbTracker:
        """Return a tracker for a project; raises UserError for another name, or if `--offline` refuses WANDB_MODE."""
        require_package("wandb", "wandb")
        project = place or os.environ.get("WANDB_PROJECT", "") or DEFAULT_PROJECT
        if not _PROJECT.fullmatch(project):
            raise UserError(f"{project!r} cannot name a project: use letters, digits, '-', '_' and '.'")
        mode = "online" if os.environ.get("WANDB_MODE", "").lower() == "online" else "offline"
        if mode == "online":
            refuse_outside("Weights & Biases", "unset WANDB_MODE: runs are then written to `wandb/` only")
        return cls(project, mode)

    def begin(self, search: TrackedSearch) -> bool:
        """Open the run of the search; W&B joins it with an earlier part of the same id."""
        self._search = search
        self._run = self._open("search", search.run_id, dict(search.tags))
        return True

    def log_trial(self, trial: TrackedTrial) -> None:
        """Write the trial as a run of its own, and the curve of the best on the search's run."""
        name = f"{self._search.run_id}, trial {trial.number}"
        run = self._open("trial", name, {**trial.params, **{f"trial/{k}": v for k, v in trial.tags.items()}})
        run.log({**trial.metrics}, step=trial.number)
        run.finish(exit_code=0 if trial.value is not None else 1)
        if trial.best is not None:
            self._run.log({f"best/{self._search.metric}": trial.best, "trial": trial.number})

    def end(self, *, is_finished: bool, summary: str) -> None:
        """Write the summary, and end the process that the package started."""
        import wandb

        self._run.summary["result"] = summary
        self._run.finish(exit_code=0 if is_finished else 1)
        wandb.teardown()

    def _open(self, job_type: str, name: str, config: dict[str, Any]) -> Any:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings = wandb.Settings(**SETTINGS)
        return wandb.init(
            project=self._project,
            id=hashlib.sha256(f"{self._search.tags['created']} {name}".encode()).hexdigest()[:16],
            name=name[:120],
            group=self._search.run_id[:120],
            job_type=job_type,
            config=config,
            mode=self._mode,  # type: ignore[arg-type]
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
