"""A moment in a record, from which later processes count seconds without trusting the wall clock."""

from __future__ import annotations

import time

from cclsearch.core.processes import boot_clock_s, boot_id
from cclsearch.core.values import Model


class BootMoment(Model):
    """A moment by both clocks: the boot clock counts on this machine until it restarts, and nothing sets it."""

    wall_s: float
    """Unix time."""
    boot_id: str
    boot_s: float
    """Seconds since that boot, suspension included."""

    @classmethod
    def now(cls) -> BootMoment:
        """Return this moment."""
        return cls(wall_s=time.time(), boot_id=boot_id(), boot_s=boot_clock_s())

    def elapsed_s(self) -> float:
        """Return the seconds since then: by the boot clock; after a restart or on another machine by the wall clock."""
        if self.boot_id and self.boot_id == boot_id():
            return max(0.0, boot_clock_s() - self.boot_s)
        return max(0.0, time.time() - self.wall_s)
