"""A dry run, and a night as an entry of cron, scrontab or systemd."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
from nights import night, write

from cclsearch.cli import main


def test_dry_run_shows_jobs_and_repeated_configurations_and_writes_nothing(nightly_project: Path, cli) -> None:
    write(deadline="06:00 Europe/Paris")
    assert main(["nightly", "nightly.yaml", "--dry-run"]) == 0
    assert not Path("runs").exists()
    night(code=0)
    before = sorted(Path("runs").rglob("*"))
    assert "measures again: " in cli.out(["nightly", "nightly.yaml", "--dry-run"])
    assert sorted(Path("runs").rglob("*")) == before


def put_tables_tool(nightly_project: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `crontab` or `scrontab` on PATH that stores its table in a file; returns that file."""
    table = nightly_project / "table"
    tools = nightly_project / "tools"
    tools.mkdir()
    script = (
        f'#!/bin/sh\nif [ "$1" = -l ]; then cat "{table}"; else cat > "{table}.new" && mv "{table}.new" "{table}"; fi\n'
    )
    (tools / name).write_text(script)
    (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return table


def test_installing_into_a_crontab_keeps_the_rest_and_replaces_its_own(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = put_tables_tool(nightly_project, "crontab", monkeypatch)
    table.write_text("# mine\n5 5 * * * echo hello\n")
    write(start="22:00 Europe/Paris")
    for _ in range(2):
        assert main(["nightly", "install", "nightly.yaml", "--cron"]) == 0
    text = table.read_text()
    assert text.startswith("# mine\n5 5 * * * echo hello\n")
    assert text.count("0 22 * * *") == 1
    assert text.count("CRON_TZ=Europe/Paris") == 1


def test_reinstalling_into_a_scrontab_keeps_the_lines_around_it(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = put_tables_tool(nightly_project, "scrontab", monkeypatch)
    above = "#SCRON --qos=mine\n5 5 * * * echo hello\n#SCRON --mem=4G\n"
    below = "#SCRON --time=00:10:00\n7 7 * * * echo more\n"
    table.write_text(above)
    write(start="22:00 Europe/Paris", deadline="06:00 Europe/Paris", scrontab={"partition": "cron", "account": 123})
    assert main(["nightly", "install", "nightly.yaml", "--scrontab"]) == 0
    table.write_text(table.read_text() + below)
    assert main(["nightly", "install", "nightly.yaml", "--scrontab", "--account", "m12", "--qos", "cron"]) == 0
    text = table.read_text()
    assert text.startswith(above + "# begin ccl-search-nightly-nightly\n")
    assert text.endswith("# end ccl-search-nightly-nightly\n" + below)
    for line in ("--time=09:20:00", "--partition=cron", "--account=m12", "--qos=cron"):
        assert text.count(f"#SCRON {line}\n") == 1
    assert text.count("0 22 * * *") == 1
    table.write_text(text.replace("# end ccl-search-nightly-nightly\n", ""))
    assert main(["nightly", "install", "nightly.yaml", "--scrontab"]) == 2


def test_cron_warns_about_another_zone_and_systemd_about_a_skipped_time(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, cli
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        write(start="02:30 Europe/Paris")
        assert "only cronie reads CRON_TZ" in cli.err(["nightly", "install", "nightly.yaml", "--cron", "--dry-run"], 0)
        assert "skips 02:30 on 20" in cli.err(["nightly", "install", "nightly.yaml", "--systemd", "--dry-run"], 0)
        write(start="02:30 UTC")
        assert cli.err(["nightly", "install", "nightly.yaml", "--cron", "--dry-run"], 0) == ""
    time.tzset()


def test_scrontab_warns_about_another_zone_and_a_missing_limit(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(start="22:00 Europe/Paris", budget={"hours": 7})
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        assert main(["nightly", "install", "nightly.yaml", "--scrontab", "--dry-run"]) == 0
        first = capsys.readouterr()
        write(start="22:00 Etc/UTC")
        assert main(["nightly", "install", "nightly.yaml", "--scrontab", "--dry-run"]) == 0
        second = capsys.readouterr()
    time.tzset()
    assert "#SCRON --time=07:20:00\n" in first.out
    assert "the cluster's time zone" in first.err
    assert "--time" not in second.out
    assert second.err.count("warning: ") == 1
    assert "no time limit" in second.err


def test_installed_commands_quote_hostile_paths(tmp_path: Path) -> None:
    from cclsearch.nightly.clock import parse_moment
    from cclsearch.nightly.install import InstallPlan, quote_systemd, render_cron, render_systemd

    project = tmp_path / "a 'b\" $(touch owned) %h;x"
    project.mkdir()
    plan = InstallPlan("n", project / "nightly $HOME.yaml", project, parse_moment("6:05 UTC"))
    line = next(line for line in render_cron(plan).splitlines() if line.startswith("5 6"))
    command = line.removeprefix("5 6 * * * ").replace("\\%", "%").replace("exec ", "printf '%s\\n' ")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[1:] == plan.command[1:]
    assert not list(tmp_path.rglob("owned"))
    assert quote_systemd('a"$b%c\\') == '"a\\"$$b%%c\\\\"'
    units = render_systemd(plan)
    assert "OnCalendar=*-*-* 06:05:00 UTC" in units["ccl-search-nightly-n.timer"]
    assert "%%h;x" in units["ccl-search-nightly-n.service"]
    odd = InstallPlan("n", tmp_path / "n.yaml", tmp_path / "back\\", parse_moment("6:05 UTC"))
    assert f"WorkingDirectory={tmp_path}/back\\/\n" in render_systemd(odd)["ccl-search-nightly-n.service"]


def test_systemd_itself_accepts_the_units(tmp_path: Path) -> None:
    from cclsearch.nightly.clock import parse_moment
    from cclsearch.nightly.install import InstallPlan, render_systemd

    project = tmp_path / "we ird %h $HOME 'q\"d"
    project.mkdir()
    probe = tmp_path / "probe.service"
    probe.write_text("[Service]\nExecStart=/bin/true\n")
    if (problems := verify_units(tmp_path, probe)) is None or problems:
        pytest.skip(f"systemd-analyze cannot verify units of a user: {problems}")
    units = render_systemd(InstallPlan("n", project / "n.yaml", project, parse_moment("6:05 Europe/Paris")))
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    assert verify_units(tmp_path, *(tmp_path / name for name in units)) == ""


def verify_units(runtime: Path, *units: Path) -> str | None:
    """Complaints of `systemd-analyze`, empty if there are none; None if it is not installed."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    command = ["systemd-analyze", "verify", "--user", *map(str, units)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    except OSError:
        return None
    return done.stderr if done.returncode == 0 or done.stderr else f"exit code {done.returncode}"


def test_systemd_units_are_written_to_the_users_folder(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, cli
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(nightly_project / "etc"))
    write(start="22:00 Europe/Paris")
    assert main(["nightly", "install", "nightly.yaml", "--systemd", "--dry-run"]) == 0
    assert not (nightly_project / "etc").exists()
    output = cli.out(["nightly", "install", "nightly.yaml", "--systemd"])
    assert "loginctl enable-linger" in output
    assert "Persistent" not in output
    assert "TimeoutStopSec=1200" in output
    names = sorted(p.name for p in (nightly_project / "etc" / "systemd" / "user").iterdir())
    assert names == ["ccl-search-nightly-nightly.service", "ccl-search-nightly-nightly.timer"]
