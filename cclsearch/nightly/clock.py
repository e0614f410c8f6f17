"""Moments of a day in a time zone: when a night starts, and by when it must have stopped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

_FORM = re.compile(r"^([01]?\d|2[0-3]):([0-5]\d)\s+(\S+)$")


@dataclass(frozen=True)
class Moment:
    """A time of every day, `06:00 Europe/Paris`."""

    hour: int
    minute: int
    zone: str

    def __str__(self) -> str:
        return f"{self.hour:02d}:{self.minute:02d} {self.zone}"

    def next_after(self, now_s: float) -> float:
        """Seconds since the epoch of its next occurrence, strictly after `now_s`.

        The zone's own clock rules: on the day on which it skips this time the moment stands as much later as the clock
        jumps; on the day that has it twice, the first counts.
        """
        zone = ZoneInfo(self.zone)
        today = datetime.fromtimestamp(now_s, zone).date()
        for days in (-1, 0, 1, 2):
            day = today + timedelta(days=days)
            there = datetime(day.year, day.month, day.day, self.hour, self.minute, tzinfo=zone)
            moment_s = there.astimezone(UTC).timestamp()
            if moment_s > now_s:
                return moment_s
        raise AssertionError("a day has this moment within two days")


def parse_moment(text: str) -> Moment:
    """The moment that `HH:MM ZONE` names; raises ValueError that says what would do."""
    match = _FORM.match(text.strip())
    if match is None:
        raise ValueError("must be a time of day and a time zone, like `06:00 Europe/Paris`")
    hour, minute, zone = match.groups()
    try:
        ZoneInfo(zone)
    except (OSError, ValueError, KeyError):
        raise ValueError(f"there is no time zone {zone!r}: give one like `Europe/Paris` or `UTC`") from None
    return Moment(int(hour), int(minute), zone)
