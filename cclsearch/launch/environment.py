"""The environment of a local job: this process's without secrets, then the profile's, the knobs', the trial's."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from cclsearch.core.redact import public_environment
from cclsearch.launch.contract import TrialInput, trial_environment
from cclsearch.space.framework import Framework

_OURS = "CCL_"
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""A search that itself runs under torchrun must not pass its own rank to the jobs."""


def added_environment(
    profile_environment: Mapping[str, str], framework: Framework, trial_dir: Path, payload: TrialInput
) -> dict[str, str]:
    """Return the variables that a job gets in addition to inherited ones; the trial's override the profile's."""
    knobs = framework.knob_environment(payload.config)
    return {**profile_environment, **knobs, **trial_environment(trial_dir, payload)}


def inherited_environment() -> dict[str, str]:
    """Return what a job on this machine inherits: no secrets, no rank, and no variables of an outer trial."""
    public = public_environment()
    return {k: v for k, v in public.items() if not k.startswith(_OURS) and k not in _NOT_INHERITED}


def run_command(framework: Framework, *, python: str, num_processes: int, fork: bool = False) -> list[str]:
    """Return the command that runs the framework's script on one node; UserError if the framework has no script.

    With `fork`, the script is started without a rank and forks its ranks itself instead of torchrun.
    """
    script = str(framework.script_path)
    if framework.runner == "process" or fork:
        return [python, script]
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [python, *runner, script]


def render_script(environment: Mapping[str, str], command: Sequence[str], *, comment: str) -> str:
    """Return a shell script that sets these variables and runs that command."""
    lines = ["#!/bin/sh", f"# {comment}", "set -e"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])
