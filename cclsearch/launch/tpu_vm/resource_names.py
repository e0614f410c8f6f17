"""What tells a run's things from those of another run of its name, in the cloud and on workers; and where they are."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from cclsearch.core.values import Model
from cclsearch.launch.tpu_vm.gcloud import Gcloud
from cclsearch.launch.tpu_vm.job import read_model, write_model
from cclsearch.launch.tpu_vm.settings import TpuSettings

TOKEN_FILE = "tpu-identity.json"
_TOKEN_BYTES = 5
_STEM_LENGTH = 36


class RunToken(Model):
    """`tpu-identity.json` of a run: made once, before anything of the run is made elsewhere."""

    token: str


class CloudLocation(Model):
    """Where in the cloud a thing is: gcloud's own defaults may be others tomorrow."""

    project: str | None = None
    zone: str | None = None


def read_token(run_dir: Path | None) -> str | None:
    """The run's token; None where none was made yet, so that nothing of the run can carry one."""
    record = read_model(run_dir / TOKEN_FILE, RunToken) if run_dir is not None else None
    return record.token if record is not None else None


def make_token(run_dir: Path | None) -> str:
    """The run's token, made at the first call; empty where there is no run."""
    if run_dir is None:
        return ""
    token = read_token(run_dir)
    if token is None:
        token = secrets.token_hex(_TOKEN_BYTES)
        write_model(run_dir / TOKEN_FILE, RunToken(token=token))
    return token


def make_label(run_id: str, token: str) -> str:
    """The run's label: lower-case letters, digits and dashes, at most 51 (a label may have 63)."""
    stem = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:_STEM_LENGTH]
    return f"ccl-{stem}-{token}"


def name_resource(run_id: str, token: str, generation: int) -> str:
    """The name of a run's queued resource and of its TPU VM: what the cloud allows, and no other run's."""
    return f"{make_label(run_id, token)}-g{generation}"


def has_label_name(label: str, name: str) -> bool:
    """Whether a queued resource has a name made of that label."""
    return re.fullmatch(re.escape(label) + r"-g\d+", name) is not None


def with_location(settings: TpuSettings, location: CloudLocation | None) -> TpuSettings:
    """The settings with the project and zone that were noted; as they are where none were."""
    noted = location.model_dump(include={"project", "zone"}, exclude_none=True) if location is not None else {}
    return settings.model_copy(update=noted)


def resolve_project(settings: TpuSettings) -> TpuSettings:
    """The settings with the project that gcloud would take now; UserError where it has none."""
    if settings.project is not None:
        return settings
    return settings.model_copy(update={"project": Gcloud(settings).find_default_project()})
