"""The Slurm fields of a profile, each checked before it reaches a script or a command line."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from cclsearch.core.values import Model
from cclsearch.launch.environment import ShellLine, check_line, check_word
from cclsearch.launch.slurm.commands import SLURM_WORDS

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")

OWNED_OPTIONS = frozenset(SLURM_WORDS["slurm_owned_options"])
"""Options of sbatch that the launcher sets itself, or that would stop it from tracking a job."""


def _as_text(value: Any) -> Any:
    """Return a bare YAML number as text (`mem: 0`, an account of digits)."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def read_minutes(value: Any) -> Any:
    """Return the minutes of a Slurm time: minutes, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` or `D-HH:MM:SS`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _TIME.fullmatch(str(value))
    if match is None:
        raise ValueError("must be minutes or a time such as 30, 02:00:00 or 1-12:00:00")
    days, parts = match["days"], [int(match[k]) for k in "abc" if match[k] is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return int(days or 0) * 1440 + hours * 60 + minutes + -(-seconds // 60)


Word = Annotated[str, AfterValidator(check_word), BeforeValidator(_as_text)]


class Container(Model):
    """Container of a trial's processes."""

    runtime: Literal["apptainer", "singularity", "shifter", "podman-hpc", "pyxis"]
    image: Word
    mounts: tuple[Word, ...] = ()
    """`SOURCE:TARGET`; trials, the run script's folder and `scratch` are always mounted at their own paths."""
    arguments: tuple[ShellLine, ...] = ()
    """Further arguments of the runtime (`--nv`)."""


# fmt: off
DATA_SETTINGS = frozenset((
    "partition", "account", "qos", "constraint", "reservation", "exclude", "nodelist", "time_limit", "gpus_per_node",
    "cpu_only", "gpu_request", "gpu_type", "whole_nodes", "exclusive", "cpus_per_task", "mem", "in_allocation",
    "max_jobs", "arrays", "max_array", "submit_pause_s", "poll_s", "queue_limit", "grace_s",
))
# fmt: on
"""Fields that ask for resources or set a pace: all others decide what runs, or where files go."""


class SlurmSettings(Model):
    """The Slurm fields of a profile. Times are minutes or Slurm's own notation."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    reservation: Word | None = None
    exclude: Word | None = None
    nodelist: Word | None = None
    time_limit: Annotated[int, BeforeValidator(read_minutes)] = Field(default=30, ge=1)
    """Maximum time that one job requests, in minutes; a trial with a shorter limit requests less."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """Accelerators to request per node. None: as many as a node has by the profile's or card's hardware."""
    cpu_only: bool = False
    """Request no accelerator: the ranks run on CPU cores."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """The sbatch option that requests accelerators."""
    gpu_type: Word | None = None
    """Type in the request (`a100` makes `--gpus-per-node=a100:4`)."""
    whole_nodes: bool = True
    """Request all accelerators of a node even if the ranks need fewer: other jobs there disturb the timing."""
    exclusive: bool = False
    """`--exclusive`."""
    cpus_per_task: int | None = Field(default=None, ge=1)
    """Cores of a node's one task (torchrun and all its ranks)."""
    mem: Word | None = None
    """Memory of a node (`120G`, `0` for all)."""
    modules: tuple[Word, ...] = ()
    setup: tuple[ShellLine, ...] = ()
    """Lines of shell that run before the trial, after the modules."""
    container: Container | None = None
    python: Word | None = None
    """Python with torch on the compute nodes (inside the container, if any). None: the one that runs the search, or
    `python3` in a container."""
    host_python: Word | None = None
    """Python 3.8 or newer that starts the trial on a compute node, outside any container; None: same as `python`."""
    options: dict[str, bool | int | str] = {}
    """Further options of sbatch: name without dashes -> value, or true."""
    srun_options: tuple[ShellLine, ...] = ()
    """Further arguments of srun, each one word (`--cpu-bind=cores`)."""
    in_allocation: bool | Word = False
    """Run trials as steps of an allocation that you hold: its number, or true for the one that this runs in."""
    # The step shares resources with the shell's own step.
    step_options: tuple[ShellLine, ...] = ("--overlap",)
    """Further arguments of srun inside a held allocation."""
    scratch: Word | None = None
    """Shared folder for traces, if the run folder's file system is too small or too slow."""
    max_jobs: int | None = Field(default=None, ge=1)
    """Maximum number of a search's jobs in the queue; None: as many as Slurm's limits allow, at most 64."""
    arrays: bool = True
    """Submit several trials of one shape as a job array."""
    max_array: int | None = Field(default=None, ge=2)
    """Maximum number of tasks in an array; None: by Slurm's MaxArraySize."""
    submit_pause_s: float = Field(default=0.0, ge=0)
    """Seconds between two submissions, for sites that require it."""
    poll_s: float = Field(default=10.0, gt=0)
    """Seconds between two queries of the scheduler; result files are checked at every poll."""
    queue_limit: Annotated[int | None, BeforeValidator(lambda v: v if v is None else read_minutes(v))] = None
    """Maximum time in the queue, in minutes; None: no limit."""
    grace_s: float = Field(default=30.0, ge=0)
    """Seconds that a result file may take to appear on a shared file system after its job has ended."""

    @field_validator("options")
    @classmethod
    def _options_pass(cls, options: dict[str, bool | int | str]) -> dict[str, bool | int | str]:
        for name, value in options.items():
            if not _OPTION.fullmatch(name):
                raise ValueError(
                    f"an option must be lower-case letters, digits and dashes, without leading dashes: {name!r}"
                )
            if name == "clusters":
                raise ValueError("clusters: a search uses one cluster; run it on a login node of that cluster")
            if name in OWNED_OPTIONS:
                raise ValueError(f"option {name!r} is set by the launcher itself")
            if value is False:
                raise ValueError(f"option {name!r} must be true or have a value; to turn it off, leave it out")
            if isinstance(value, str):
                check_line(value)
        return options

    @field_validator("srun_options", "step_options")
    @classmethod
    def _srun_options_are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not option.startswith("-"):
                raise ValueError(f"each must be one word that starts with a dash (`--cpu-bind=cores`): {option!r}")
        return options

    @model_validator(mode="after")
    def _fits_together(self) -> SlurmSettings:
        if self.cpu_only and self.gpus_per_node is not None:
            raise ValueError("cpu_only and gpus_per_node cannot be combined")
        return self

    def default_python(self) -> str:
        """Return the ranks' python: the profile's, else the search's own, or the container's."""
        return self.python or (sys.executable if self.container is None else "python3")

    def default_host_python(self) -> str:
        """Return the python that starts a trial on a compute node, outside any container."""
        return self.host_python or (self.default_python() if self.container is None else "python3")
