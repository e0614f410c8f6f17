"""Identity of a file or folder: device, inode and birth time, as an inode is given out again once it is free."""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_HERE = -100
"""`AT_FDCWD`: a relative path is one of the working directory."""
_BIRTH, _MOUNT = 0x800, 0x1000
"""`STATX_BTIME` and `STATX_MNT_ID` of statx(2)."""
_FIELDS = struct.Struct("<I28xQ40xqI52xQ104x")
"""Mask, inode, seconds and nanoseconds of the birth, mount: their places in the 256 bytes of statx(2)."""


class FileIdentity(NamedTuple):
    """One file or folder, as long as it exists; JSON keeps it as a list."""

    device: int
    inode: int
    born_ns: int | None
    """None where the file system or Python cannot say."""


def identify(path: Path) -> tuple[FileIdentity, int | None]:
    """The identity of what is at the path, links followed, and the number of its mount if known; OSError if missing.

    A bind mount has the device of its source, but a mount number of its own.
    """
    found = os.stat(path)
    born_s, mount = getattr(found, "st_birthtime", None), None
    born_ns = None if born_s is None else int(born_s * 1e9)
    buffer = ctypes.create_string_buffer(_FIELDS.size)
    call = _find_statx()
    if call is not None and call(_HERE, os.fsencode(path), 0, _BIRTH | _MOUNT, buffer) == 0:
        mask, inode, seconds, nanoseconds, number = _FIELDS.unpack(buffer.raw)
        if inode == found.st_ino:
            born_ns = seconds * 10**9 + nanoseconds if mask & _BIRTH else None
            mount = number if mask & _MOUNT else None
    return FileIdentity(found.st_dev, found.st_ino, born_ns), mount


@cache
def _find_statx() -> Any:
    """`statx` of the C library; None without it (Linux before 4.11, macOS)."""
    try:
        return ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return None
