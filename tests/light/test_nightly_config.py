"""`nightly.yaml` and its clock: errors by field, days with 23 and 25 hours, fair shares of the budget."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.nightly.clock import parse_moment
from cclsearch.nightly.config import Budget, load_nightly, parse_nightly
from cclsearch.nightly.night import make_request
from cclsearch.nightly.share import Spent, find_lower_limits, find_remaining, split_remaining
from cclsearch.nightly.window import find_window

JOB = {"workload": "wl2", "launcher": "replay"}


def utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_a_night_never_lets_an_llm_add_to_a_search_space() -> None:
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
def test_a_moment_is_the_next_one_by_the_zones_own_clock(now: str, moment: str, expected: str) -> None:
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
def test_a_night_without_a_deadline_ends_before_the_next_start(
    tmp_path: Path, started: str, now: str, is_same: bool
) -> None:
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
def test_a_wrong_field_is_named_in_one_line(data: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_nightly(data, "nightly.yaml")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_slurm_may_write_its_log_into_any_file() -> None:
    config = parse_nightly({"jobs": [JOB], "scrontab": {"options": {"output": "/logs/n-%j.out"}}}, "nightly.yaml")
    assert config.scrontab.options == {"output": "/logs/n-%j.out"}


def test_a_job_that_cannot_run_is_named_and_nothing_is_created(project: Path, cli) -> None:
    Path("nightly.yaml").write_text(yaml.safe_dump({"jobs": [JOB, {"workload": "nope", "name": "x"}]}))
    message = cli.err(["nightly", "nightly.yaml"])
    assert "job 'x'" in message
    assert message.count("\n") == 1
    assert not Path("runs").exists()
    assert main(["nightly", "missing.yaml"]) == 2
    assert main(["nightly", "install", "nightly.yaml", "--cron"]) == 2


def test_a_matrix_is_every_combination_and_priorities_order_jobs(tmp_path: Path) -> None:
    matrix = {"workloads": ["wl1", "wl2"], "launchers": ["a", "b"], "objectives": ["step_time", "cost"]}
    path = tmp_path / "n.yaml"
    path.write_text(yaml.safe_dump({"matrix": matrix, "jobs": [{**JOB, "name": "first", "priority": 5}]}))
    keys = [job.key for job in load_nightly(path).all_jobs]
    assert len(keys) == len(set(keys)) == 9
    assert keys[0] == "first"
    assert "wl2-b-cost" in keys


def test_shares_follow_priorities_in_whole_trials_and_never_exceed_the_rest() -> None:
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


def test_a_job_without_an_objective_takes_that_of_its_task_and_keeps_its_series(project: Path) -> None:
    jobs = parse_nightly({"version": 1, "jobs": [JOB | {"constraints": ["peak_memory_gib <= 70"]}]}, "file").all_jobs
    assert [(job.objective, job.objective_name, job.key) for job in jobs] == [
        (None, "step_time", "wl2-replay-step_time")
    ]
    request = make_request(jobs[0], budget=3)
    assert (request.objective, request.constraints) == (None, ("peak_memory_gib <= 70",))
    (unknown,) = parse_nightly({"version": 1, "jobs": [JOB | {"workload": "nowhere"}]}, "file").all_jobs
    assert unknown.key == "nowhere-replay", "the search of the job says what is wrong with the card"
