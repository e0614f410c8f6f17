"""Where a search comes from: the command line, and the commit of the folder of its run script."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from cclsearch.core.content import shipped_root
from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import public_environment
from cclsearch.core.text import one_line
from cclsearch.space.framework import load_framework

NAMES = ("ccl-search", "__main__.py")
"""Programs of ours: in a notebook or a user's program the command line says nothing about the search."""
GIT_TIMEOUT_S = 10.0
MAX_COMMAND = 2000


def find_command() -> str:
    """The command line of this process as one would type it; empty if another program called the search."""
    if not sys.argv or Path(sys.argv[0]).name not in NAMES:
        return ""
    return one_line(shlex.join(["ccl-search", *sys.argv[1:]]), MAX_COMMAND)


def find_commit(framework: str) -> str:
    """The git commit of the folder of the framework's run script, and whether files there differ from it.

    Empty for a script of the package itself, and for a folder that git does not know.
    """
    try:
        script = load_framework(framework).script_path.resolve()
    except UserError:
        return ""
    folder = script.parent
    if folder.is_relative_to(shipped_root().resolve() / "launchers"):
        return ""
    commit = _ask_git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    if _ask_git(folder, "ls-files", "--error-unmatch", "--", script.name) is None:
        return f"commit {commit}, which does not have {script.name}"
    changed = _ask_git(folder, "status", "--porcelain", "--", ".")
    state = "unknown whether files differ from it" if changed is None else "with changes" if changed else "no changes"
    return f"commit {commit}, {state}"


def _ask_git(folder: Path, *words: str) -> str | None:
    """What git says of a folder; None if it cannot. No program that the folder's own settings name is started."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
            env={**public_environment(), "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
