"""A locked file shows whether a process lives, across PID namespaces: the kernel frees the lock when it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cclsearch.core.atomic_file import NEW_FILE_MODE


def hold_file(path: Path) -> int | None:
    """Lock the file, made if missing, and return its descriptor; None if the file system has no such locks.

    Processes that inherit the descriptor hold the lock as well.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, NEW_FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_held(path: Path) -> bool | None:
    """Whether a process of this machine holds the file; None if the file system cannot say."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
