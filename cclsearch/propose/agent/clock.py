"""Time as the agent sees it, so that a thousand turns of waiting take no time in a test."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that pass, and waiting for them."""

    def now_s(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The real one."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
