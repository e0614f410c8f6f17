"""Files that are there whole or not at all, whenever the program is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's text in one synced step: a reader sees the old or the new; an OSError leaves the old."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder in `folder` for what is moved out of it once it is whole; gone afterwards, come what may."""
    stage = Path(tempfile.mkdtemp(dir=folder, prefix=".partial-"))
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path of the same name to write to; what stands there takes the place of `path` at the end, unless it failed."""
    with staging_folder(path.parent) as stage:
        yield stage / path.name
        os.replace(stage / path.name, path)
