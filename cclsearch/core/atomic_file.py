"""Atomic writes: after a kill at any moment a file is complete or absent, never half-written."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The umask decides: 002 in a project that a group shares, 077 in a private one.
NEW_FILE_MODE = 0o666
"""Mode of new files before the user's umask."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file's content in one synced step: readers see the old or the new; after an OSError, the old."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE_MODE)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's list of files: without it, a power loss may take a file that was created or renamed and synced.

    A file system that cannot do it is left alone.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder in `folder` for files that are moved out of it once complete; it is always removed."""
    stage = Path(tempfile.mkdtemp(dir=folder, prefix=".partial-"))
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path of the same name; what was written there replaces `path` unless the block raised."""
    with staging_folder(path.parent) as stage:
        yield stage / path.name
        os.replace(stage / path.name, path)
    sync_folder(path.parent)
