"""One search on disk with its frozen inputs: what reports, exports and comparisons read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.record.lock import is_locked
from cclsearch.record.state import RunState
from cclsearch.run.spec import RunSpec, read_spec


@dataclass(frozen=True)
class Run:
    """A search as its folder holds it."""

    folder: Path
    spec: RunSpec
    state: RunState
    is_running: bool
    """Whether a living process is writing it."""

    def trial_folder(self, number: int) -> Path:
        """`trials/0007`: the evidence of trial 7."""
        return self.folder / "trials" / f"{number:04d}"

    @property
    def standing(self) -> str:
        """`running`, `ended`, `stopped`, or `killed` (its writer is gone, and said nothing)."""
        if self.is_running:
            return "running"
        if self.state.ended:
            return "ended"
        return "stopped" if self.state.stopped else "killed"


def load_run(folder: Path) -> Run:
    """Read a run folder; raises UserError where it is none, or is damaged or of a newer version."""
    spec = read_spec(folder)
    ledger = folder / LEDGER_FILE
    state = fold_ledger(ledger) if ledger.exists() else RunState()
    return Run(folder, spec, state, is_locked(folder))
