"""Commands as other users of this machine, for tests of folders that several people share; needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

GROUP = 61500
"""The group that the users of the tests share; ids need no entry in /etc/passwd."""
ROOT = Path(__file__).parent.parent
OPEN_HOME = """
kept=$(mktemp -d) && mount --bind "$1" "$kept" && mount -t tmpfs -o mode=755 none "$2" && mkdir -p "$1" &&
mount --bind "$kept" "$1" && umount "$kept" && rmdir "$kept" && shift 2 && umask "$1" && shift && exec "$@"
"""
"""In a mount namespace: a closed home directory holds only Python's folder, which all users may enter."""


def find_closed_home(program: Path) -> Path | None:
    """Return the folder above the program that others may not enter; None if they may run it."""
    return next((folder for folder in reversed(program.parents) if not folder.stat().st_mode & 0o001), None)


def command_as(user: int, umask: str, *command: str) -> list[str]:
    """Return the command as that user of the group, in a mount namespace of its own."""
    python = Path(sys.executable).resolve()
    identity = ["setpriv", "--reuid", str(user), "--regid", str(GROUP), "--clear-groups"]
    home = find_closed_home(python)
    if home is None:
        return [*identity, "sh", "-c", 'umask "$1" && shift && exec "$@"', "sh", umask, *command]
    return [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        OPEN_HOME,
        "sh",
        str(python.parents[1]),
        str(home),
        umask,
        *identity,
        *command,
    ]


def start_as(user: int, umask: str, *command: str, folder: Path) -> subprocess.Popen[str]:
    """Start a Python command as that user in that folder."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}
    return subprocess.Popen(
        command_as(user, umask, sys.executable, *command),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_as(user: int, umask: str, *command: str, folder: Path) -> tuple[int, str, str]:
    """Run a command of `ccl-search` as that user; returns exit code, output and errors."""
    process = start_as(user, umask, "-m", "cclsearch", *command, folder=folder)
    out, error = process.communicate(timeout=180)
    return process.returncode, out, error


def find_problem() -> str | None:
    """Return why no command can run as another user here, or None."""
    if os.geteuid() != 0:
        return "only root can run commands as other users"
    if not all(shutil.which(name) for name in ("setpriv", "unshare", "mount")):
        return "setpriv, unshare or mount is not installed"
    tried = subprocess.run(command_as(GROUP, "022", sys.executable, "-c", ""), capture_output=True, check=False)
    return f"no command can run as another user: {tried.stderr.decode()}" if tried.returncode else None
