"""A night with a scripted launcher, for tests of whole nights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted_launcher import Ending, ScriptedLauncher, ran

from cclsearch.launch.base import Job
from cclsearch.loop.jobs import StopSignal
from cclsearch.nightly import window
from cclsearch.nightly.config import load_nightly
from cclsearch.nightly.run import run_night
from cclsearch.nightly.summary import NightSummary
from cclsearch.plugins import LAUNCHERS

DECIDE: list[Callable[[Job], Ending]] = []
"""Decides how trials end: the last entry counts."""


@LAUNCHERS.register("scripted-night")
class NightLauncher(ScriptedLauncher):
    """A scripted launcher made from a profile, as a night makes its launchers."""

    @classmethod
    def from_profile(cls, profile: object) -> NightLauncher:
        return cls(lambda job: DECIDE[-1](job))


def time_of(job: Job) -> float:
    """Seconds per step of a configuration: the more micro-batches, the slower."""
    config = job.payload.config
    return 1.0 + 0.1 * job.payload.gradient_accumulation + 0.3 * config.as_int("tp") + 0.2 * config.as_int("pp")


BASE: dict[str, Any] = {"jobs": [{"workload": "tiny", "launcher": "sim", "name": "a", "budget": {"trials": 6}}]}
CLOCK = iter(range(10**6))


def write(**changes: Any) -> Path:
    path = Path("nightly.yaml")
    path.write_text(yaml.safe_dump({**BASE, **changes}))
    return path


def night(code: int | None = None, **changes: Any) -> NightSummary:
    """Run one night and check its exit code."""
    summary = run_night(load_nightly(write(**changes)), Path("runs").absolute(), stop=StopSignal())
    if code is not None:
        assert summary.exit_code == code, summary.model_dump_json(indent=1)
    return summary


def stop_after(stop: StopSignal, count: int) -> Callable[[Job], Ending]:
    """The first `count` trials succeed; the next one keeps running, and the night is asked to stop."""
    begun = iter(range(100))

    def decide(job: Job) -> Ending:
        if next(begun) < count:
            return ran(job, time_of(job))
        stop.request("stopped by SIGTERM")
        return None

    return decide


def run_stopped(after: int, **changes: Any) -> NightSummary:
    """A night that SIGTERM stops after that many trials; later trials succeed again."""
    stop = StopSignal()
    DECIDE.append(stop_after(stop, after))
    summary = run_night(load_nightly(write(**changes)), Path("runs").absolute(), stop=stop)
    DECIDE.append(lambda job: ran(job, time_of(job)))
    return summary


def put_launcher(project: Path) -> None:
    """Give the project the profile `sim`: every trial succeeds until a test appends another decision."""
    (project / "launchers").mkdir()
    (project / "launchers" / "sim.yaml").write_text("launcher: scripted-night\n")
    DECIDE.append(lambda job: ran(job, time_of(job), versions={"torch": "2.1"}))


def put_days_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each night a stamp of its own, without waiting for the next second."""
    find = window.find_window

    def later(config: Any, runs: Path, now_s: float) -> Any:
        found = find(config, runs, now_s)
        if found.jobs or (found.folder / "night.json").exists():
            return found
        stamp = f"2030{next(CLOCK):04d}-000000"
        return found.model_copy(update={"folder": found.folder.with_name(stamp)})

    monkeypatch.setattr("cclsearch.nightly.run.find_window", later)
