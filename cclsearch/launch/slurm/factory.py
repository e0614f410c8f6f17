"""The registered `slurm` launcher: reads a profile and picks jobs, or steps of a held allocation."""

from __future__ import annotations

from cclsearch.core.content import list_frameworks
from cclsearch.launch.profile import LAUNCHERS, Profile
from cclsearch.launch.slurm.allocation import AllocationLauncher
from cclsearch.launch.slurm.job_files import RunScript, classify_trial
from cclsearch.launch.slurm.launcher import SlurmLauncher
from cclsearch.launch.slurm.settings import DATA_SETTINGS, SlurmSettings
from cclsearch.space.framework import load_framework


@LAUNCHERS.register("slurm")
class SlurmLauncherFactory:
    """Chooses the launcher class by the profile's `in_allocation`."""

    data_settings = DATA_SETTINGS

    @classmethod
    def from_profile(cls, profile: Profile) -> SlurmLauncher:
        """Return the launcher; UserError if a field is wrong. Sends no command to the cluster yet."""
        settings = read_slurm_settings(profile)
        launcher = SlurmLauncher if settings.in_allocation is False else AllocationLauncher
        return launcher(
            settings,
            read_run_script(profile),
            classify=classify_trial,
            run_dir=profile.run_dir,
            ranks_per_node=profile.hardware.accelerators_per_node or 1,
        )


def read_slurm_settings(profile: Profile) -> SlurmSettings:
    """Return the Slurm fields of a profile; UserError if one of them is wrong."""
    return profile.read_settings(SlurmSettings)


def read_run_script(profile: Profile) -> RunScript:
    """Return the run script of the profile's framework; without a framework its path is None, enough for `check`."""
    if profile.framework is None:
        needs = tuple(need for name in list_frameworks() for need in load_framework(name).needs)
        return RunScript(None, "torchrun", profile.environment, needs=needs)
    framework = load_framework(profile.framework)
    add = framework.knob_environment
    return RunScript(framework.script_path, framework.runner, profile.environment, add, framework.needs)
