"""How a night ends: stops, messages to a chat, and pruning."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from command_line import run_command
from nights import BASE, DECIDE, night, run_stopped, time_of, write
from scripted_launcher import Ending, failed, ran

from cclsearch.cli import main
from cclsearch.core.values import FailureKind
from cclsearch.launch.base import Job
from cclsearch.loop.jobs import StopSignal
from cclsearch.nightly.run import NightBusyError, run_night
from cclsearch.record.lock import FolderLock
from cclsearch.run.folder import load_run
from cclsearch.tracking.webhook import _SameHost


class _Chat(BaseHTTPRequestHandler):
    received: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_the_chat_gets_the_message_and_its_url_is_in_no_file(nightly_project, monkeypatch):
    with HTTPServer(("127.0.0.1", 0), _Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/hook/very-secret-part"
        monkeypatch.setenv("NIGHT_HOOK", url)
        summary = night(code=0, webhook_env="NIGHT_HOOK", name="n1")
        server.shutdown()
    assert "1 job: 1 without an earlier night" in _Chat.received[-1]["text"]
    assert summary.notes == ()
    content = b"".join(p.read_bytes() for p in nightly_project.rglob("*") if p.is_file())
    assert b"very-secret-part" not in content


def test_a_night_that_cannot_be_written_is_trouble_and_the_chat_gets_a_message(project, monkeypatch):
    job = {"workload": "wl2", "launcher": "replay", "name": "a", "budget": {"trials": 2}}
    write(jobs=[job], webhook_env="NIGHT_HOOK")
    with HTTPServer(("127.0.0.1", 0), _Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NIGHT_HOOK", f"http://127.0.0.1:{server.server_address[1]}/hook")
        # inputs, ledgers and pages are larger; a lock and the state of a running night are not
        done = run_command("nightly", "nightly.yaml", "--once", max_file_bytes=2_000)
        server.shutdown()
    assert done.returncode == 4, done.stderr
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot write" in _Chat.received[-1]["text"]


class _Moved(BaseHTTPRequestHandler):
    """Sends every message to another host, and repeats the address in its answer."""

    asked: list[str] = []

    def do_POST(self) -> None:
        self.asked.append(self.headers["Host"])
        self.send_response(307, f"moved {self.path}")
        self.send_header("Location", f"http://localhost:{self.server.server_address[1]}{self.path}")
        self.end_headers()
        self.wfile.write(self.path.encode())

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        pass


def test_a_redirect_of_the_chat_to_another_host_is_not_followed_and_its_answer_is_not_shown(
    nightly_project, monkeypatch, capsys
):
    with HTTPServer(("127.0.0.1", 0), _Moved) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NIGHT_HOOK", f"http://127.0.0.1:{server.server_address[1]}/hook/very-secret-part")
        summary = night(code=0, webhook_env="NIGHT_HOOK")
        server.shutdown()
    assert summary.notes[-1] == "the message may not have arrived: status 307"
    assert [host.split(":")[0] for host in _Moved.asked] == ["127.0.0.1"]
    output = capsys.readouterr()
    kept = b"".join(path.read_bytes() for path in nightly_project.rglob("*") if path.is_file())
    assert b"very-secret-part" not in kept + (output.out + output.err).encode()


@pytest.mark.parametrize(
    ("target", "is_followed"),
    [
        ("http://chat.example/hook", False),
        ("https://chat.example/moved", True),
        ("https://chat.example:444/hook", False),
        ("https://chat.example@other.example/hook", False),
        ("//other.example/hook", False),
    ],
)
def test_a_chat_is_followed_only_over_https_on_the_same_host(target, is_followed):
    from email.message import Message
    from io import BytesIO
    from urllib.request import Request

    request, headers = Request("https://chat.example/hook"), cast(Any, Message())
    new = _SameHost().redirect_request(request, BytesIO(), 302, "Found", headers, target)
    assert (new is not None) == is_followed


def test_an_unreachable_chat_is_a_note_and_not_a_failure(nightly_project, monkeypatch):
    monkeypatch.setenv("NIGHT_HOOK", "http://127.0.0.1:1/very-secret-part")
    summary = night(code=0, webhook_env="NIGHT_HOOK")
    assert "may not have arrived" in summary.notes[-1]
    kept = Path("runs") / "nights" / "nightly" / summary.night
    for name in ("summary.json", "summary.md", "report.html"):
        assert "may not have arrived" in (kept / name).read_text()
    assert "very-secret-part" not in summary.notes[-1]
    monkeypatch.setenv("NIGHT_HOOK", "file:///etc/passwd")
    assert "is not an http" in night(code=0, webhook_env="NIGHT_HOOK").notes[-1]


def test_a_webhooks_url_is_a_secret_in_messages_and_jobs(nightly_project, monkeypatch, capsys):
    from cclsearch.launch.environment import inherited_environment

    url = "https://chat.example/hook/very-hidden-part"
    monkeypatch.setenv("CHAT_ADDRESS", url + "\n")
    DECIDE.append(lambda job: failed(FailureKind.CRASHED).model_copy(update={"message": f"no answer from {url}"}))
    write(webhook_env="CHAT_ADDRESS", jobs=[{**BASE["jobs"][0], "objective": f"no {url}"}])
    assert main(["nightly", "nightly.yaml"]) == 2
    output = capsys.readouterr()
    assert "very-hidden-part" not in output.out + output.err
    assert "CHAT_ADDRESS" not in inherited_environment()
    monkeypatch.setattr("cclsearch.nightly.run.send_webhook", lambda variable, text: None)
    summary = night(code=1, webhook_env="CHAT_ADDRESS", jobs=BASE["jobs"])
    assert "very-hidden-part" not in summary.model_dump_json()
    content = b"".join(p.read_bytes() for p in Path("runs").rglob("*") if p.is_file())
    assert b"very-hidden-part" not in content


def test_a_stopped_night_continues_the_same_search(nightly_project):
    from cclsearch.nightly.config import load_nightly

    stop, count = StopSignal(), iter(range(100))

    def stopping(job: Job) -> Ending:
        if next(count) == 2:
            stop.request("stopped by the test")
            return None
        return ran(job, time_of(job))

    DECIDE.append(stopping)
    interrupted = run_night(load_nightly(write()), Path("runs").absolute(), stop=stop)
    DECIDE.append(lambda job: ran(job, time_of(job)))
    assert load_run(Path("runs") / str(interrupted.jobs[0].run)).status == "stopped"
    again = night(code=0)
    assert again.jobs[0].run == interrupted.jobs[0].run
    assert again.jobs[0].resumed
    run = load_run(Path("runs") / str(again.jobs[0].run))
    assert run.status == "ended"
    assert len({trial.config for trial in run.state.trials.values()}) == 6


def test_a_killed_night_is_continued_with_what_it_spent(nightly_project):
    from cclsearch.nightly import window as module
    from cclsearch.nightly.config import load_nightly

    first = night(budget={"trials": 8})
    home = Path("runs") / "nights" / "nightly"
    for name in ("summary.json", "summary.md", "report.html"):
        (home / first.night / name).unlink()
    config = load_nightly(Path("nightly.yaml"))
    found = module.find_window(config, Path("runs").absolute(), time.time())
    assert found.stamp == first.night
    assert found.jobs == {"a": first.jobs[0].run}
    again = night(budget={"trials": 8})
    assert again.night == first.night
    assert again.spent.trials == 6
    other = load_nightly(write(budget={"trials": 9}))
    (home / first.night / "summary.json").unlink()
    assert module.find_window(other, Path("runs").absolute(), time.time()).stamp != first.night


def test_a_night_stopped_by_a_signal_is_continued_and_its_spending_counts(nightly_project):
    jobs = [{**BASE["jobs"][0], "name": "a"}, {**BASE["jobs"][0], "name": "b"}]
    more: dict[str, Any] = {"jobs": jobs, "budget": {"trials": 7}}
    interrupted = run_stopped(2, **more)
    assert interrupted.stopped
    assert "stopped before its end" in interrupted.text
    assert interrupted.spent.trials == 2
    again = night(**more)
    assert again.night == interrupted.night
    assert not again.stopped
    assert again.spent.trials == 7
    assert [job.trials for job in again.jobs] == [4, 3]
    assert night(**more).night != interrupted.night


def test_an_interrupted_trial_counts_for_the_night_that_finishes_it(nightly_project):
    interrupted = run_stopped(2)
    assert interrupted.spent.trials == 2
    again = night(budget={"trials": 3})
    assert (again.jobs[0].run, again.jobs[0].resumed) == (interrupted.jobs[0].run, True)
    assert (again.spent.trials, again.jobs[0].trials) == (3, 3)
    assert len(load_run(Path("runs") / str(interrupted.jobs[0].run)).state.trials) == 5


def test_a_stop_after_the_last_trial_completes_the_night(nightly_project):
    interrupted = run_stopped(4, budget={"trials": 4})
    assert interrupted.spent.trials == 4
    assert not interrupted.stopped
    assert night(budget={"trials": 4}).night != interrupted.night


def test_two_nights_never_overlap(nightly_project, capsys):
    from cclsearch.nightly.config import load_nightly

    home = Path("runs") / "nights"
    home.mkdir(parents=True)
    with FolderLock(home, purpose="nightly"):
        with pytest.raises(NightBusyError):
            run_night(load_nightly(write()), Path("runs").absolute(), stop=StopSignal())
        assert main(["nightly", "nightly.yaml"]) == 5
    assert "in use by process" in capsys.readouterr().err
    assert sorted(p.name for p in Path("runs").iterdir()) == ["nights"]


def test_a_process_that_runs_every_night_survives_a_failing_night(nightly_project, monkeypatch, capsys):
    from cclsearch.nightly import run

    starts = iter([True, True, False])
    profile = Path("launchers/sim.yaml")
    valid = profile.read_text()

    def next_start(*given: object) -> bool:
        """The profile is broken at the first start and repaired at the second."""
        broken = not profile.read_text().endswith("nonsense: [\n")
        profile.write_text(valid + "nonsense: [\n" if broken else valid)
        return next(starts)

    monkeypatch.setattr(run, "wait_for_start", next_start)
    write(start="22:00 UTC")
    assert main(["nightly", "nightly.yaml", "--quiet"]) == 0
    output = capsys.readouterr()
    assert output.err.count("this night failed: ") == 1
    assert "1 job: 1 without an earlier night" in output.out


def test_pruning_does_not_touch_a_run_that_tonight_continued(nightly_project):
    interrupted = run_stopped(1, start="22:00 UTC")
    summary = night(keep={"nights": 1})
    assert summary.jobs[0].resumed
    assert summary.pruned.trials == 0
    trials = Path("runs") / str(summary.jobs[0].run) / "trials"
    assert len(list(trials.glob("*/result.json"))) == 6
    night(keep={"nights": 2})
    assert len(list(trials.glob("*/result.json"))) == 6
    assert night(keep={"nights": 2}).pruned.nights == (summary.night,)
    winners = {one.jobs[0].best.trial for one in (interrupted, summary) if one.jobs[0].best}
    assert {int(path.parent.name) for path in trials.glob("*/result.json")} == winners


def test_pruning_counts_and_removes_traces_on_scratch_and_nothing_else(nightly_project):
    scratch = nightly_project / "scratch"
    Path("launchers/sim.yaml").write_text(f"launcher: scripted-night\nscratch: {scratch}\n")
    first = night().jobs[0]
    assert first.best is not None
    trials = Path("runs") / str(first.run) / "trials"
    winner, loser, foreign = first.best.trial, *[n for n in range(1, 7) if n != first.best.trial][:2]
    for number in (winner, loser):
        held = scratch / f"{first.run}-t{number:04d}-a1-00c0ffee" / "trace"
        held.mkdir(parents=True)
        (held / "rank0.json").write_bytes(b"x" * 5000)
        (trials / f"{number:04d}" / "trace").symlink_to(held)
    others = scratch / "others-t0001-a1" / "trace"
    others.mkdir(parents=True)
    (scratch / f"{first.run}-t{loser:04d}-a1-00c0ffee" / "out").symlink_to(others)
    (trials / f"{foreign:04d}" / "trace").symlink_to(others)
    summary = night(keep={"nights": None, "gib": 4000 / 2**30})
    assert summary.pruned.trials == 5
    assert summary.pruned.gib > 5000 / 2**30
    kept = sorted(path.name for path in scratch.iterdir())
    assert kept == sorted([f"{first.run}-t{winner:04d}-a1-00c0ffee", "others-t0001-a1"])
    assert others.is_dir()


def test_pruning_keeps_winners_ledgers_and_the_targets_of_links(nightly_project):
    first = night()
    run = Path("runs") / str(first.jobs[0].run)
    outside = nightly_project / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    assert first.jobs[0].best is not None
    best = run / "trials" / f"{first.jobs[0].best.trial:04d}"
    loser = next(p for p in sorted((run / "trials").iterdir()) if p != best)
    (loser / "link").symlink_to(outside)
    (run / "trials" / "0999").symlink_to(outside)
    (Path("runs") / "nightly-20300000-000001-a").symlink_to(outside)
    second = night(keep={"nights": 1})
    assert second.pruned.trials == 5
    assert second.pruned.nights == (first.night,)
    assert (outside / "precious").read_text() == "keep me"
    assert (best / "result.json").is_file()
    assert not loser.exists()
    assert load_run(run).state.best is not None
    third = night(keep={"nights": None, "gib": 1e-9})
    assert third.pruned.trials > 0
    tonight = Path("runs") / str(third.jobs[0].run) / "trials"
    assert len(list(tonight.glob("*/result.json"))) == 6


def test_pruning_keeps_the_winner_of_a_renamed_run_and_accepts_a_damaged_summary(nightly_project):
    first = night()
    run = Path("runs") / str(first.jobs[0].run)
    assert first.jobs[0].best is not None
    named = next(n for n in range(1, 7) if n != first.jobs[0].best.trial)
    kept = Path("runs") / "nights" / "nightly" / first.night / "summary.json"
    data = json.loads(kept.read_text())
    data["jobs"][0]["best"]["trial"] = named
    kept.write_text(json.dumps(data))
    moved = run.rename(run.with_name(f"{run.name}-old"))
    second = night(keep={"nights": 1})
    assert second.pruned.trials == 4
    assert {int(path.name) for path in (moved / "trials").iterdir()} == {named, first.jobs[0].best.trial}
    kept.write_text('{"jobs": 3}')
    assert night(keep={"nights": 1}).pruned.trials == 6


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"ANTHROPIC_BASE_URL": "http://127.0.0.1:9"}, "Connection refused"),
        ({"ANTHROPIC_API_KEY": ""}, "ANTHROPIC_API_KEY is not set"),
        (
            {"ANTHROPIC_BASE_URL": "https://api.anthropic.com", "ALL_PROXY": "socks5://127.0.0.1:1"},
            "ALL_PROXY is a SOCKS",
        ),
    ],
)
def test_a_night_goes_on_without_its_llm_and_its_summary_says_so(project, monkeypatch, variables, why):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-x")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    job = {"workload": "wl2", "launcher": "replay", "name": "a", "budget": {"trials": 3}}
    (summary,) = night(code=0, jobs=[{**job, "llm": "anthropic:m"}]).jobs
    assert summary.trials == 3
    assert "searched without the LLM since trial" in summary.text
    assert why in summary.text
