"""What starts a night by itself: systemd units, a cron line, a scrontab entry; nothing of it holds a secret."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

from cclsearch.core.errors import UserError
from cclsearch.nightly.clock import Moment
from cclsearch.nightly.config import NightlyConfig, Scrontab

STOP_LIMIT_S = 1200
"""How long a night may take after its deadline, or a signal: giving cloud resources back alone may take 900 s."""
DAYS = 366


@dataclass(frozen=True)
class InstallPlan:
    """Where and what is started."""

    name: str
    config: Path
    """The nightly.yaml, absolute."""
    project: Path
    """Working directory, absolute."""
    start: Moment
    runs: Path | None = None
    deadline: Moment | None = None
    hours: float | None = None
    """The night's budget of them."""
    scrontab: Scrontab = field(default_factory=Scrontab)

    @property
    def unit(self) -> str:
        return f"ccl-search-nightly-{self.name}"

    @property
    def command(self) -> list[str]:
        """What runs one night, as an argument list."""
        runs = [] if self.runs is None else ["--runs", str(self.runs)]
        return [sys.executable, "-m", "cclsearch", "nightly", str(self.config), "--once", *runs]


def plan_install(
    config: NightlyConfig, path: Path, project: Path, runs: Path | None, scrontab: Scrontab | None = None
) -> InstallPlan:
    """What is to be installed; raises UserError where no start time is given, or a path cannot be written in a unit."""
    if config.start_moment is None:
        raise UserError(f"{str(path)!r} needs `start`, like `start: 22:00 Europe/Paris`, to be installed")
    plan = InstallPlan(
        config.name,
        path.absolute(),
        project.absolute(),
        config.start_moment,
        runs.absolute() if runs else None,
        deadline=config.deadline_moment,
        hours=config.budget.hours,
        scrontab=scrontab or config.scrontab,
    )
    if re.search(r"[\n\r\0]", " ".join([*plan.command, str(plan.project)])):
        raise UserError("a path with a line break cannot be installed")
    return plan


LINGER = "needs `loginctl enable-linger`: without it a user's timers end with the user's last login"


def render_systemd(plan: InstallPlan) -> dict[str, str]:
    """File name -> text of the service and its timer.

    A start that was missed is not made up for (no `Persistent=`): a night does not belong into the next day.
    """
    command = " ".join(quote_systemd(word) for word in plan.command)
    service = (
        f"[Unit]\nDescription=ccl-search nightly {plan.name}\n\n"
        f"[Service]\nType=oneshot\nWorkingDirectory={_escape_path(str(plan.project))}\n"
        f"EnvironmentFile=-%h/.config/ccl-search/nightly.env\nExecStart={command}\n"
        # The search alone is told to stop: its tools must live on, to cancel jobs and give resources back.
        f"KillSignal=SIGTERM\nKillMode=mixed\nTimeoutStopSec={STOP_LIMIT_S}\n"
    )
    timer = (
        f"# {LINGER}\n[Unit]\nDescription=Starts ccl-search nightly {plan.name}\n\n"
        f"[Timer]\nOnCalendar=*-*-* {plan.start.hour:02d}:{plan.start.minute:02d}:00 {plan.start.zone}\n"
        "\n[Install]\nWantedBy=timers.target\n"
    )
    return {f"{plan.unit}.service": service, f"{plan.unit}.timer": timer}


def quote_systemd(word: str) -> str:
    """One word of an `ExecStart=` line: quoted, with specifiers and variables taken as text."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _escape_path(path: str) -> str:
    """A path that stands in a line without quotes: a backslash or a blank at its end would not be read as such."""
    text = path.replace("%", "%%")
    return f"{text}/" if text.endswith(("\\", " ", "\t")) else text


def render_cron(plan: InstallPlan, *, slurm: bool = False) -> str:
    """The block of a crontab, or of a scrontab, between two marks.

    `CRON_TZ` is what cronie and scrontab's host read; where cron knows no such line, the machine's own zone holds.
    """
    project = shlex.quote(str(plan.project))
    line = f"cd {project} && exec {shlex.join(plan.command)}"
    if not slurm:
        line = line.replace("%", "\\%")
    head = _scron_lines(plan) if slurm else [f"CRON_TZ={plan.start.zone}"]
    entry = f"{plan.start.minute} {plan.start.hour} * * * {line}"
    return "\n".join([_mark(plan, "begin"), *head, entry, _mark(plan, "end")]) + "\n"


def _scron_lines(plan: InstallPlan) -> list[str]:
    asked, time_s = plan.scrontab, find_time_limit_s(plan)
    options = {
        "job-name": plan.unit,
        "time": None if time_s is None else _show_duration(time_s),
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        **asked.options,
    }
    return [f"#SCRON --{name}={value}" for name, value in options.items() if value is not None]


def find_time_limit_s(plan: InstallPlan) -> float | None:
    """Seconds that Slurm is to give a night: up to its deadline, and then to stop in; None where nothing says.

    From `start` to the deadline the longest of a year's nights counts: one of them has an hour more.
    """
    if plan.scrontab.hours is not None:
        return plan.scrontab.hours * 3600
    windows_s = [] if plan.hours is None else [plan.hours * 3600]
    if plan.deadline is not None:
        starts_s = _next_starts(plan.start)
        windows_s.append(max(plan.deadline.next_after(start_s) - start_s for start_s in starts_s))
    return min(windows_s) + STOP_LIMIT_S if windows_s else None


def _next_starts(start: Moment) -> list[float]:
    """The starts of the year that comes, seconds since the epoch."""
    starts_s = [start.next_after(time.time())]
    while len(starts_s) < DAYS:
        starts_s.append(start.next_after(starts_s[-1]))
    return starts_s


def _show_duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def find_warnings(plan: InstallPlan, how: str) -> list[str]:
    """What may not be as meant where `systemd`, `cron` or `scrontab` starts the nights."""
    lines = []
    at = f"{plan.start.hour:02d}:{plan.start.minute:02d}"
    if how == "scrontab" and not _is_zone_of_here(plan.start):
        lines.append(
            f"scrontab starts jobs in the cluster's time zone, and `start` is {plan.start}, while this machine has"
            f" another zone: the night starts at {at} by the cluster's clock"
        )
    if how == "cron" and not _is_zone_of_here(plan.start):
        lines.append(
            f"only cronie reads CRON_TZ; any other cron (Debian's, Ubuntu's) starts the night at {at} by this machine's"
            f" clock, and `start` is {plan.start}: there give `start` in this machine's zone"
        )
    if how == "scrontab" and find_time_limit_s(plan) is None:
        lines.append(
            "no time limit is asked for, so the cluster's default holds: give `deadline`, `budget.hours`, or"
            " `scrontab: {hours: 9}`"
        )
    if how != "cron" and (day := _find_skipped(plan.start)) is not None:
        lines.append(f"the clock of {plan.start.zone} skips {at} on {day}: no night may start on such a day")
    return lines


def _find_skipped(start: Moment) -> str | None:
    """The first day of the year that comes on which the zone's clock skips the start; None where there is none."""
    zone = ZoneInfo(start.zone)
    for at_s in _next_starts(start):
        there = datetime.fromtimestamp(at_s, zone)
        if (there.hour, there.minute) != (start.hour, start.minute):
            return there.date().isoformat()
    return None


def _is_zone_of_here(start: Moment) -> bool:
    """Whether this machine's clock reads the same as the moment's zone, the whole year."""
    zone = ZoneInfo(start.zone)
    starts_s = _next_starts(start)
    return all(
        datetime.fromtimestamp(at_s, zone).utcoffset() == timedelta(seconds=time.localtime(at_s).tm_gmtoff)
        for at_s in starts_s
    )


def replace_block(table: str, plan: InstallPlan, block: str, *, in_place: bool = False) -> str:
    """The table with the setting's earlier block taken out and the new one at its end, or in the old one's place.

    What is outside the marks stays as it is; raises UserError where a begin has no end.
    """
    begin, end = re.escape(_mark(plan, "begin")), re.escape(_mark(plan, "end"))
    whole = re.compile(rf"^{begin}\n(?:(?!{begin}$).*\n)*?{end}(?:\n|\Z)", re.MULTILINE)
    found = whole.search(table)
    rest = whole.sub("", table)
    if re.search(rf"^(?:{begin}|{end})$", rest, re.MULTILINE):
        raise UserError(f"the table has `{_mark(plan, 'begin')}` without its end, or the other way round: mend that")
    if in_place and found is not None:
        return rest[: found.start()] + block + rest[found.start() :]
    return (rest if not rest or rest.endswith("\n") else rest + "\n") + block


def _mark(plan: InstallPlan, word: str) -> str:
    return f"# {word} {plan.unit}"


def install_systemd(plan: InstallPlan) -> list[Path]:
    """Write the units into the user's folder; returns their paths."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    folder = Path(base) / "systemd" / "user"
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in render_systemd(plan).items():
            (folder / name).write_text(text, encoding="utf-8")
            written.append(folder / name)
    except OSError as error:
        raise UserError(f"cannot write units in {str(folder)!r}: {error.strerror}") from None
    return written


def install_table(plan: InstallPlan, program: str) -> None:
    """Put the block into the user's table with `crontab` or `scrontab`; the rest of the table stays."""
    if shutil.which(program) is None:
        raise UserError(f"there is no `{program}` here: --dry-run shows the entry, to be entered elsewhere")
    listed = subprocess.run([program, "-l"], capture_output=True, text=True, timeout=60, check=False)
    table = listed.stdout if listed.returncode == 0 else ""
    if listed.returncode != 0 and "no crontab" not in listed.stderr.lower():
        raise UserError(f"`{program} -l` failed, so nothing was changed: {' '.join(listed.stderr.split())[:200]}")
    # In scrontab the lines above an entry are its options, so ours stays where it is; CRON_TZ holds for all below it.
    slurm = program == "scrontab"
    text = replace_block(table, plan, render_cron(plan, slurm=slurm), in_place=slurm)
    done = subprocess.run([program, "-"], input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        said = " ".join(f"{done.stderr} {done.stdout}".split())[:200]
        raise UserError(f"`{program}` refused the entry: {said}")
