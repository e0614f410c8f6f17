"""Bounded reading of files that a job wrote or could write to: no call waits, and none reads more than its limit.

A path is opened without waiting (a FIFO without a writer would block for ever) and without following a link at its end
(a job in a container must not make the search read a file of the host); folders on the way may be links, as traces on
a scratch file system are. Only a regular file is read. Inside `only_inside`, which serves files to others, no folder on
the way may be a link either, and a file has one name: a second one may be of a file elsewhere.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, cast

from cclsearch.core.atomic_file import NEW_FILE_MODE

RESULT_BYTES = 64 * 2**20
"""Largest `result.json` and largest log of requests that are read."""
RECORD_BYTES = 2**20
"""Largest file of a few fields: a job's record, the failure of a rank, a job script."""
_INT64 = 2**63
_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    **dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "device"),
}
_served: ContextVar[Path | None] = ContextVar("served", default=None)
"""The folder below which `open_inside` follows no link."""


class JobFileError(ValueError):
    """Unusable content at a job's path; the message names the file and says why."""


@contextmanager
def only_inside(root: Path) -> Iterator[None]:
    """Meanwhile open nothing of `root` in this task and its threads through a link or by a second name."""
    token = _served.set(root)
    try:
        yield
    finally:
        _served.reset(token)


def open_inside(path: Path | str, flags: int) -> int:
    """Return `os.open`'s descriptor; below the root of `only_inside` each folder on the way is opened without links.

    It can be the `opener` of `open`. OSError as `os.open`; ELOOP for a link, or a file with a second name.
    """
    root, flags = _served.get(), flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if root is None or not Path(path).is_relative_to(root):
        return os.open(path, flags, NEW_FILE_MODE)
    *folders, name = Path(path).relative_to(root).parts or (".",)
    if ".." in (*folders, name):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    descriptor = os.open(root, _FOLDER)
    try:
        for part in folders:
            before, descriptor = descriptor, os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(before)
        file = os.open(name, flags | os.O_NOFOLLOW, NEW_FILE_MODE, dir_fd=descriptor)
    except OSError as error:
        if error.errno == errno.ENOTDIR:  # a link to a folder
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
        raise
    finally:
        os.close(descriptor)
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        os.close(file)
        raise OSError(errno.ELOOP, "it has a second name (a hard link)", str(path))
    return file


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_job_file(path: Path) -> BinaryIO:
    """The opened regular file; JobFileError if something else is there, OSError if it is missing or unreadable."""
    try:
        descriptor = open_inside(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a link; a socket; a device without a driver
            raise _refuse(path, os.lstat(path).st_mode) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _refuse(path, mode)
    return os.fdopen(descriptor, "rb")


def open_to_append(path: Path) -> BinaryIO:
    """The file, made if missing, to read and append to without waiting and without following a link; else OSError."""
    descriptor = open_inside(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    return cast(BinaryIO, open(descriptor, "ab+", buffering=0))


def has_job_file(path: Path) -> bool:
    """Whether anything is at the path, even if it cannot be read: a link to nothing, a FIFO."""
    return os.path.lexists(path)


def read_job_bytes(path: Path, limit_bytes: int = RECORD_BYTES) -> bytes:
    """The content of a file of at most `limit_bytes`; JobFileError if it is larger; otherwise as `open_job_file`."""
    with open_job_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit_bytes else file.read(limit_bytes + 1)
    if max(size, len(data)) > limit_bytes:
        raise JobFileError(f"{path.name} has {max(size, len(data)):,} bytes, more than the {limit_bytes:,} allowed")
    return data


def read_job_text(path: Path, limit_bytes: int = RECORD_BYTES) -> str:
    """The content as UTF-8, each invalid byte replaced; otherwise as `read_job_bytes`."""
    return read_job_bytes(path, limit_bytes).decode(errors="replace")


def read_job_json(path: Path, limit_bytes: int = RECORD_BYTES) -> Any:
    """The value of a JSON file; JobFileError if it is not JSON; otherwise as `read_job_bytes`."""
    data = read_job_bytes(path, limit_bytes)
    try:
        return parse_json(data)
    except JobFileError as error:
        raise JobFileError(f"{path.name} {error}") from None


def parse_json(data: bytes | str) -> Any:
    """The value of UTF-8 JSON from outside; JobFileError for any fault, such as too much depth.

    A whole number beyond 64 bits is a float, so that no later arithmetic grows without bound; one beyond a float is an
    error. `Infinity` and `NaN` are read, as Python writes them.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(text, parse_int=_parse_int)
        if "\\ud" in text.lower():  # half of a surrogate pair can be parsed, but not written again
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise JobFileError("is not JSON: it is nested too deeply") from None
    except (ValueError, OverflowError) as error:
        raise JobFileError(f"is not JSON: {error}") from None


def read_tail(path: Path, limit_bytes: int) -> str:
    """The last part of a text file; empty if it cannot be read."""
    try:
        with open_job_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit_bytes))
            return file.read(limit_bytes).decode(errors="replace")
    except (OSError, JobFileError):
        return ""


def hash_job_file(path: Path, limit_bytes: int = RESULT_BYTES) -> str | None:
    """SHA-256 of the file, in hex; None if it is missing, too large or not a regular file.

    Raises OSError if it cannot be read now: a caller must not take it for missing.
    """
    try:
        return hashlib.sha256(read_job_bytes(path, limit_bytes)).hexdigest()
    except (FileNotFoundError, NotADirectoryError, JobFileError):
        return None


def _parse_int(text: str) -> int | float:
    value = int(text)
    return value if -_INT64 <= value < _INT64 else float(value)


def _refuse(path: Path, mode: int) -> JobFileError:
    if stat.S_ISREG(mode):
        return JobFileError(f"{path.name} is reached through a link, or has a second name (a hard link)")
    return JobFileError(f"{path.name} is a {_KINDS.get(stat.S_IFMT(mode), 'special file')}, not a regular file")
