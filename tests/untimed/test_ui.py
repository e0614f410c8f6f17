"""`ccl-search ui`: what the pages show of runs, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nights import DECIDE, night, time_of
from paths import ROOT, TESTS
from scripted_launcher import ran
from starlette.testclient import TestClient
from waiting import wait_until

from cclsearch.cli import main
from cclsearch.record import ledger
from cclsearch.record.event import TrialFinished, TrialProposed, encode_line
from cclsearch.record.ledger import LEDGER_FILE, read_events
from cclsearch.run.annotations import read_annotations
from cclsearch.trace.ccl_bench import DASHBOARD
from cclsearch.ui.app import make_app
from cclsearch.ui.guard import TOKEN_HEADER, Permissions
from cclsearch.ui.run_index import RunIndex

EXAMPLE = ROOT / "runs" / "example-wl2"
TRACES = TESTS / "recorded" / "gloo-ddp2"
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
BASE = "http://127.0.0.1:8090"


@pytest.fixture
def runs(project: Path) -> Path:
    """A folder with a recorded run of 5 trials."""
    shutil.copytree(EXAMPLE, project / "runs" / "one")
    return project / "runs"


@pytest.fixture
def client(runs: Path) -> TestClient:
    return TestClient(make_app(runs, Permissions()), base_url=BASE)


def add_trials(folder: Path, numbers: range) -> None:
    """Append copies of trial 5 to a ledger."""
    events = [e for e in read_events(EXAMPLE / LEDGER_FILE) if getattr(e, "trial", None) == 5]
    with (folder / LEDGER_FILE).open("ab") as file:
        for number in numbers:
            for event in events:
                update: dict[str, object] = {"trial": number}
                if isinstance(event, TrialProposed):
                    update["config"] = type(event.config)({**event.config, "dp": number})
                file.write(encode_line(event.model_copy(update=update)))


def test_the_list_names_each_run_with_its_best_and_can_be_searched_by_tag(runs, client):
    shutil.copytree(EXAMPLE, runs / "two")
    assert main(["tag", "two", "paper"]) == 0
    page = client.get("/").text
    assert "9.548 s (recorded)" in page
    assert '<a href="/runs/one">' in page
    found = client.get("/", params={"q": "#paper h100"}).text
    assert '<a href="/runs/two">' in found
    assert '<a href="/runs/one">' not in found
    assert "1 of 2 runs" in found


def test_a_run_has_its_best_its_trials_and_its_chart(client):
    page = client.get("/runs/one").text
    assert "5 of 5 trials" in page
    assert 'class="winner"' in page
    data = client.get("/runs/one/chart.json").json()
    assert list(data["charts"]) == ["progress"]
    assert "(recorded)" in json.dumps(data["charts"])


def test_the_table_is_filtered_sorted_and_cut_into_pages_by_the_server(runs, client):
    add_trials(runs / "one", range(6, 256))
    assert "255 of 255 trials; 1 to 100, page 1 of 3" in client.get("/runs/one").text
    last = client.get("/runs/one", params={"page": "3", "sort": "knob.dp", "down": "0"}).text
    assert "201 to 255" in last
    assert last.index(">254</a>") < last.index(">255</a>")
    assert "1 of 255 trials" in client.get("/runs/one", params={"q": "dp=217 surrogate"}).text
    assert "0 of 255 trials" in client.get("/runs/one", params={"state": "failed", "q": "dp=217"}).text
    for odd in ({"page": "-1"}, {"page": "9" * 30}, {"page": "x"}, {"sort": "knob."}, {"state": HOSTILE}):
        answer = client.get("/runs/one", params=odd)
        assert answer.status_code == 200, odd
        assert HOSTILE not in answer.text


def test_only_what_a_ledger_gained_is_read_again(runs, monkeypatch):
    index = RunIndex(runs)
    assert len(index.view("one").rows) == 5
    add_trials(runs / "one", range(6, 7))
    decoded: list[bytes] = []
    real = ledger.decode_line
    monkeypatch.setattr(ledger, "decode_line", lambda line: decoded.append(line) or real(line))
    view = index.view("one")
    assert len(view.rows) == 6
    assert {json.loads(line)["trial"] for line in decoded} == {6}
    num_decoded = len(decoded)
    assert len(index.view("one").rows) == 6
    assert len(decoded) == num_decoded
    (runs / "one" / LEDGER_FILE).write_bytes((EXAMPLE / LEDGER_FILE).read_bytes())
    assert len(index.view("one").rows) == 5, "the ledger was replaced by a shorter one"


def test_a_long_ledger_is_read_in_parts_and_the_page_says_so(runs):
    add_trials(runs / "one", range(6, 400))
    view = RunIndex(runs).view("one", 0.0)
    assert not view.is_complete
    assert 0 < view.share_read < 1
    while not view.is_complete:
        view.refresh(0.02)
    assert len(view.rows) == 399


def test_text_from_outside_is_never_markup(runs):
    events = list(read_events(EXAMPLE / LEDGER_FILE))
    with (runs / "one" / LEDGER_FILE).open("wb") as file:
        for event in events:
            if isinstance(event, TrialProposed):
                config = type(event.config)({**event.config, "tp": HOSTILE, "a<b>": HOSTILE})
                event = event.model_copy(update={"config": config, "rationale": HOSTILE, "proposer": HOSTILE})
            if isinstance(event, TrialFinished):
                event = event.model_copy(update={"outcome": event.outcome.model_copy(update={"notes": (HOSTILE,)})})
            file.write(encode_line(event))
    assert main(["note", "one", HOSTILE]) == 0
    odd = runs / "<b>x & 'y'"
    shutil.copytree(runs / "one", odd)
    pages = TestClient(make_app(runs, Permissions()), base_url=BASE)
    name = "%3Cb%3Ex%20%26%20%27y%27"
    own = [f"/runs/{name}", f"/runs/{name}/trials/2", f"/runs/{name}/trials/99"]
    others = [f"/compare?run=one&run={name}&a=one/1&b=one/2", "/leaderboard?metric=<script>", "/nights/<script>"]
    for path in ("/", "/leaderboard", *own, *others):
        page = pages.get(path)
        assert page.status_code in (200, 404), path
        assert "<script>doc" not in page.text, path
        assert "<img" not in page.text, path
        assert "<b>x" not in page.text, path
    assert "&lt;script&gt;" in pages.get(f"/runs/{name}").text


def test_a_damaged_ledger_is_shown_with_what_is_wrong(runs, client):
    path = runs / "one" / LEDGER_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:8], b'{"event":"trial_finished","trial":2,\n', *lines[8:]]))
    page = client.get("/runs/one").text
    assert "line 9 (trial_finished of trial 2)" in page
    assert "damaged ledger" in client.get("/").text
    (runs / "one" / "search.yaml").write_text("[")
    assert "cannot be read" in TestClient(make_app(runs, Permissions()), base_url=BASE).get("/").text


def test_a_run_that_is_deleted_while_it_is_shown_is_said_to_be_gone(runs, client):
    assert client.get("/runs/one").status_code == 200
    shutil.rmtree(runs / "one")
    page = client.get("/runs/one")
    assert page.status_code == 404
    assert "was deleted" in page.text
    assert "No runs yet" in client.get("/").text


def test_only_files_of_the_trial_are_shown_as_plain_text_without_secrets(runs, client):
    folder = runs / "one" / "trials" / "0002"
    secret = "sk-ant-" + "api03-" + "q8Zr5Kx2Wm7Tn4Vb9Yc3Lp6Hd1Js0Gf" * 2
    (folder / "stdout.log").write_text(f"<script>1</script> OPENAI_API_KEY={secret}\n")
    (runs.parent / "private.json").write_text("secret")
    os.symlink(runs.parent / "private.json", folder / "link.json")
    os.mkfifo(folder / "fifo.log")
    path = "/runs/one/trials/2/files/"
    shown = client.get(path + "trials/0002/stdout.log")
    assert shown.headers["content-type"].startswith("text/plain")
    assert shown.headers["x-content-type-options"] == "nosniff"
    assert secret not in shown.text
    assert "<script>1</script>" in shown.text
    assert "trials/0002/config.json" in client.get("/runs/one/trials/2").text
    others = ["link.json", "fifo.log", "../0001/config.json", "../../search.yaml", "..%2f..%2fsearch.yaml"]
    outside = ["../../private.json", "..%2f..%2fprivate.json", "%2fetc%2fpasswd", "search.yaml"]
    for odd in (*outside, *(f"trials/0002/{name}" for name in others)):
        assert client.get(path + odd).status_code == 404, odd
    for odd in (
        "/runs/%2e%2e",
        "/runs/..%2fone",
        "/runs/one%00",
        "/static/../app.py",
        "/static/app.py",
    ):
        assert client.get(odd).status_code == 404, odd


def test_other_hosts_are_refused_and_pages_may_load_nothing_from_elsewhere(client):
    for host in ("evil.example", "evil.example:8090", "127.0.0.1.evil.example", "", "localhost.evil:1"):
        assert client.get("/", headers={"host": host}).status_code == 421, host
    for host in ("localhost:9000", "[::1]:1", "127.0.0.1"):
        assert client.get("/", headers={"host": host}).status_code == 200, host
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe-eval" not in policy
    assert "http" not in policy


def test_changes_need_the_option_the_token_and_the_same_origin(runs, client):
    tag = {"run": "one", "text": "paper"}
    assert "--allow-notes" in client.post("/change/tag", json=tag).json()["error"]
    allowed = Permissions(notes=True)
    own = {TOKEN_HEADER: allowed.token}
    writer = TestClient(make_app(runs, allowed), base_url=BASE)
    assert "token" in writer.post("/change/tag", json=tag).json()["error"]
    assert "token" in writer.post("/change/tag", json=tag, headers={TOKEN_HEADER: "x"}).json()["error"]
    other = writer.post("/change/tag", json=tag, headers={**own, "origin": "http://127.0.0.1:1"})
    assert (other.status_code, "another page" in other.json()["error"]) == (403, True)
    assert read_annotations(runs / "one").tags == ()
    assert "--allow-start" in writer.post("/change/stop", json=tag, headers=own).json()["error"]
    assert writer.post("/change/tag", json=tag, headers={**own, "origin": BASE}).json() == {"message": "added"}
    assert writer.post("/change/note", json={**tag, "trial": "2"}, headers=own).status_code == 200
    assert "no trial 77" in writer.post("/change/note", json={**tag, "trial": "77"}, headers=own).json()["error"]
    assert "is not a tag" in writer.post("/change/tag", json={"run": "one", "text": "a;b"}, headers=own).json()["error"]
    assert "no run" in writer.post("/change/tag", json={"run": "../one", "text": "a"}, headers=own).json()["error"]
    assert "JSON object" in writer.post("/change/tag", content=b"[", headers=own).json()["error"]
    found = read_annotations(runs / "one")
    assert (found.tags, [note.trial for note in found.notes]) == (("paper",), [2])
    page = writer.get("/runs/one").text
    assert "#paper" in writer.get("/").text
    assert "note on trial 2: paper" in page
    assert allowed.token not in page


def test_the_leaderboard_separates_works_and_normalizes_by_accelerators_and_price(runs, client):
    assert main(["run", "-w", "wl5", "--budget", "2", "--name", "sim", "--quiet"]) == 0
    page = client.get("/leaderboard").text
    assert page.count("<h2>") == 2, "other work, and figures of another origin, are never in one table"
    assert "simulated" in page
    assert "/runs/one/trials/5" in page
    assert "9.548 s" in page
    assert "152.8 accelerator-s" in client.get("/leaderboard", params={"view": "accelerator"}).text  # 9.5477 s x 16
    by_cost = {"view": "cost", "price.0": "1", "price.1": "3"}
    assert "0.1273 money" in client.get("/leaderboard", params=by_cost).text  # 9.5477 s x 16 x 3 / 3600
    assert "8,236,874 tokens per money" in client.get("/leaderboard", params=by_cost).text  # 6864.06 x 3600 / 3
    everything = client.get("/leaderboard", params={"all": "1", "metric": "ttft"}).text
    assert all(f">{name}</th>" in everything for name in DASHBOARD)
    assert len(DASHBOARD) == len(set(DASHBOARD)) == 26


def test_nights_are_listed_with_their_history_and_lead_to_their_runs(nightly_project):
    night(code=0)
    DECIDE.append(lambda job: ran(job, 0.5 * time_of(job)))
    latest = night(code=0)
    pages = TestClient(make_app(nightly_project / "runs", Permissions()), base_url=BASE)
    assert f'<a href="/nights/{latest.name}">' in pages.get("/nights").text
    page = pages.get(f"/nights/{latest.name}").text
    assert page.index("improved") < page.index("first"), "the latest night comes first"
    assert f'<a href="/runs/{latest.jobs[0].run}">' in page
    chart = pages.get(f"/nights/{latest.name}/chart.json").json()["described"]["nights0"]
    assert chart["title"] == "a, night by night"
    assert chart["summary"].count(";") == 1
    for odd in ("..", "%2e%2e", "..%2fone", "nothing"):
        assert pages.get(f"/nights/{odd}/chart.json").status_code == 404, odd


def test_the_traces_of_a_trial_answer_the_names_of_the_dashboard(runs, client):
    assert "has no traces" in client.get("/runs/one/trials/5/metrics").text
    shutil.copytree(TRACES, runs / "one" / "trials" / "0005" / "trace")
    before = client.get("/leaderboard", params={"metric": "collective_vol_allreduce"}).text
    assert "Read its traces" in client.get("/runs/one/trials/5").text
    page = client.get("/runs/one/trials/5/metrics").text
    assert all(f">{name}</th>" in page for name in DASHBOARD)
    volume = re.search(r"collective_vol_allreduce</th><td class=\"num\">([^<]+)<", page)
    assert volume[1].endswith("GB/step")
    assert volume[1] not in before
    assert volume[1] in client.get("/leaderboard", params={"metric": "collective_vol_allreduce"}).text
    assert "ccl-search what-if" in page, "a name that no trace answers says what does"


def test_two_trials_are_compared_knob_by_knob(client):
    page = client.get("/compare", params={"run": "one", "a": "one/1", "b": "one/5"}).text
    assert page.count('class="differs"') > 3
    assert "24.44 s recorded" in page
    assert "there is no trial 99" in client.get("/compare", params={"run": "one", "a": "one/1", "b": "one/99"}).text
    assert "there is no trial" in client.get("/compare", params={"run": "one", "a": "one/1", "b": "two/1"}).text


def test_a_port_that_is_taken_and_a_missing_folder_are_one_line(runs, capsys, cli):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["ui", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be used (Address already in use): choose another (0: any free one)" in capsys.readouterr().err
    assert main(["ui", "--port", "70000"]) == 2
    assert "is not a folder" in cli.err(["ui", "--runs", "nowhere"])


@pytest.fixture
def served(runs: Path) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Address, token and process of a server that may start searches."""
    command = [sys.executable, "-m", "cclsearch", "ui", "--port", "0", "--allow-start"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address, _, token = server.stdout.readline().split()[1].partition("#token=")
        yield address, token, server
    finally:
        server.kill()
        server.wait()


def test_a_search_is_started_stopped_and_outlives_the_server(runs, served):
    import httpx

    address, token, server = served
    client = httpx.Client(base_url=address, headers={TOKEN_HEADER: token}, timeout=60)
    bad = client.post("change/start", json={"workload": "wl2", "budget": "3", "name": "--json"}).json()
    assert "a run's name must be" in bad["error"]
    assert "no workload" in client.post("change/start", json={"workload": "$(id)"}).json()["error"]
    slow = {"workload": "wl2", "launcher": "replay", "budget": "100000", "name": "long"}
    assert client.post("change/start", json=slow).json()["message"].startswith("search of wl2 started")
    again = client.post("change/start", json=slow).json()
    assert "long" in again["error"]
    wait_until(lambda: "trial_finished" in read_text(runs / "long" / LEDGER_FILE))
    stopped = client.post("change/stop", json={"run": "long"}).json()
    if "message" in stopped:  # else all of the recording was searched already
        wait_until(lambda: '"search_stopped"' in read_text(runs / "long" / LEDGER_FILE) or not lock_of(runs / "long"))
    wait_until(lambda: not lock_of(runs / "long"))
    assert "does not run any more" in client.post("change/stop", json={"run": "long"}).json()["error"]
    assert client.post("change/start", json={**slow, "budget": "40", "name": "kept"}).status_code == 200
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=30) == 0
    wait_until(lambda: '"search_ended"' in read_text(runs / "kept" / LEDGER_FILE))


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def lock_of(folder: Path) -> bool:
    return (folder / "lock").exists()
