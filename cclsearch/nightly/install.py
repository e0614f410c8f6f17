"""What starts a night by itself: systemd units, a cron line, a scrontab entry; nothing of it holds a secret."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cclsearch.errors import UserError
from cclsearch.nightly.clock import Moment
from cclsearch.nightly.config import NightlyConfig


@dataclass(frozen=True)
class Setting:
    """Where and what is started."""

    name: str
    config: Path
    """The nightly.yaml, absolute."""
    project: Path
    """Working directory, absolute."""
    start: Moment
    runs: Path | None = None

    @property
    def unit(self) -> str:
        return f"ccl-search-nightly-{self.name}"

    @property
    def command(self) -> list[str]:
        """What runs one night, as an argument list."""
        runs = [] if self.runs is None else ["--runs", str(self.runs)]
        return [sys.executable, "-m", "cclsearch", "nightly", str(self.config), "--once", *runs]


def describe_setting(config: NightlyConfig, path: Path, project: Path, runs: Path | None) -> Setting:
    """What is to be installed; raises UserError where no start time is given, or a path cannot be written in a unit."""
    if config.start_moment is None:
        raise UserError(f"{str(path)!r} needs `start`, like `start: 22:00 Europe/Paris`, to be installed")
    setting = Setting(
        config.name, path.absolute(), project.absolute(), config.start_moment, runs.absolute() if runs else None
    )
    if re.search(r"[\n\r\0]", " ".join([*setting.command, str(setting.project)])):
        raise UserError("a path with a line break cannot be installed")
    return setting


def render_systemd(setting: Setting) -> dict[str, str]:
    """File name -> text of the service and its timer."""
    command = " ".join(quote_systemd(word) for word in setting.command)
    service = (
        f"[Unit]\nDescription=ccl-search nightly {setting.name}\n\n"
        f"[Service]\nType=oneshot\nWorkingDirectory={_escape_path(str(setting.project))}\n"
        f"EnvironmentFile=-%h/.config/ccl-search/nightly.env\nExecStart={command}\n"
        "KillSignal=SIGTERM\nTimeoutStopSec=300\n"
    )
    timer = (
        f"[Unit]\nDescription=Starts ccl-search nightly {setting.name}\n\n"
        f"[Timer]\nOnCalendar=*-*-* {setting.start.hour:02d}:{setting.start.minute:02d}:00 {setting.start.zone}\n"
        "Persistent=true\n\n[Install]\nWantedBy=timers.target\n"
    )
    return {f"{setting.unit}.service": service, f"{setting.unit}.timer": timer}


def quote_systemd(word: str) -> str:
    """One word of an `ExecStart=` line: quoted, with specifiers and variables taken as text."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _escape_path(path: str) -> str:
    return path.replace("%", "%%")


def render_cron(setting: Setting, *, slurm: bool = False) -> str:
    """The block of a crontab, or of a scrontab, between two marks.

    `CRON_TZ` is what cronie and scrontab's host read; where cron knows no such line, the machine's own zone holds.
    """
    project = shlex.quote(str(setting.project))
    line = f"cd {project} && exec {shlex.join(setting.command)}"
    if not slurm:
        line = line.replace("%", "\\%")
    head = [f"CRON_TZ={setting.start.zone}"] if not slurm else [f"#SCRON --job-name={setting.unit}"]
    entry = f"{setting.start.minute} {setting.start.hour} * * * {line}"
    return "\n".join([_mark(setting, "begin"), *head, entry, _mark(setting, "end")]) + "\n"


def replace_block(table: str, setting: Setting, block: str) -> str:
    """The table with the setting's earlier block taken out and the new one at its end."""
    begin, end = re.escape(_mark(setting, "begin")), re.escape(_mark(setting, "end"))
    rest = re.sub(rf"{begin}\n.*?{end}\n?", "", table, flags=re.DOTALL)
    return (rest if not rest or rest.endswith("\n") else rest + "\n") + block


def _mark(setting: Setting, word: str) -> str:
    return f"# {word} {setting.unit}"


def install_systemd(setting: Setting) -> list[Path]:
    """Write the units into the user's folder; returns their paths."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    folder = Path(base) / "systemd" / "user"
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in render_systemd(setting).items():
            (folder / name).write_text(text, encoding="utf-8")
            written.append(folder / name)
    except OSError as error:
        raise UserError(f"cannot write units in {str(folder)!r}: {error.strerror}") from None
    return written


def install_table(setting: Setting, program: str) -> None:
    """Put the block into the user's table with `crontab` or `scrontab`; the rest of the table stays."""
    if shutil.which(program) is None:
        raise UserError(f"there is no `{program}` here: --dry-run shows the entry, to be entered elsewhere")
    listed = subprocess.run([program, "-l"], capture_output=True, text=True, timeout=60, check=False)
    table = listed.stdout if listed.returncode == 0 else ""
    if listed.returncode != 0 and "no crontab" not in listed.stderr.lower():
        raise UserError(f"`{program} -l` failed, so nothing was changed: {' '.join(listed.stderr.split())[:200]}")
    text = replace_block(table, setting, render_cron(setting, slurm=program == "scrontab"))
    done = subprocess.run([program, "-"], input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise UserError(f"`{program}` refused the entry: {' '.join(done.stderr.split())[:200]}")
