"""The file of a night, its schedule, and its entry in cron, scrontab or systemd."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from nights import night, write

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.nightly.config import Budget, load_nightly, parse_moment, parse_nightly
from cclsearch.nightly.night import make_request
from cclsearch.nightly.window import Spent, find_lower_limits, find_remaining, find_window, split_remaining

JOB = {"workload": "wl2", "launcher": "replay"}


def utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_a_night_never_lets_an_llm_add_to_a_search_space():
    with pytest.raises(UserError, match="extend"):
        parse_nightly({"jobs": [{**JOB, "extend": "any"}]}, "nightly.yaml")
    job = parse_nightly({"jobs": [{**JOB, "llm": "http://127.0.0.1:1/v1#m"}]}, "nightly.yaml").jobs[0]
    assert "extend" not in make_request(job, budget=1).llm_options


@pytest.mark.parametrize(
    ("now", "moment", "expected"),
    [
        ("2026-01-10T03:00", "06:00 Europe/Paris", "2026-01-10T05:00"),
        ("2026-01-10T05:00", "06:00 Europe/Paris", "2026-01-11T05:00"),
        ("2026-07-10T05:00", "06:00 Europe/Paris", "2026-07-11T04:00"),
        ("2026-03-28T21:00", "06:00 Europe/Paris", "2026-03-29T04:00"),  # the night of 23 hours
        ("2026-10-24T20:00", "06:00 Europe/Paris", "2026-10-25T05:00"),  # the night of 25 hours
        ("2026-03-29T00:30", "02:30 Europe/Paris", "2026-03-29T01:30"),  # a time that is skipped
        ("2026-10-24T23:00", "02:30 Europe/Paris", "2026-10-25T00:30"),  # a time that occurs twice
        ("2026-01-10T20:00", "06:00 Pacific/Auckland", "2026-01-11T17:00"),
        ("2026-12-31T23:59", "0:00 UTC", "2027-01-01T00:00"),
    ],
)
def test_a_moment_is_the_next_one_by_the_zones_own_clock(now, moment, expected):
    assert parse_moment(moment).next_after(utc(now)) == utc(expected)


@pytest.mark.parametrize(
    ("started", "now", "is_same"),
    [
        ("2026-01-10T21:00:03", "2026-01-11T09:00:00", True),
        ("2026-01-10T21:00:03", "2026-01-11T20:59:59", False),  # a second early
        ("2026-01-10T20:59:59", "2026-01-11T09:00:00", True),  # began a second early
        ("2026-03-28T21:00:03", "2026-03-29T20:00:00", False),  # 23 hours later
        ("2026-10-24T20:00:03", "2026-10-25T20:30:00", True),  # the day has 25 hours
    ],
)
def test_a_night_without_a_deadline_ends_before_the_next_start(tmp_path, started, now, is_same):
    config = parse_nightly({"jobs": [JOB], "start": "22:00 Europe/Paris"}, "nightly.yaml")
    night = tmp_path / "nights" / "nightly" / "20260101-000000"
    night.mkdir(parents=True)
    kept = {"config": config.digest, "started_s": utc(started), "deadline_s": None, "jobs": {}, "hours": 0.5}
    (night / "night.json").write_text(json.dumps(kept))
    window = find_window(config, tmp_path, utc(now))
    assert (window.stamp == night.name) is is_same
    assert window.hours == (0.5 if is_same else 0)


BAD = [
    ({"deadline": "6 o'clock", "jobs": [JOB]}, "deadline"),
    ({"deadline": "06:00 Europe/Nowhere", "jobs": [JOB]}, "no time zone"),
    ({"deadline": "06:00 ../../etc/passwd", "jobs": [JOB]}, "no time zone"),
    ({"deadline": "25:00 UTC", "jobs": [JOB]}, "06:00 Europe/Paris"),
    ({"jobs": [JOB], "start": "22:00 UTC", "deadline": "21:55 UTC"}, "nightly.yaml: the deadline '21:55 UTC' must"),
    ({"jobs": []}, "at least one job"),
    ({"jobs": [JOB, JOB]}, "two jobs are called"),
    ({"jobs": [{**JOB, "priority": 0}]}, "jobs.0.priority"),
    ({"jobs": [{**JOB, "budgets": {}}]}, "jobs.0.budgets: is not a known field"),
    ({"jobs": [{"launcher": "replay"}]}, "jobs.0.workload: is missing"),
    ({"jobs": [{**JOB, "name": "../up"}]}, "jobs.0.name"),
    ({"jobs": [JOB], "budget": {"hours": -1}}, "budget.hours"),
    ({"jobs": [JOB], "budget": {"usd": float("inf")}}, "budget.usd: must be finite"),
    ({"jobs": [{**JOB, "priority": float("inf")}]}, "jobs.0.priority: must be finite"),
    ({"jobs": [JOB], "budget": {"trials": True}}, "budget.trials: must not be `yes`"),
    ({"jobs": JOB}, "jobs: must be a list"),
    ({"jobs": [{**JOB, "name": "a"}, {**JOB, "name": "A"}]}, "two jobs are called 'A'"),
    ({"jobs": [{**JOB, "name": "a\n"}]}, "jobs.0.name: must be up to 36"),
    ({"jobs": [JOB], "name": "a\n"}, "name: must be up to 20"),
    ({"jobs": [JOB], "webhook_env": "HOOK\n"}, "webhook_env: must be the name"),
    ({"jobs": [JOB], "name": "a/b"}, "name"),
    ({"jobs": [JOB], "webhook_env": "https://hooks.example/secret"}, "name of an environment variable"),
    ({"matrix": {"workloads": []}}, "matrix.workloads"),
    ({"jobs": [JOB], "scrontab": {"partition": "a\n#SCRON --mail-user=x"}}, "scrontab.partition"),
    ({"jobs": [JOB], "scrontab": {"qos": "a\n"}}, "scrontab.qos: must be one word"),
    ({"jobs": [JOB], "scrontab": {"options": {"output": "-o x"}}}, "scrontab.options.output: must be one word"),
    ({"jobs": [JOB], "scrontab": {"options": {"time": "1"}}}, "set elsewhere"),
    ({"jobs": [JOB], "version": 2}, "version"),
    ({"jobs": [{**JOB, "knobs": ["nonsense"]}]}, "nightly.yaml: job 'wl2-replay-step_time': a knob"),
]


@pytest.mark.parametrize(("data", "says"), BAD, ids=[says for _, says in BAD])
def test_a_wrong_field_is_named_in_one_line(data, says):
    with pytest.raises(UserError) as raised:
        parse_nightly(data, "nightly.yaml")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_slurm_may_write_its_log_into_any_file():
    config = parse_nightly({"jobs": [JOB], "scrontab": {"options": {"output": "/logs/n-%j.out"}}}, "nightly.yaml")
    assert config.scrontab.options == {"output": "/logs/n-%j.out"}


def test_a_job_that_cannot_run_is_named_and_nothing_is_created(project, cli):
    Path("nightly.yaml").write_text(yaml.safe_dump({"jobs": [JOB, {"workload": "nope", "name": "x"}]}))
    message = cli.err(["nightly", "nightly.yaml"])
    assert "job 'x'" in message
    assert message.count("\n") == 1
    assert not Path("runs").exists()
    assert main(["nightly", "missing.yaml"]) == 2
    assert main(["nightly", "install", "nightly.yaml", "--cron"]) == 2


def test_a_matrix_is_every_combination_and_priorities_order_jobs(tmp_path):
    matrix = {"workloads": ["wl1", "wl2"], "launchers": ["a", "b"], "objectives": ["step_time", "cost"]}
    path = tmp_path / "n.yaml"
    path.write_text(yaml.safe_dump({"matrix": matrix, "jobs": [{**JOB, "name": "first", "priority": 5}]}))
    keys = [job.key for job in load_nightly(path).all_jobs]
    assert len(keys) == len(set(keys)) == 9
    assert keys[0] == "first"
    assert "wl2-b-cost" in keys


def test_shares_follow_priorities_in_whole_trials_and_never_exceed_the_rest():
    budget = Budget(trials=10, hours=6)
    left = find_remaining(budget, Spent(trials=4, hours=3))
    assert left["trials"] == 6
    assert left["usd"] is None
    assert split_remaining(left, 2, 3)["trials"] == 4
    assert split_remaining(left, 2, 3)["hours"] == pytest.approx(2)
    assert split_remaining(left, 1, 100)["trials"] == 1
    assert split_remaining(find_remaining(budget, Spent(trials=99)), 1, 1)["trials"] == 0
    assert find_lower_limits(split_remaining(left, 1, 1), Budget(hours=1), Spent(hours=0.5))["hours"] == pytest.approx(
        0.5
    )


def test_a_job_without_an_objective_takes_that_of_its_task_and_keeps_its_series(project):
    jobs = parse_nightly({"version": 1, "jobs": [JOB | {"constraints": ["peak_memory_gib <= 70"]}]}, "file").all_jobs
    assert [(job.objective, job.objective_name, job.key) for job in jobs] == [
        (None, "step_time", "wl2-replay-step_time")
    ]
    request = make_request(jobs[0], budget=3)
    assert (request.objective, request.constraints) == (None, ("peak_memory_gib <= 70",))
    (unknown,) = parse_nightly({"version": 1, "jobs": [JOB | {"workload": "nowhere"}]}, "file").all_jobs
    assert unknown.key == "nowhere-replay", "the search of the job says what is wrong with the card"


def test_dry_run_shows_jobs_and_repeated_configurations_and_writes_nothing(nightly_project, cli):
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


def test_installing_into_a_crontab_keeps_the_rest_and_replaces_its_own(nightly_project, monkeypatch):
    table = put_tables_tool(nightly_project, "crontab", monkeypatch)
    table.write_text("# mine\n5 5 * * * echo hello\n")
    write(start="22:00 Europe/Paris")
    for _ in range(2):
        assert main(["nightly", "install", "nightly.yaml", "--cron"]) == 0
    text = table.read_text()
    assert text.startswith("# mine\n5 5 * * * echo hello\n")
    assert text.count("0 22 * * *") == 1
    assert text.count("CRON_TZ=Europe/Paris") == 1


def test_a_table_that_is_not_utf8_is_kept_byte_by_byte(nightly_project, monkeypatch):
    table = put_tables_tool(nightly_project, "crontab", monkeypatch)
    table.write_bytes(b"# caf\xe9\n")
    write(start="22:00 Europe/Paris")
    assert main(["nightly", "install", "nightly.yaml", "--cron"]) == 0
    assert table.read_bytes().startswith(b"# caf\xe9\n# begin")


def test_a_crontab_that_cannot_be_run_is_named(nightly_project, monkeypatch, cli):
    put_tables_tool(nightly_project, "crontab", monkeypatch)
    (nightly_project / "tools/crontab").write_bytes(b"\x7fELF of another machine")
    write(start="22:00 Europe/Paris")
    assert "`crontab -l` does not work: " in cli.err(["nightly", "install", "nightly.yaml", "--cron"])


def test_reinstalling_into_a_scrontab_keeps_the_lines_around_it(nightly_project, monkeypatch):
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


def test_cron_warns_about_another_zone_and_systemd_about_a_skipped_time(nightly_project, monkeypatch, cli):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        write(start="02:30 Europe/Paris")
        assert "only cronie reads CRON_TZ" in cli.err(["nightly", "install", "nightly.yaml", "--cron", "--dry-run"], 0)
        assert "skips 02:30 on 20" in cli.err(["nightly", "install", "nightly.yaml", "--systemd", "--dry-run"], 0)
        write(start="02:30 UTC")
        assert cli.err(["nightly", "install", "nightly.yaml", "--cron", "--dry-run"], 0) == ""
    time.tzset()


def test_scrontab_warns_about_another_zone_and_a_missing_limit(nightly_project, monkeypatch, capsys):
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


def test_installed_commands_quote_hostile_paths(tmp_path):
    from cclsearch.nightly.config import parse_moment
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


def test_systemd_itself_accepts_the_units(tmp_path):
    from cclsearch.nightly.config import parse_moment
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


def test_systemd_units_are_written_to_the_users_folder(nightly_project, monkeypatch, cli):
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
