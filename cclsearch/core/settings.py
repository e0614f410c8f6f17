"""The project's defaults: `ccl-search.yaml` in its root."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from pydantic import Field, field_validator

from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError
from cclsearch.core.values import Model, TrialCount
from cclsearch.core.yaml_file import MAX_BYTES, parse_yaml_value, read_yaml, validate_mapping

SETTINGS_FILE = "ccl-search.yaml"


class Settings(Model):
    """Defaults of a project; options on the command line take precedence."""

    version: int = Field(default=1, ge=1, le=1)
    launcher: str | None = None
    """Profile in `launchers/` that `run` uses; None for this machine or the workload's recording."""
    llm: str | None = None
    """`anthropic:MODEL`, `openai:MODEL` or the URL of a compatible server; never a key."""
    objective: str | None = None
    """File in `objectives/`, or a metric; None for the default of the workload's task."""
    budget: TrialCount | None = None
    """Trials of a search if `--budget` is not given."""
    offline: bool = False
    """Refuse every connection to another machine, as `--offline` does."""
    log_to: tuple[str, ...] = ()
    """Trackers that searches write to, as `--log-to` names them; `--log-to` takes their place."""
    webhook_env: str | None = None
    """Environment variable with the URL that gets a message at the end of each search, as `--notify` names it."""
    trust_code: bool = False
    """Whether code of this folder may run, once the user confirmed it on this machine (`ccl-search trust`)."""
    runs: Path = Path("runs")
    """Folder of run folders, relative to the project's root unless absolute."""

    @field_validator("launcher", "llm", "objective")
    @classmethod
    def _check_not_empty(cls, text: str | None) -> str | None:
        if text is not None and not text.strip():
            raise ValueError("must not be empty")
        return text

    @field_validator("runs")
    @classmethod
    def _check_runs(cls, folder: Path) -> Path:
        if ".." in PurePath(folder).parts:
            raise ValueError("must not leave the project with '..'")
        return folder


def load_settings(root: Path | None = None) -> Settings:
    """The settings of the current project (or of `root`); defaults if it has no settings file.

    Raises UserError that names the file and every wrong field.
    """
    path = (root or project_root()) / SETTINGS_FILE
    if not path.is_file():
        if os.path.lexists(path):
            raise UserError(f"{str(path)!r} is not a regular file: restore or remove it")
        return Settings()
    if path.stat().st_size <= MAX_BYTES and _is_empty(path):
        return Settings()
    return validate_mapping(Settings, read_yaml(path), str(path))


def _is_empty(path: Path) -> bool:
    """Whether the file states nothing: `read_yaml` requires a mapping."""
    text = path.read_text("utf-8", "replace")
    return not text.strip() or parse_yaml_value(text, str(path)) is None
