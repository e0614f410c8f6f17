"""What a local job inherits from this process, and the shell script that does the same as its start."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from cclsearch.core.redact import public_environment

_OURS = "CCL_"
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""A search that itself runs under torchrun must not pass its own rank to the jobs."""


def inherited_environment() -> dict[str, str]:
    """Return what a job on this machine inherits: no secrets, no rank, and no variables of an outer trial."""
    public = public_environment()
    return {k: v for k, v in public.items() if not k.startswith(_OURS) and k not in _NOT_INHERITED}


def render_script(environment: Mapping[str, str], command: Sequence[str], *, comment: str) -> str:
    """Return a shell script that sets these variables and runs that command."""
    lines = ["#!/bin/sh", f"# {comment}", "set -e"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])
