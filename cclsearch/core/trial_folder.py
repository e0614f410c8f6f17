"""Where a run folder keeps the evidence of each trial."""

from __future__ import annotations

from pathlib import Path

TRIALS_FOLDER = "trials"


def trial_folder(run_dir: Path, number: int) -> Path:
    """`trials/0007` of the run folder: the evidence of trial 7."""
    return run_dir / TRIALS_FOLDER / f"{number:04d}"
