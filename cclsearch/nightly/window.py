"""Which night it is: the one that was cut off, where it may still go on, else a new one."""

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
"""A night without a deadline ends before the next `start` that is at least this far away."""
START_MARGIN_S = 600.0
"""How long before that `start`: it must have stopped by then, and a timer that is early must not go on with it."""
MAX_NIGHT_S = 20 * 3600.0
"""How long a night with neither a deadline nor a `start` may be gone on with: no day between two starts is as short."""


@dataclass(frozen=True)
class NightWindow:
    """Which night it is."""

    stamp: str
    started_s: float
    deadline_s: float | None
    folder: Path
    jobs: dict[str, str] = field(default_factory=dict)
    """Job -> name of its run folder, from before this night was cut off."""
    hours: float = 0.0
    """That the night ran before it was cut off."""
    job_hours: dict[str, float] = field(default_factory=dict)
    """Job -> hours that it was searched before."""


def nights_folder(runs: Path, name: str) -> Path:
    """Where the summaries of a series of nights are."""
    return runs / NIGHTS_FOLDER / name


def find_window(config: NightlyConfig, runs: Path, now_s: float) -> NightWindow:
    """The night that was cut off, where it was asked for the same and may still go on; else a new one."""
    cut = find_interrupted(config, runs, now_s)
    if cut is not None:
        return cut
    home = nights_folder(runs, config.name)
    second = now_s
    while (home / (stamp := time.strftime("%Y%m%d-%H%M%S", time.gmtime(second)))).exists():
        second += 1
    return NightWindow(stamp, now_s, choose_end(config, now_s), home / stamp)


def find_interrupted(config: NightlyConfig, runs: Path, now_s: float) -> NightWindow | None:
    """The latest night, where it was killed or stopped before its end, and is to be gone on with; else None."""
    home = nights_folder(runs, config.name)
    latest = max((p for p in home.glob("*/") if (p / NIGHT_FILE).is_file()), default=None, key=lambda p: p.name)
    if latest is None or _came_to_an_end(latest):
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
    """When a night that starts then must have stopped, by the zones' own clocks; None where nothing says."""
    if config.deadline_moment is not None:
        return config.deadline_moment.next_after(started_s)
    if config.start_moment is not None:
        return config.start_moment.next_after(started_s + MIN_NIGHT_S) - START_MARGIN_S
    return None


def _came_to_an_end(folder: Path) -> bool:
    """Whether the night has its summary, and not that of a stop before its end."""
    try:
        return not json.loads((folder / SUMMARY_FILE).read_bytes())["stopped"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True
