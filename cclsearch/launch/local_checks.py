"""Check whether this machine has everything that trials of a framework need."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from cclsearch.launch.base import Check
from cclsearch.space.framework import Framework

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
        text=True,
        timeout=60,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
    )
    ok = answer.returncode == 0
    detail = f"{package} {answer.stdout.strip()}" if ok else f"{package} is not installed for {python}"
    return Check.of(package, ok, detail.strip(), f"run `{shlex.quote(python)} -m pip install {package}`")
