"""The folder of all runs, and the lookup of a run by name."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError
from cclsearch.core.settings import load_settings
from cclsearch.core.text import guess_name
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.run.spec import SPEC_FILE

LAST = "last"
"""Accepted in place of a run's name: the run that was written to most recently."""


def runs_folder(chosen: Path | None = None) -> Path:
    """Return the folder of runs: the chosen one, else the project's; UserError if a ledger could not hold its path."""
    folder = chosen if chosen is not None else project_root() / load_settings().runs
    if b"?" in str(folder.absolute()).replace("?", "").encode(errors="replace"):
        raise UserError(
            f"the folder of runs, {str(folder.absolute())!r}, must be UTF-8 text: rename it, or give --runs"
        )
    return folder


def find_run(name: str, chosen: Path | None = None) -> Path:
    """Return the folder of a run, given its name or its path; raises UserError that lists the latest runs."""
    if name == LAST:
        runs = list_runs(chosen)
        if runs:
            return runs[-1]
    for folder in (Path(name).expanduser(), runs_folder(chosen) / name):
        if os.path.lexists(folder / SPEC_FILE):
            return folder.absolute()
    names, where = [folder.name for folder in list_runs(chosen)], repr(str(runs_folder(chosen)))
    if names:
        missing = f"there is no run {name!r} in {where}{guess_name(name, names)}"
        raise UserError(f"{missing}; the latest runs are: {', '.join(names[-5:])}")
    raise UserError(f"there are no runs in {where} yet; start one with `ccl-search run --workload wl2 --budget 15`")


def name_run(folder: Path, chosen: Path | None = None) -> str:
    """Return the name of a run for the command line: short in the project's runs folder, else a quoted path."""
    known = chosen is None and folder.parent.absolute() == runs_folder().absolute()
    return folder.name if known else shlex.quote(str(folder))


def list_runs(chosen: Path | None = None) -> list[Path]:
    """Return the folders of all runs, the latest last."""
    folder = runs_folder(chosen)
    found = [path.parent for path in folder.glob(f"*/{SPEC_FILE}")]
    return sorted(found, key=lambda run: (run / LEDGER_FILE).stat().st_mtime if (run / LEDGER_FILE).exists() else 0)
