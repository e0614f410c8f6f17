"""The present night: the interrupted one if its time window is still open, else a new one."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.values import Model
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


class NightWindow(Model):
    """One night: its start, its latest end, and its state so far; `night.json` is all but its folder."""

    folder: Path = Field(exclude=True)
    config: str
    """Digest of the configuration that it started with."""
    started_s: float
    deadline_s: float | None
    jobs: dict[str, str] = {}
    """Job -> name of its run folder."""
    hours: float = 0.0
    """Hours that the night ran."""
    job_hours: dict[str, float] = {}
    """Job -> hours of its search."""

    @property
    def stamp(self) -> str:
        return self.folder.name

    def save(self, **changed: object) -> None:
        """Write `night.json`, from which a later process continues the night, with these fields changed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = self.model_copy(update=changed).model_dump_json(indent=1)
        write_atomically(self.folder / NIGHT_FILE, text + "\n")


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
    folder, end_s = series_folder / stamp, choose_end(config, now_s)
    return NightWindow(folder=folder, config=config.digest, started_s=now_s, deadline_s=end_s)


def find_interrupted(config: NightlyConfig, runs: Path, now_s: float) -> NightWindow | None:
    """The latest night if it was killed or stopped before its end and can be continued; else None."""
    series_folder = nights_folder(runs, config.name)
    latest = max(
        (p for p in series_folder.glob("*/") if (p / NIGHT_FILE).is_file()), default=None, key=lambda p: p.name
    )
    if latest is None or _is_complete(latest):
        return None
    with suppress(OSError, ValueError, TypeError):
        data = json.loads((latest / NIGHT_FILE).read_text(encoding="utf-8"))
        night = NightWindow(**{"hours": (now_s - data["started_s"]) / 3600, **data, "folder": latest})
        end_s = night.deadline_s or choose_end(config, night.started_s) or night.started_s + MAX_NIGHT_S
        if night.config == config.digest and night.started_s <= now_s < end_s:
            return night
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
