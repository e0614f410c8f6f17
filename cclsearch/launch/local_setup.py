"""The local launcher's own fields of a profile, and checks whether this machine has what its trials need."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from cclsearch.core.values import Model
from cclsearch.launch.base import Check
from cclsearch.launch.environment import PassedName
from cclsearch.space.framework import Framework


class LocalSettings(Model):
    """The `local` launcher's own fields of a profile."""

    python: str | None = None
    """Interpreter of the run scripts; None: the one that runs the search."""
    # Forked ranks share one import of torch.
    fork_ranks: bool = True
    """Let a script that supports it fork its own ranks instead of torchrun."""
    max_parallel: int = Field(default=1, ge=1)
    """Trials at a time: several disturb each other's timing unless they share no resources."""
    poll_interval_s: float = Field(default=0.1, gt=0)
    network_namespaces: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,60}$")], ...] = ()
    """Namespaces (`ip netns`), each used as a node with `accelerators_per_node` ranks; needs root."""
    namespaces_per_node: int = Field(default=1, ge=1)
    """Namespaces that are one node together, in the order above: as many as its ranks if each is one device."""
    pass_environment: tuple[PassedName, ...] = ()
    """Variables, or PREFIX_*, that jobs inherit besides those of `inherited.yaml`; a secret only by its exact name."""


_FIND_PACKAGE = """\
import sys
from importlib import metadata, util

try:
    print(metadata.version(sys.argv[1]))
except metadata.PackageNotFoundError:  # a source folder on PYTHONPATH has no version
    sys.exit(util.find_spec(sys.argv[1]) is None)
"""


def check_framework(framework: Framework, python: str, variables: Mapping[str, str]) -> Iterator[Check]:
    """Check the run script, its package in that interpreter, and the variables that its trials need.

    `variables` is the environment of its jobs.
    """
    yield Check.of("run script", True, str(framework.script_path))
    interpreter = shutil.which(python)
    if interpreter is not None and framework.package:
        yield _check_package(framework.package, interpreter, variables)
    for need in framework.needs:
        value = variables.get(need.env)
        ok = need.is_met(value)
        yield Check.of(need.env, ok, need.describe(value, is_met=ok), need.remedy)


def _check_package(package: str, python: str, variables: Mapping[str, str]) -> Check:
    """Find a package without importing it: an import takes seconds, and a broken build may end the process."""
    answer = subprocess.run(
        [python, "-c", _FIND_PACKAGE, package],
        capture_output=True,
        errors="replace",
        timeout=60,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
    )
    ok = answer.returncode == 0
    detail = f"{package} {answer.stdout.strip()}" if ok else f"{package} is not installed for {python}"
    return Check.of(package, ok, detail.strip(), f"run `{shlex.quote(python)} -m pip install {package}`")
