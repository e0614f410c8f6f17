"""Profiles: YAML files in `launchers/` that say where and how jobs run; makes the launcher of a profile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import Field

from cclsearch.card.groups import HardwareGroup
from cclsearch.card.model import KnobDeclaration
from cclsearch.core.content import FRAMEWORK_SUFFIX, PROFILE_SUFFIXES, find_content, list_profiles, project_root
from cclsearch.core.errors import UserError
from cclsearch.core.registry import Registry, describe_broken_plugins
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.trust import require_trust
from cclsearch.core.values import Model, Value
from cclsearch.core.yaml_file import read_yaml, validate_mapping
from cclsearch.launch.base import Launcher
from cclsearch.launch.environment import check_environment
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.read import read_links
from cclsearch.space.framework import find_framework

LINKS_SUFFIX = ".links.csv"

M = TypeVar("M", bound=Model)


class HardwareOverride(Model):
    """The hardware fields that a profile overrides; None keeps the card's value."""

    accelerator: str | None = None
    num_accelerators: int | None = Field(default=None, ge=1)
    accelerators_per_node: int | None = Field(default=None, ge=1)
    memory_gib: float | None = Field(default=None, gt=0)
    peak_flops: float | None = Field(default=None, gt=0)
    """FLOP/s at the card's precision, for an accelerator that `hardware.yaml` does not have."""
    memory_gb_per_s: float | None = Field(default=None, gt=0)
    scale_up_domain: int | None = Field(default=None, ge=1)
    scale_up_gbps: float | None = Field(default=None, gt=0)
    scale_out_gbps: float | None = Field(default=None, gt=0)
    torus: tuple[int, ...] | None = None
    host_cores: int | None = Field(default=None, ge=1)
    groups: tuple[HardwareGroup, ...] | None = Field(default=None, min_length=1)
    """Unlike hardware in one job, in the order of the ranks."""
    links: LinkMatrix | None = Field(default=None, exclude=True)
    """The matrix of `NAME.links.csv`, which is beside the profile or in the project; searches freeze it in the card."""

    def overrides(self) -> dict[str, Any]:
        """Return the fields that the profile sets, for `Hardware.model_copy(update=...)`."""
        return self.model_dump(exclude_none=True) | ({} if self.links is None else {"links": self.links})


class Profile(Model):
    """One profile. `settings` has the launcher's own fields, which the launcher's own model checks."""

    name: str
    launcher: str
    """Name of a launcher: `local`, `slurm`, `tpu-vm`, `replay`, `simulate`, `in-process`, or a plugin's."""
    description: str = ""
    framework: str | None = None
    """Framework to use instead of the card's."""
    hardware: HardwareOverride = HardwareOverride()
    environment: dict[str, str] = {}
    """Environment variables of every job."""
    knobs: tuple[KnobDeclaration, ...] = ()
    """Knobs that this profile adds or limits."""
    allow_power_caps: bool = False
    """Whether trials may set the power limits and clocks of its devices (`power_cap_w`, `gpu_clock_mhz`)."""
    settings: dict[str, Any] = {}
    """All other top-level fields of the file."""
    source: Path | None = None
    """The file it was read from."""
    run_dir: Path | None = None
    """Folder of the run that uses it; set by the engine, not by the file."""

    def read_settings(self, model: type[M]) -> M:
        """Return the launcher's own fields, checked by its model; UserError names file and field."""
        return validate_mapping(model, self.settings, str(self.source or self.name))

    def require_framework(self) -> str:
        """Return the name of the framework whose run script the jobs run; ValueError if the engine set none."""
        if self.framework is None:
            raise ValueError(f"profile {self.name!r} reached its launcher without a framework")
        return self.framework


class LauncherFactory(Protocol):
    """A value of `LAUNCHERS`: a launcher's class, or a class that chooses between launchers."""

    def from_profile(self, profile: Profile) -> Launcher:
        """Return the launcher of a profile; UserError if one of its fields is wrong. It must not start anything."""


LAUNCHERS: Registry[LauncherFactory] = Registry(
    "launcher",
    {
        "in-process": "cclsearch.launch.in_process",
        "local": "cclsearch.launch.local",
        **dict.fromkeys(("replay", "simulate"), "cclsearch.launch.instant"),
        "slurm": "cclsearch.launch.slurm.allocation",
        "tpu-vm": "cclsearch.launch.tpu_vm.launcher",
    },
    needs=("from_profile",),
)
"""name -> class with `from_profile`; see `cclsearch.launch.base.Launcher`."""

_OWN_FIELDS = frozenset(Profile.model_fields) - {"name", "settings", "source", "run_dir"}


def load_profile(name: str) -> Profile:
    """Return the profile of that name (or path); UserError names file and field if it is malformed."""
    path = find_content("launchers", name, *PROFILE_SUFFIXES)
    if path.stem.endswith(FRAMEWORK_SUFFIX):
        raise UserError(
            f"{path.name} is a framework file, not a launcher profile; profiles: {', '.join(list_profiles())}"
        )
    profile = profile_from_mapping(read_yaml(path, as_written=True), name=path.stem, source=path)
    links = next((place for place in links_places(profile) if place.is_file()), None)
    if links is None:
        return profile
    return profile.model_copy(update={"hardware": profile.hardware.model_copy(update={"links": read_links(links)})})


def links_places(profile: Profile) -> tuple[Path, Path]:
    """Return where measured links of the profile may be: in the project's launchers/ (written there), and beside it."""
    beside = (profile.source or Path(profile.name)).with_name(f"{profile.name}{LINKS_SUFFIX}")
    return project_root() / "launchers" / beside.name, beside


def profile_from_mapping(data: object, *, name: str, source: Path | None = None) -> Profile:
    """Return the profile that a parsed YAML file describes; UserError names the wrong field."""
    where = source or Path(name)
    if not isinstance(data, Mapping):
        found = one_line(repr(data), 80)
        raise UserError(f"{where}: a profile must be a mapping with at least `launcher: NAME`, but this is {found}")
    own = {key: value for key, value in data.items() if key in _OWN_FIELDS and value is not None}
    own["settings"] = {str(key): value for key, value in data.items() if key not in _OWN_FIELDS}
    if isinstance(own.get("environment"), Mapping):
        own["environment"] = {str(key): _variable(value) for key, value in own["environment"].items()}
    profile = validate_mapping(Profile, {**own, "name": name, "source": source}, str(where))
    check_environment(profile.environment, where)
    if profile.launcher not in LAUNCHERS.names():
        known = LAUNCHERS.names()
        raise UserError(
            f"{where}: launcher must be one of {', '.join(known)}, not {profile.launcher!r}"
            f"{guess_name(profile.launcher, known)}{describe_broken_plugins()}"
        )
    return profile


def make_launcher(profile: Profile, *, framework: str | None = None, run_dir: Path | None = None) -> Launcher:
    """Return the launcher of a profile; `framework` is the card's, used if the profile names none.

    Raises UserError if the launcher's own fields are wrong, or if no job could ever run.
    """
    resolved = profile.model_copy(update={"framework": profile.framework or framework, "run_dir": run_dir})
    require_trusted_launch(resolved)
    return LAUNCHERS.get(profile.launcher).from_profile(resolved)


def require_trusted_launch(profile: Profile) -> None:
    """Raise UserError unless the package or a trusted project gives the command that the profile's jobs run.

    A profile of a run folder counts as its file's content now: a copied run brings no command of its own. The calling
    program made a profile without a file.
    """
    factory = LAUNCHERS.get(profile.launcher)
    if not getattr(factory, "runs_scripts", True):
        return
    framework = find_framework(profile.framework) if profile.framework else None
    if framework is not None:
        framework.require_trust()
    commands, source = list_commands(profile), profile.source
    if not commands or source is None:
        return
    fields = ", ".join(commands)
    if not source.is_file() and profile.name in list_profiles():  # the project was moved since
        source = find_content("launchers", profile.name, *PROFILE_SUFFIXES)
    real = require_trust(source, f"a launcher profile that says what runs ({fields}),")
    if commands != list_commands(load_profile(str(real))):
        if profile.run_dir is None:
            raise UserError(f"{str(source)!r} was changed since it was read: run the command again")
        raise UserError(
            f"{str(profile.run_dir)!r} says otherwise than {str(source)!r} what runs ({fields}), and what only a run"
            " folder says does not run: restore these fields of the profile, or start a new search with --learn-from"
        )


def list_commands(profile: Profile) -> dict[str, Any]:
    """Return the fields of a profile that decide what runs: all that its launcher does not declare to be data."""
    data: Collection[str] = getattr(LAUNCHERS.get(profile.launcher), "data_settings", frozenset())
    commands = {name: value for name, value in profile.settings.items() if name not in data}
    return commands | ({"environment": profile.environment} if profile.environment else {})


def _variable(value: Value | None) -> str:
    """Return a YAML scalar as the value of an environment variable: booleans as 1 and 0."""
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)
