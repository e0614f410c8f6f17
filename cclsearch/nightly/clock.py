"""Times of day in a time zone: when a night starts, and its deadline."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

_FORM = re.compile(r"^([01]?\d|2[0-3]):([0-5]\d)\s+(\S+)$")


@dataclass(frozen=True)
class Moment:
    """A daily time, such as `06:00 Europe/Paris`."""

    hour: int
    minute: int
    zone: str

    def __str__(self) -> str:
        return f"{self.hour:02d}:{self.minute:02d} {self.zone}"

    def next_after(self, now_s: float) -> float:
        """Next occurrence strictly after `now_s`, in seconds since the epoch.

        Follows the zone's clock changes: on a day that skips this time, the moment is later by the size of the jump; on
        a day that has it twice, the first one counts.
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
    """Parse `HH:MM ZONE`; raises ValueError with the expected form."""
    match = _FORM.match(text.strip())
    if match is None:
        raise ValueError("must be a time of day and a time zone, such as `06:00 Europe/Paris`")
    hour, minute, zone = match.groups()
    try:
        ZoneInfo(zone)
    except (OSError, ValueError, KeyError):
        raise ValueError(f"no time zone {zone!r}: give one such as `Europe/Paris` or `UTC`") from None
    return Moment(int(hour), int(minute), zone)
