"""The environment of a job, and types of profile fields that reach a script or a command line."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.names import is_secret_name
from cclsearch.core.yaml_file import read_yaml

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
SECRET_ADVICE = (
    "looks like a secret, and a job's environment is stored with its results;"
    " remove it, or read it from a file of yours in a line of `setup`"
    " (a `local` profile passes a variable of the search itself: `pass_environment`)"
)


def check_word(value: str) -> str:
    """Return the value if it is one word of a command line: no line break, no leading dash, not empty."""
    if not value.strip():
        raise ValueError("must not be empty")
    if CONTROL.search(value):
        raise ValueError("must not contain a line break or a control character")
    if value.startswith("-"):
        raise ValueError("must not start with a dash (it would be read as an option)")
    return value


def check_line(value: str) -> str:
    """Return the value if it is one line of shell."""
    if CONTROL.search(value.replace("\t", " ")):
        raise ValueError("must be one line without control characters")
    return value


def check_passed(pattern: str) -> str:
    """Return the name of a variable, or PREFIX_*, unless it is the engine's own."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", pattern):
        raise ValueError(f"{pattern!r} is not the name of a variable, or PREFIX_*")
    if pattern.startswith("CCL_"):
        raise ValueError(f"{pattern!r} begins with CCL_: these variables are ccl-search's own")
    return pattern


Word = Annotated[str, AfterValidator(check_word)]
ShellLine = Annotated[str, AfterValidator(check_line)]
PassedName = Annotated[str, AfterValidator(check_passed)]

_INHERITED_FILE = Path(__file__).with_name("inherited.yaml")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def inherited_environment(opted: Iterable[str] = ()) -> dict[str, str]:
    """Return the inherited variables of a job on this machine: those of `inherited.yaml`, and the profile's.

    `opted` are names or PREFIX_*; a secret is passed only if it is named exactly.
    """
    wanted, opted = _read_inherited(), tuple(opted)
    return {
        name: value
        for name, value in os.environ.items()
        if name in opted or (not is_secret_name(name) and (_matches(name, wanted) or _matches(name, opted)))
    }


def check_environment(environment: Mapping[str, str], where: object) -> None:
    """Raise UserError for a variable of a profile that is malformed or a secret: they are stored with every trial."""
    for name, value in environment.items():
        wrong = None
        if not _VARIABLE.fullmatch(name):
            wrong = f"{name!r} is not the name of a variable"
        elif is_secret_name(name):
            wrong = f"{name} {SECRET_ADVICE}"
        elif CONTROL.search(value):
            wrong = f"the value of {name} contains a line break or a control character"
        if wrong:
            raise UserError(f"{where}: environment: {wrong}")


def render_script(environment: Mapping[str, str], command: Sequence[str], *, comment: str) -> str:
    """Return a shell script that sets these variables and runs that command."""
    lines = ["#!/bin/sh", f"# {comment}", "set -e"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


@cache
def _read_inherited() -> tuple[str, ...]:
    groups = read_yaml(_INHERITED_FILE)
    return tuple(pattern for patterns in groups.values() for pattern in patterns)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name.startswith(p[:-1]) if p.endswith("*") else name == p for p in patterns)
