"""A Slurm profile's own fields, each checked before anything of it reaches a script or a command line."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from cclsearch.core.redact import is_secret_name
from cclsearch.core.values import Model

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")

OWNED_OPTIONS = frozenset(
    [
        "array",
        "begin",
        "chdir",
        "comment",
        "dependency",
        "error",
        "export",
        "export-file",
        "help",
        "hold",
        "input",
        "job-name",
        "no-requeue",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "open-mode",
        "output",
        "parsable",
        "quiet",
        "requeue",
        "signal",
        "test-only",
        "time",
        "version",
        "wait",
        "wrap",
    ]
)
"""Options of sbatch that the launcher sets itself, or that would break how it follows a job."""


def _check_word(value: str) -> str:
    """A word that stands on a line of its own: no line break, no leading dash, not empty."""
    if not value.strip():
        raise ValueError("must not be empty")
    if _CONTROL.search(value):
        raise ValueError("must not hold a line break or a control character")
    if value.startswith("-"):
        raise ValueError("must not start with a dash (it would be read as an option)")
    return value


def _as_text(value: Any) -> Any:
    """A bare number of a YAML file as text (`mem: 0`, an account of digits)."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_line(value: str) -> str:
    """One line of shell, as the user wrote it."""
    if _CONTROL.search(value.replace("\t", " ")):
        raise ValueError("must be one line without control characters")
    return value


def read_minutes(value: Any) -> Any:
    """Minutes of a Slurm time: a number of minutes, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM`, `D-HH:MM:SS`."""
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


Word = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_word)]
ShellLine = Annotated[str, AfterValidator(_check_line)]


class Container(Model):
    """The container that a trial's processes run in."""

    runtime: Literal["apptainer", "singularity", "shifter", "podman-hpc", "pyxis"]
    image: Word
    mounts: tuple[Word, ...] = ()
    """`SOURCE:TARGET`; trials, the run script's folder and `scratch` are always mounted at their own paths."""
    arguments: tuple[ShellLine, ...] = ()
    """Further words for the runtime, each one argument (`--nv`)."""


class SlurmSettings(Model):
    """How a cluster is used. Times are minutes or Slurm's own notation."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    reservation: Word | None = None
    exclude: Word | None = None
    nodelist: Word | None = None
    time_limit: Annotated[int, BeforeValidator(read_minutes)] = Field(default=30, ge=1)
    """Longest time one job may ask for, in minutes; a trial asks for less where its own limit is shorter."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """Accelerators to ask for on a node. None: as many as the hardware says that a node has."""
    cpu_only: bool = False
    """Ask for no accelerator: the ranks run on cores."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """By which option accelerators are asked for."""
    gpu_type: Word | None = None
    """Type in the request (`a100` makes `--gpus-per-node=a100:4`)."""
    whole_nodes: bool = True
    """Ask for all accelerators of a node even where the ranks need fewer: other jobs there disturb the timing."""
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
    """Python with torch on the compute nodes (in the container where there is one). None: the one that runs the search,
    `python3` in a container."""
    host_python: Word | None = None
    """Python 3.8 or newer that starts the trial on a compute node, outside any container; None: as `python`."""
    options: dict[str, bool | int | str] = {}
    """Further options of sbatch, passed through: name without dashes -> value, or true."""
    srun_options: tuple[ShellLine, ...] = ()
    """Further arguments of srun, each one word (`--cpu-bind=cores`)."""
    in_allocation: bool | Word = False
    """Run trials as steps of an allocation that is held already: its number, or true for the one this runs in."""
    step_options: tuple[ShellLine, ...] = ("--overlap",)
    """Further arguments of srun inside a held allocation: by default it shares with the step of a shell there."""
    scratch: Word | None = None
    """Shared folder for traces, where the run folder's own file system is too small or too slow."""
    max_jobs: int | None = Field(default=None, ge=1)
    """Most jobs of a search in the queue; None: what Slurm's own limits allow, at most 64."""
    arrays: bool = True
    """Submit several trials of one shape as a job array."""
    max_array: int | None = Field(default=None, ge=2)
    """Most tasks of an array; None: Slurm's MaxArraySize."""
    submit_pause_s: float = Field(default=0.0, ge=0)
    """Seconds between two submissions, where a site asks for it."""
    poll_s: float = Field(default=10.0, gt=0)
    """Seconds between two queries of the scheduler; results are looked for at every poll."""
    queue_limit: Annotated[int | None, BeforeValidator(lambda v: v if v is None else read_minutes(v))] = None
    """Longest time in the queue, in minutes; None waits for as long as it takes."""
    grace_s: float = Field(default=30.0, ge=0)
    """How long a result file may take to appear on a shared file system after its job has ended."""

    @field_validator("options")
    @classmethod
    def _options_pass(cls, options: dict[str, bool | int | str]) -> dict[str, bool | int | str]:
        for name, value in options.items():
            if not _OPTION.fullmatch(name):
                raise ValueError(f"an option is lower-case letters, digits and dashes without leading dashes: {name!r}")
            if name == "clusters":
                raise ValueError("clusters: jobs are followed on one cluster; run the search on that one's login node")
            if name in OWNED_OPTIONS:
                raise ValueError(f"option {name!r} is set by the launcher itself")
            if value is False:
                raise ValueError(f"option {name!r} is true or has a value; leave it out otherwise")
            if isinstance(value, str):
                _check_line(value)
        return options

    @field_validator("srun_options", "step_options")
    @classmethod
    def _srun_options_are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not option.startswith("-"):
                raise ValueError(f"each is one word that starts with a dash (`--cpu-bind=cores`): {option!r}")
        return options

    @model_validator(mode="after")
    def _fits_together(self) -> SlurmSettings:
        if self.cpu_only and self.gpus_per_node is not None:
            raise ValueError("cpu_only and gpus_per_node exclude each other")
        return self

    def default_python(self) -> str:
        """The ranks' python: the profile's, else the one that runs the search, else the container's own."""
        return self.python or (sys.executable if self.container is None else "python3")

    def default_host_python(self) -> str:
        """The python that starts a trial on a compute node, outside any container."""
        return self.host_python or (self.default_python() if self.container is None else "python3")

    @property
    def gpu_flag(self) -> str:
        """What to ask for by: nothing for a profile of cores."""
        return "none" if self.cpu_only else self.gpu_request


def check_environment(environment: dict[str, str]) -> str | None:
    """What is wrong with a profile's `environment`; None where nothing is. It is kept with every trial's evidence."""
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name):
            return f"{name!r} is not the name of a variable"
        if is_secret_name(name):
            return (
                f"{name} looks like a secret, and a job's environment is kept with its evidence; "
                "leave it out, or read it from a file of yours in a line of `setup`"
            )
        if _CONTROL.search(value):
            return f"the value of {name} holds a line break or a control character"
    return None
