"""Creates the run of a new search, once its launcher says that its jobs can start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cclsearch.launch.base import StartRefuser
from cclsearch.launch.profile import make_launcher
from cclsearch.run.folder import create_run
from cclsearch.run.spec import RunSpec


def start_run(spec: RunSpec, runs_folder: Path, *, extra_files: Mapping[str, str] | None = None) -> Path:
    """Create the run's folder with its frozen inputs; raises UserError, and creates nothing, if no job could start."""
    launcher = make_launcher(spec.profile, framework=spec.framework)
    if isinstance(launcher, StartRefuser):
        launcher.refuse_at_start()
    return create_run(spec, runs_folder, extra_files=extra_files)
