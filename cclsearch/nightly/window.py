"""The present night: the interrupted one if its time window is still open, else a new one."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.nightly.config import NightlyConfig

NIGHTS_FOLDER = "nights"
NIGHT_FILE = "night.json"
SUMMARY_FILE = "summary.json"
MIN_NIGHT_S = 3600.0
"""A night without a deadline ends before the next `start` that is at least this long after it began."""
# It must have stopped by then, and an early timer must not continue it.
START_MARGIN_S = 600.0
"""Seconds before the next `start` at which a night ends."""
# Less than a day between two starts.
MAX_NIGHT_S = 20 * 3600.0
"""Seconds for which a night with neither a deadline nor a `start` may be continued."""


@dataclass(frozen=True)
class NightWindow:
    """One night: its start, its latest end, and its state before an interruption."""

    stamp: str
    started_s: float
    deadline_s: float | None
    folder: Path
    jobs: dict[str, str] = field(default_factory=dict)
    """Job -> name of its run folder, from before the interruption."""
    hours: float = 0.0
    """Hours that the night ran before the interruption."""
    job_hours: dict[str, float] = field(default_factory=dict)
    """Job -> hours of its search before the interruption."""


def nights_folder(runs: Path, name: str) -> Path:
    """Folder with the summaries of a series of nights."""
    return runs / NIGHTS_FOLDER / name


def find_window(config: NightlyConfig, runs: Path, now_s: float) -> NightWindow:
    """Return the interrupted night if its configuration is unchanged and its end is not reached; else a new night."""
    interrupted = find_interrupted(config, runs, now_s)
    if interrupted is not None:
        return interrupted
    series_folder = nights_folder(runs, config.name)
    second = now_s
    while (series_folder / (stamp := time.strftime("%Y%m%d-%H%M%S", time.gmtime(second)))).exists():
        second += 1
    return NightWindow(stamp, now_s, choose_end(config, now_s), series_folder / stamp)


def find_interrupted(config: NightlyConfig, runs: Path, now_s: float) -> NightWindow | None:
    """The latest night if it was killed or stopped before its end and can be continued; else None."""
    series_folder = nights_folder(runs, config.name)
    latest = max(
        (p for p in series_folder.glob("*/") if (p / NIGHT_FILE).is_file()), default=None, key=lambda p: p.name
    )
    if latest is None or _is_complete(latest):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        data = json.loads((latest / NIGHT_FILE).read_text(encoding="utf-8"))
        started_s, end_s = float(data["started_s"]), data["deadline_s"]
        if end_s is None:
            end_s = choose_end(config, started_s) or started_s + MAX_NIGHT_S
        if data["config"] == config.digest and started_s <= now_s < end_s:
            return NightWindow(
                latest.name,
                started_s,
                data["deadline_s"],
                latest,
                jobs={str(key): str(name) for key, name in data["jobs"].items()},
                hours=float(data.get("hours", (now_s - started_s) / 3600)),
                job_hours={str(key): float(hours) for key, hours in data.get("job_hours", {}).items()},
            )
    return None


def choose_end(config: NightlyConfig, started_s: float) -> float | None:
    """Return when a night that starts at `started_s` must have stopped; None without a deadline and without `start`."""
    if config.deadline_moment is not None:
        return config.deadline_moment.next_after(started_s)
    if config.start_moment is not None:
        return config.start_moment.next_after(started_s + MIN_NIGHT_S) - START_MARGIN_S
    return None


def _is_complete(folder: Path) -> bool:
    """Whether the night has a summary that does not say it was stopped before its end."""
    try:
        return not json.loads((folder / SUMMARY_FILE).read_bytes())["stopped"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True
