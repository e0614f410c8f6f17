"""Unique names and labels of a run's cloud resources and folders on workers, and the cloud location they are in."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from cclsearch.core.values import Model
from cclsearch.launch.base import write_model
from cclsearch.launch.ownership import RunPlace
from cclsearch.launch.tpu_vm.gcloud import Gcloud
from cclsearch.launch.tpu_vm.settings import TpuSettings

TOKEN_FILE = "tpu-identity.json"
_TOKEN_BYTES = 5
_STEM_LENGTH = 36


class RunToken(Model):
    """`tpu-identity.json` of a run: written once, before anything is created in the cloud or on workers.

    It distinguishes the run from another one of the same name.
    """

    token: str
    place: RunPlace | None = None


class CloudLocation(Model):
    """Project and zone of a resource, recorded because gcloud's defaults may change."""

    project: str | None = None
    zone: str | None = None


def read_token(run_dir: Path | None) -> str | None:
    """Return the run's token; None before it is made, when the run has no resource."""
    # A copy of a run gets its own: the original's resources and processes are not the copy's.
    record = RunToken.read(run_dir / TOKEN_FILE) if run_dir is not None else None
    is_foreign = record is not None and record.place is not None and run_dir and not record.place.is_of(run_dir)
    return record.token if record is not None and not is_foreign else None


def make_token(run_dir: Path | None) -> str:
    """Return the run's token, made at the first call; empty without a run."""
    if run_dir is None:
        return ""
    token = read_token(run_dir)
    if token is None:
        token = secrets.token_hex(_TOKEN_BYTES)
        write_model(run_dir / TOKEN_FILE, RunToken(token=token, place=RunPlace.of(run_dir)))
    return token


def make_label(run_id: str, token: str) -> str:
    """Return the run's label: lower-case letters, digits and dashes, at most 51 (a label may have 63)."""
    stem = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:_STEM_LENGTH]
    return f"ccl-{stem}-{token}"


def name_resource(run_id: str, token: str, generation: int) -> str:
    """Return the name of a run's queued resource and of its TPU VM: valid in the cloud and unique to the run."""
    return f"{make_label(run_id, token)}-g{generation}"


def has_label_name(label: str, name: str) -> bool:
    """Whether that is the name of a queued resource made from that label."""
    return re.fullmatch(re.escape(label) + r"-g\d+", name) is not None


def with_location(settings: TpuSettings, location: CloudLocation | None) -> TpuSettings:
    """Return the settings with the recorded project and zone; unchanged if none are recorded."""
    recorded = location.model_dump(include={"project", "zone"}, exclude_none=True) if location is not None else {}
    return settings.model_copy(update=recorded)


def resolve_project(settings: TpuSettings) -> TpuSettings:
    """Return the settings with a project, by default gcloud's; UserError if gcloud has none."""
    if settings.project is not None:
        return settings
    return settings.model_copy(update={"project": Gcloud(settings).find_default_project()})
