"""Drop root's right to ignore file permissions, so that tests of permissions also work as root."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1 << 1, 1 << 2
"""Capabilities that bypass file permissions (capabilities(7))."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySet(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def enforced_permissions() -> Iterator[None]:
    """Enforce file permissions on this thread, also for root. No effect on programs that it starts."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(VERSION_3, 0), (_CapabilitySet * 2)()
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
