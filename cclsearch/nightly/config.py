"""Schema of `nightly.yaml`: the jobs of a night, its budget, its start and deadline, and the evidence to keep."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from cclsearch.card.load import inspect_card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Amount, Model, TrialCount, Whole
from cclsearch.core.yaml_file import read_yaml, validate_mapping
from cclsearch.propose.agent.providers.types import Effort
from cclsearch.scoring.objective import default_spec
from cclsearch.space.parse import parse_knobs

_FORM = re.compile(r"^([01]?\d|2[0-3]):([0-5]\d)\s+(\S+)$")


@dataclass(frozen=True)
class Moment:
    """A daily time, such as `06:00 Europe/Paris`."""

    hour: int
    minute: int
    zone: str

    def __str__(self) -> str:
        return f"{self.hour:02d}:{self.minute:02d} {self.zone}"

    def next_after(self, now_s: float) -> float:
        """Next occurrence strictly after `now_s`, in seconds since the epoch.

        Follows the zone's clock changes: on a day that skips this time, the moment is later by the size of the jump; on
        a day that has it twice, the first one counts.
        """
        zone = ZoneInfo(self.zone)
        today = datetime.fromtimestamp(now_s, zone).date()
        for days in (-1, 0, 1, 2):
            day = today + timedelta(days=days)
            there = datetime(day.year, day.month, day.day, self.hour, self.minute, tzinfo=zone)
            moment_s = there.astimezone(UTC).timestamp()
            if moment_s > now_s:
                return moment_s
        raise AssertionError("a day has this moment within two days")


def parse_moment(text: str) -> Moment:
    """Parse `HH:MM ZONE`; raises ValueError with the expected form."""
    match = _FORM.match(text.strip())
    if match is None:
        raise ValueError("must be a time of day and a time zone, such as `06:00 Europe/Paris`")
    hour, minute, zone = match.groups()
    try:
        ZoneInfo(zone)
    except (OSError, ValueError, KeyError):
        raise ValueError(f"no time zone {zone!r}: give one such as `Europe/Paris` or `UTC`") from None
    return Moment(int(hour), int(minute), zone)


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,19}")
SLURM_WORD = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_.,:@/+=%-]*")
SCRON_OWN = frozenset({"job-name", "time", "partition", "account", "qos"})
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MIN_REST_S = 600.0
"""Minimum time between a night's deadline and the next start."""
# The clocks of two zones may change on different days.
SEASONS_S = (1767225600.0, 1782864000.0)
"""A moment in winter and one in summer."""


def _check_moment(text: str) -> str:
    parse_moment(text)
    return text


def check_slurm_word(value: object) -> object:
    """Check one word of a `#SCRON` line; a bare number from a YAML file becomes text."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and not SLURM_WORD.fullmatch(text):
        raise ValueError(
            "must be one word of letters, digits and _ . , : @ / + = % -; the first a letter, digit or `/`"
        )
    return text


SlurmWord = Annotated[str, BeforeValidator(check_slurm_word)]
MomentText = Annotated[str, AfterValidator(_check_moment)]


class Fields(Model):
    """Base of the models of `nightly.yaml`: a number must be finite and not `yes` or `no`."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: object, info: ValidationInfo) -> object:
        is_flag = cls.model_fields[str(info.field_name)].annotation is bool
        if isinstance(value, bool) and not is_flag:
            raise ValueError("must not be `yes` or `no`, `true` or `false`")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("must be finite; leave it out for no limit")
        return value


class Budget(Fields):
    """Limits; None means no limit. A night's budget covers all of its searches, a job's budget its own search."""

    trials: TrialCount | None = None
    """Trials that count; confirmations and trials lost to the infrastructure come on top."""
    hours: Amount | None = None
    """Wall time, hours."""
    node_hours: Amount | None = None
    """Nodes times hours of every measured trial from submission to end, queue time included."""
    tokens: Whole | None = Field(default=None, ge=1)
    """Tokens of the LLM."""
    usd: Amount | None = None
    """Cost of the LLM, US dollars."""


class JobSettings(Fields):
    """Settings of one search, shared by jobs and the matrix."""

    framework: str | None = None
    sampler: str | None = None
    strategy: str | None = None
    llm: str | None = None
    llm_effort: Effort | None = None
    use_fewer: bool = False
    sets: tuple[str, ...] = ()
    """`FIELD=VALUE`, each replacing a field of the card."""
    overlays: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()
    """`NAME=A,B`: a knob that is added, or limited to these values."""
    constraints: tuple[str, ...] = ()
    """Constraints in addition to the objective's, such as `peak_memory_gib <= 70`."""
    baseline: str | None = None
    """A configuration to compare with, such as `tp=8,pp=1`; it runs first and outside the budget."""
    log_to: tuple[str, ...] = ()
    """Trackers that follow the search, such as `mlflow:mlruns`; none: the trackers of the project's settings."""
    seed: Whole = Field(default=0, lt=2**32)
    parallel: int = Field(default=1, ge=1)
    confirm: Whole | None = None
    """Finalists to run again; None means 2 if trials are measured."""
    timeout_min: Amount = 30.0
    keep_going: bool = False
    control_every: Whole = 0
    """Whether the search continues although several configurations in a row ended for the same reason."""
    priority: float = Field(default=1.0, gt=0)
    """Its share of the remaining budget, relative to the priorities of the other jobs; the highest runs first."""
    start_from: int = Field(default=3, ge=0)
    """Number of best configurations of earlier nights that run again first."""
    learn: bool = True
    """Whether trials of earlier nights serve as a warm start."""
    budget: Budget = Budget()


class NightlyJob(JobSettings):
    """One search that runs every night."""

    name: str = ""
    """Names the series that is compared, so it stays the same from night to night; generated if it is empty."""
    workload: str
    launcher: str | None = None
    recording: str | None = None
    objective: str | None = None
    """None: the default of the workload's task."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,35}", name):
            raise ValueError("must be up to 36 letters, digits, `_`, `.` and `-`, the first a letter or digit")
        return name

    @property
    def objective_name(self) -> str:
        """The objective, or the default of the workload's task; empty without either."""
        if self.objective is not None:
            return self.objective
        try:
            return default_spec(inspect_card(self.workload, self.overlays, self.sets).task)
        except UserError:
            return ""  # the job's own search says what is wrong with the card

    @property
    def key(self) -> str:
        """Its name, or one made of workload, launcher and objective; valid as a folder name."""
        if self.name:
            return self.name
        words = [Path(self.workload).stem, self.launcher or self.recording or "here", Path(self.objective_name).stem]
        text = re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(Path(word).name for word in words)).strip("-.")
        return text if len(text) <= 36 else f"{text[:29]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


class Matrix(JobSettings):
    """One job for every combination of workload, launcher and objective."""

    workloads: tuple[str, ...] = Field(min_length=1)
    launchers: tuple[str | None, ...] = Field(default=(None,), min_length=1)
    objectives: tuple[str | None, ...] = Field(default=(None,), min_length=1)

    def expand(self) -> list[NightlyJob]:
        """The jobs, ordered by workload."""
        shared = {name: getattr(self, name) for name in JobSettings.model_fields}
        combined = itertools.product(self.workloads, self.launchers, self.objectives)
        return [NightlyJob(workload=w, launcher=where, objective=o, **shared) for w, where, o in combined]


class Keep(Fields):
    """Limits on the evidence of earlier nights on disk. Ledgers and winners' evidence always stay."""

    nights: int | None = Field(default=30, ge=1)
    """Number of nights whose evidence is kept in full; None means all."""
    gib: float | None = Field(default=None, gt=0)
    """Maximum size of the evidence of all nights: the oldest is removed first; None means no limit."""


class Scrontab(Fields):
    """Slurm options of the job that runs a night's searches (not of their trials), if scrontab starts the nights."""

    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    hours: float | None = Field(default=None, gt=0, le=24 * 365)
    """Time limit; None means from `start` to `deadline`, plus the time for stopping."""
    options: dict[str, SlurmWord] = {}
    """Further options of sbatch: name without dashes -> value."""

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise ValueError(f"{name!r} is not a long option of sbatch without dashes, such as `constraint`")
            if name in SCRON_OWN:
                raise ValueError(f"{name!r} is set elsewhere: by another field of `scrontab`, or by `nightly install`")
        return options


class NightlyConfig(Fields):
    """A whole `nightly.yaml`."""

    version: int = Field(default=1, ge=1, le=1)
    name: str = "nightly"
    """Name of the series of nights, and first part of the names of their runs."""
    start: MomentText | None = None
    """Start of a night; used by `install` and by a process that runs every night."""
    deadline: MomentText | None = None
    """Time by which a night must have stopped."""
    budget: Budget = Budget()
    jobs: tuple[NightlyJob, ...] = ()
    matrix: Matrix | None = None
    keep: Keep = Keep()
    scrontab: Scrontab = Scrontab()
    """Settings of `install --scrontab`."""
    tolerance: float = Field(default=0.02, ge=0, lt=1)
    """Relative change below which a difference is ignored at any confidence."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence that a change requires."""
    webhook_env: str | None = None
    """Name of the environment variable that holds the webhook's URL; never the URL."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError("must be up to 20 letters, digits, `_` and `-`, the first a letter or digit")
        return name

    @field_validator("webhook_env")
    @classmethod
    def _check_variable(cls, name: str | None) -> str | None:
        if name is not None and not VARIABLE.fullmatch(name):
            raise ValueError("must be the name of an environment variable (the URL itself is a secret)")
        return name

    @model_validator(mode="after")
    def _check_jobs(self) -> NightlyConfig:
        keys = [job.key for job in self.all_jobs]
        if not keys:
            raise ValueError("give at least one job, in `jobs` or `matrix`")
        alike = [key.casefold() for key in keys]  # some file systems do not distinguish case in folder names
        twice = sorted(key for key in keys if alike.count(key.casefold()) > 1)
        if twice:
            raise ValueError(f"two jobs are called {twice[0]!r}: give each a `name` of its own")
        return self

    @model_validator(mode="after")
    def _check_times(self) -> NightlyConfig:
        if (start := self.start_moment) is None or (deadline := self.deadline_moment) is None:
            return self
        for season_s in SEASONS_S:
            start_s = start.next_after(season_s)
            if start.next_after(start_s) - deadline.next_after(start_s) < MIN_REST_S:
                raise ValueError(
                    f"the deadline {self.deadline!r} must be at least {MIN_REST_S / 60:g} minutes before the next start"
                    f" {self.start!r}, so that one night has stopped when the next begins"
                )
        return self

    @property
    def all_jobs(self) -> tuple[NightlyJob, ...]:
        """Jobs in file order within each priority, the highest priority first."""
        jobs = [*self.jobs, *(self.matrix.expand() if self.matrix else ())]
        return tuple(sorted(jobs, key=lambda job: -job.priority))

    @property
    def deadline_moment(self) -> Moment | None:
        return parse_moment(self.deadline) if self.deadline else None

    @property
    def start_moment(self) -> Moment | None:
        return parse_moment(self.start) if self.start else None

    @property
    def digest(self) -> str:
        """Hash of the configuration: equal if two nights have the same one."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def load_nightly(path: Path) -> NightlyConfig:
    """Read a nightly.yaml; raises UserError naming file and field."""
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}; give a nightly.yaml (docs/nightly.md of the repository)")
    return parse_nightly(read_yaml(path), str(path))


def parse_nightly(data: dict[str, Any], where: str) -> NightlyConfig:
    """Validate a nightly configuration; raises UserError that starts with `where` and names every wrong field."""
    config = validate_mapping(NightlyConfig, data, where)
    for job in config.all_jobs:
        try:
            parse_knobs(job.knobs)
        except UserError as error:
            raise UserError(f"{where}: job {job.key!r}: {error}") from None
    return config
