"""The TPU fields of a profile: which machines to use, how to reach them, and what to run there."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cclsearch.core.values import Model
from cclsearch.launch.environment import ShellLine, Word

_TARGET = re.compile(r"(?:(?P<user>[^@\s:]+)@)?(?P<host>[^@\s:]+|\[[0-9a-fA-F:]+\])(?::(?P<port>\d+))?")


def _check_option(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z]+=[^\x00-\x1f\x7f]*", value):
        raise ValueError("must be an option of ssh as NAME=VALUE (StrictHostKeyChecking=accept-new)")
    return value


def _check_folder(value: str) -> str:
    if not re.fullmatch(r"(?:~/)?[A-Za-z0-9_./][A-Za-z0-9_./-]*", value) or ".." in value.split("/"):
        raise ValueError("must be a path of letters, digits, '_', '.', '/' and '-', without '..'")
    return value.removeprefix("~/").rstrip("/")


def _check_id(value: str) -> str:
    if not re.fullmatch(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?", value):
        raise ValueError("must be at most 63 lower-case letters, digits and dashes, beginning with a letter")
    return value


def _read_target(value: Any) -> Any:
    """Return the parts of `user@host:port`; a mapping is returned unchanged."""
    if not isinstance(value, str):
        return value
    match = _TARGET.fullmatch(value)
    if match is None:
        raise ValueError("must be HOST, USER@HOST or USER@HOST:PORT, or a mapping with `host`")
    return {name: part for name, part in match.groupdict().items() if part is not None}


SshOption = Annotated[str, AfterValidator(_check_option)]
RemoteFolder = Annotated[str, AfterValidator(_check_folder)]
ResourceId = Annotated[str, AfterValidator(_check_id)]


class HostTarget(Model):
    """One worker, reached over plain SSH."""

    host: Word
    user: Word | None = None
    port: Annotated[int, BeforeValidator(lambda v: int(v) if isinstance(v, str) and v.isdigit() else v)] | None = None
    address: Word | None = None
    """Address for the other workers, if it is not `host`."""


class QueuedResource(Model):
    """The queued resource that a search requests from Cloud TPU once, and deletes at its end."""

    accelerator_type: Word
    """`v5litepod-16`, `v5p-8`, `v6e-8`."""
    runtime_version: Word
    tier: Literal["on-demand", "spot", "reserved"] = "on-demand"
    valid_until: Annotated[str, Field(pattern=r"^\d+[smhd]$")] | None = None
    """Maximum wait of the request, as in `--valid-until-duration` (`6h`); None: no limit."""
    network: Word | None = None
    subnetwork: Word | None = None
    service_account: Word | None = None
    internal_ips: bool = False
    labels: dict[str, str] = {}


# fmt: off
DATA_SETTINGS = frozenset((
    "tpu", "queued_resource", "project", "zone", "internal_ip", "keep_remote", "poll_s", "connect_timeout_s",
    "lost_after_s", "queue_limit_min", "delete_patience_s",
))
# fmt: on
"""Fields that name resources of Google Cloud or set a pace: all others decide what runs, and where."""


class TpuSettings(Model):
    """The TPU fields of a profile, with exactly one of `hosts`, `tpu` and `queued_resource`."""

    hosts: tuple[Annotated[HostTarget, BeforeValidator(_read_target)], ...] = ()
    """Workers in order; the first is the coordinator."""
    tpu: ResourceId | None = None
    """Name of an existing TPU VM."""
    queued_resource: QueuedResource | None = None
    project: Word | None = None
    zone: Word | None = None
    user: Word | None = None
    key_file: Word | None = None
    """Private key for ssh; None: chosen by ssh or gcloud."""
    ssh_options: tuple[SshOption, ...] = ()
    internal_ip: bool = False
    """`--internal-ip`: reach the workers inside the network."""
    gcloud: Word = "gcloud"
    python: Word = "python3"
    """Interpreter of the run script on the workers."""
    setup: tuple[ShellLine, ...] = ()
    """Lines of shell before the run script (`source ~/maxtext/venv/bin/activate`)."""
    remote_dir: RemoteFolder = ".ccl-search"
    """Folder on the workers, relative to the home folder unless it begins with a slash."""
    keep_remote: bool = False
    """Keep a finished trial's files on the workers."""
    poll_s: float | None = Field(default=None, gt=0)
    """Seconds between two polls; None: 2 over plain SSH, 10 through gcloud."""
    connect_timeout_s: int = Field(default=15, ge=1)
    lost_after_s: float = Field(default=60.0, ge=0)
    """Seconds that a worker may be unreachable before the trial is ended."""
    queue_limit_min: float | None = Field(default=None, gt=0)
    """Maximum wait for a queued resource, in minutes; None: no limit."""
    delete_patience_s: float = Field(default=900.0, gt=0)
    """Seconds that a deletion is retried before it is reported as failed."""

    @model_validator(mode="after")
    def _one_source(self) -> TpuSettings:
        if self.hosts and len({(h.host, h.port) for h in self.hosts}) < len(self.hosts):
            raise ValueError("each of hosts must be listed only once")
        return self

    @property
    def sources(self) -> list[str]:
        """Return the sources of workers, of three, that the profile sets."""
        given = {"hosts": self.hosts, "tpu": self.tpu, "queued_resource": self.queued_resource}
        return [name for name, value in given.items() if value]
