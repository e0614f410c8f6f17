"""Root without what lets it read and write everything, so that permissions can be tested as root too."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1 << 1, 1 << 2
"""Capabilities that pass over a file's permissions (capabilities(7))."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def permissions_hold() -> Iterator[None]:
    """Within it, this thread is refused what a file's permissions refuse. No effect on programs that it starts."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(VERSION_3, 0), (_Sets * 2)()
    if libc.capget(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capget")
    before = sets[0].effective
    sets[0].effective = before & ~(DAC_OVERRIDE | DAC_READ_SEARCH)
    if libc.capset(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capset")
    try:
        yield
    finally:
        sets[0].effective = before
        if libc.capset(ctypes.byref(header), sets):
            raise OSError(ctypes.get_errno(), "capset")
