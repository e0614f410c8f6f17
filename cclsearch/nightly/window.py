"""The present night: the interrupted one if its window is still open, else a new one; what it spent of its budget."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.values import Model
from cclsearch.nightly.config import Budget, NightlyConfig
from cclsearch.propose.events import LlmReport, LlmTurn
from cclsearch.record.state import RunState
from cclsearch.run.spec import RunSpec
from cclsearch.run.usage import count_node_hours

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


class Spent(Model):
    """Amounts that were spent, in the units of a budget."""

    trials: int = 0
    hours: float = 0.0
    node_hours: float = 0.0
    tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(**{name: value + getattr(other, name) for name, value in self})


def count_spent(spec: RunSpec, state: RunState, since_s: float, now_s: float) -> Spent:
    """Count what a search spent since a moment; wall time is not in a ledger and stays 0.

    A trial that started earlier and was interrupted counts for the night in which it finished.
    """
    trials = [trial for trial in state.trials.values() if (trial.finished_s or now_s) >= since_s]
    turns = [event for event in state.reported if isinstance(event, LlmTurn | LlmReport) and event.time_s >= since_s]
    started = [trial for trial in trials if trial.proposed_s >= since_s or trial.is_finished]
    return Spent(
        trials=sum(trial.costs_budget for trial in started),
        node_hours=sum(count_node_hours(spec, trial, since_s, now_s) for trial in trials),
        tokens=sum(turn.cost.usage.total for turn in turns),
        usd=sum(turn.cost.usd or 0.0 for turn in turns),
    )


def find_remaining(budget: Budget, spent: Spent) -> dict[str, float | None]:
    """The remainder of each limit (at least 0); None if there is no limit."""
    limits = {name: getattr(budget, name) for name in Spent.model_fields}
    return {k: None if limit is None else max(0.0, limit - getattr(spent, k)) for k, limit in limits.items()}


def split_remaining(left: dict[str, float | None], priority: float, waiting: float) -> dict[str, float | None]:
    """Return a job's share of the remaining budget; `waiting` is the sum of its own and all waiting jobs' priorities.

    Trials are whole, and at least one while one is left.
    """
    fraction = priority / waiting
    share = {name: None if value is None else value * fraction for name, value in left.items()}
    trials = left["trials"]
    if trials is not None:
        share["trials"] = min(trials, max(1, math.floor(trials * fraction + 1e-9)))
    return share


def find_lower_limits(share: dict[str, float | None], own: Budget, spent: Spent) -> dict[str, float | None]:
    """Return, for each limit, the lower of the night's share and the remainder of the job's own budget."""
    rest = find_remaining(own, spent)
    limits = {name: [limit for limit in (value, rest[name]) if limit is not None] for name, value in share.items()}
    return {name: min(given, default=None) for name, given in limits.items()}


def find_exhausted(left: dict[str, float | None]) -> str | None:
    """The first limit that is used up; None if none is."""
    return next((name for name, value in left.items() if value is not None and value <= 0), None)
