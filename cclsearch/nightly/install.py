"""Installs nights: systemd units, a cron line, or a scrontab entry. None of them contains a secret."""

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
from cclsearch.core.templates import open_templates
from cclsearch.nightly.config import Moment, NightlyConfig, Scrontab

# Releasing cloud resources may take 900 s.
MAX_STOP_S = 1200
"""Seconds that a night may take to stop after its deadline or a signal."""
DAYS = 366
LINGER = "needs `loginctl enable-linger`: without it a user's timers end with the user's last login"


@dataclass(frozen=True)
class InstallPlan:
    """A command to start every day, with its folder and its time."""

    name: str
    config: Path
    """The nightly.yaml, absolute."""
    project: Path
    """Working directory, absolute."""
    start: Moment
    runs: Path | None = None
    deadline: Moment | None = None
    hours: float | None = None
    """The night's budget of hours."""
    scrontab: Scrontab = field(default_factory=Scrontab)

    @property
    def unit(self) -> str:
        return f"ccl-search-nightly-{self.name}"

    @property
    def command(self) -> list[str]:
        """The command that runs one night, as an argument list."""
        runs = [] if self.runs is None else ["--runs", str(self.runs)]
        return [sys.executable, "-P", "-m", "cclsearch", "nightly", str(self.config), "--once", *runs]


def plan_install(
    config: NightlyConfig, path: Path, project: Path, runs: Path | None, scrontab: Scrontab | None = None
) -> InstallPlan:
    """Return the parts of an installation; raises UserError without `start`, or if a unit cannot hold a path."""
    if config.start_moment is None:
        raise UserError(f"{str(path)!r} has no `start`: to install it, add one such as `start: 22:00 Europe/Paris`")
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
        raise UserError("cannot install a path that contains a line break")
    return plan


def render_systemd(plan: InstallPlan) -> dict[str, str]:
    """Text of the service and its timer, by file name."""
    return {f"{plan.unit}.{kind}": _render(f"{kind}.j2", plan) for kind in ("service", "timer")}


def _render(template: str, plan: InstallPlan, **values: object) -> str:
    environment = open_templates(Path(__file__).parent, keep_trailing_newline=True)
    environment.filters |= {"systemd": quote_systemd, "systemd_path": _escape_path}
    return environment.get_template(template).render(plan=plan, stop_s=MAX_STOP_S, linger=LINGER, **values)


def quote_systemd(word: str) -> str:
    """One word of an `ExecStart=` line: quoted, with specifiers and variables taken as text."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _escape_path(path: str) -> str:
    """A path for a line without quotes: a backslash or a blank at its end would be misread, so a `/` follows."""
    text = path.replace("%", "%%")
    return f"{text}/" if text.endswith(("\\", " ", "\t")) else text


def render_cron(plan: InstallPlan, *, slurm: bool = False) -> str:
    """The block of a crontab or a scrontab, between two marker lines."""
    line = f"cd {shlex.quote(str(plan.project))} && exec {shlex.join(plan.command)}"
    asked, time_s = plan.scrontab, find_time_limit_s(plan)
    minutes = None if time_s is None else math.ceil(time_s / 60)
    options = {
        "job-name": plan.unit,
        "time": None if minutes is None else f"{minutes // 60:02d}:{minutes % 60:02d}:00",
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        **asked.options,
    }
    line = line if slurm else line.replace("%", "\\%")  # cron reads `%` as a line break
    return _render("crontab.j2", plan, slurm=slurm, line=line, options=options)


def find_time_limit_s(plan: InstallPlan) -> float | None:
    """Time limit for Slurm, in seconds: until the deadline plus the time for stopping; None if nothing sets one.

    The longest night of a year counts, because one night is an hour longer.
    """
    if plan.scrontab.hours is not None:
        return plan.scrontab.hours * 3600
    windows_s = [] if plan.hours is None else [plan.hours * 3600]
    if plan.deadline is not None:
        starts_s = _next_starts(plan.start)
        windows_s.append(max(plan.deadline.next_after(start_s) - start_s for start_s in starts_s))
    return min(windows_s) + MAX_STOP_S if windows_s else None


def _next_starts(start: Moment) -> list[float]:
    """The starts of the next year, in seconds since the epoch."""
    starts_s = [start.next_after(time.time())]
    while len(starts_s) < DAYS:
        starts_s.append(start.next_after(starts_s[-1]))
    return starts_s


def find_warnings(plan: InstallPlan, how: str) -> list[str]:
    """Warnings about starting the nights with `systemd`, `cron` or `scrontab`, one line each."""
    lines, at = [], f"{plan.start.hour:02d}:{plan.start.minute:02d}"
    starts = [datetime.fromtimestamp(at_s, ZoneInfo(plan.start.zone)) for at_s in _next_starts(plan.start)]
    is_other_zone = any(
        start.utcoffset() != timedelta(seconds=time.localtime(start.timestamp()).tm_gmtoff) for start in starts
    )
    skipped = [start for start in starts if (start.hour, start.minute) != (plan.start.hour, plan.start.minute)]
    if how == "scrontab" and is_other_zone:
        lines.append(
            f"scrontab uses the cluster's time zone: the night starts at {at} by the cluster's clock; `start` is"
            f" {plan.start}, and this machine is in another zone"
        )
    if how == "cron" and is_other_zone:
        lines.append(
            f"only cronie reads CRON_TZ: any other cron (Debian's, Ubuntu's) starts the night at {at} by this machine's"
            f" clock, but `start` is {plan.start}; for such a cron give `start` in this machine's zone"
        )
    if how == "scrontab" and find_time_limit_s(plan) is None:
        lines.append(
            "no time limit is set, so the cluster's default applies: give `deadline`, `budget.hours`, or"
            " `scrontab: {hours: 9}`"
        )
    if how != "cron" and skipped:
        day = skipped[0].date().isoformat()
        lines.append(f"the clock of {plan.start.zone} skips {at} on {day}: no night starts on such a day")
    return lines


def replace_block(table: str, plan: InstallPlan, block: str, *, in_place: bool = False) -> str:
    """The table with the earlier block removed and the new one at its end, or at the old position if `in_place`.

    Lines outside the markers do not change; raises UserError if one of the two markers is missing.
    """
    begin, end = re.escape(f"# begin {plan.unit}"), re.escape(f"# end {plan.unit}")
    whole = re.compile(rf"^{begin}\n(?:(?!{begin}$).*\n)*?{end}(?:\n|\Z)", re.MULTILINE)
    found = whole.search(table)
    rest = whole.sub("", table)
    if re.search(rf"^(?:{begin}|{end})$", rest, re.MULTILINE):
        raise UserError(f"the table has only one of `# begin {plan.unit}` and `# end {plan.unit}`: remove it")
    if in_place and found is not None:
        return rest[: found.start()] + block + rest[found.start() :]
    return (rest if not rest or rest.endswith("\n") else rest + "\n") + block


def install_systemd(plan: InstallPlan) -> list[Path]:
    """Write the units into the user's systemd folder; returns their paths."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    folder = Path(base) / "systemd" / "user"
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in render_systemd(plan).items():
            (folder / name).write_text(text, encoding="utf-8")
            written.append(folder / name)
    except OSError as error:
        raise UserError(f"cannot write the systemd units to {str(folder)!r}: {error.strerror}") from None
    return written


def install_table(plan: InstallPlan, program: str) -> None:
    """Put the block into the user's table with `crontab` or `scrontab`; the other lines do not change."""
    if shutil.which(program) is None:
        raise UserError(f"no command `{program}` here: `--dry-run` prints the entry, to be entered elsewhere")
    listed = _call(program, "-l")
    table = listed.stdout if listed.returncode == 0 else ""
    if listed.returncode != 0 and "no crontab" not in listed.stderr.lower():
        raise UserError(f"`{program} -l` failed, and nothing was changed: {' '.join(listed.stderr.split())[:200]}")
    # In scrontab the lines above an entry are its options, so ours keeps its position; CRON_TZ applies to all below.
    slurm = program == "scrontab"
    text = replace_block(table, plan, render_cron(plan, slurm=slurm), in_place=slurm)
    done = _call(program, "-", table=text)
    if done.returncode != 0:
        answer = " ".join(f"{done.stderr} {done.stdout}".split())[:200]
        raise UserError(f"`{program}` refused the entry: {answer}; your table was not changed")


def _call(program: str, word: str, table: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `crontab` or `scrontab`; a table need not be UTF-8. UserError if it does not run or gives no answer."""
    try:
        return subprocess.run(
            [program, word], input=table, capture_output=True, timeout=60, check=False, errors="surrogateescape"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"`{program} {word}` does not work: {error}; look at your table, then try again") from None


def install_nights(plan: InstallPlan, how: str, *, dry_run: bool = False) -> list[str]:
    """Install the start of the nights with `systemd`, `cron` or `scrontab`; returns lines on what was done.

    With `dry_run`, nothing is installed, and the lines show what would be.
    """
    if how == "systemd":
        lines = [f"# {name}\n{text}" for name, text in render_systemd(plan).items()]
        if not dry_run:
            lines += [f"wrote {written}" for written in install_systemd(plan)]
            lines += [
                f"next: systemctl --user daemon-reload && systemctl --user enable --now {plan.unit}.timer",
                "and:  loginctl enable-linger   (without it a user's timers end with the user's last login)",
            ]
        return lines
    program = "crontab" if how == "cron" else "scrontab"
    lines = [render_cron(plan, slurm=how == "scrontab").removesuffix("\n")]
    if not dry_run:
        install_table(plan, program)
        lines.append(f"installed with `{program}`; `{program} -l` shows the entry")
    return lines
